"""An export's weights, quantized again: which, in what format, and how far the result is from them.

A weight is read once, when the first of its tensors is written. One that is still what the base's tensors say keeps
them, bit for bit: what was not trained comes out as it was published.
"""

import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from rich.console import Console
from torch import nn
from transformers import PreTrainedModel

# semi-private: transformers/core_model_loading.py, transformers 5.23
from transformers.core_model_loading import dot_natural_key

from shardwright.errors import UserError, a_type
from shardwright.files.arrays import Array, Slices, is_finite, shaped_like, whole
from shardwright.layout.auto import layers_list
from shardwright.layout.plan_checks import collapse
from shardwright.layout.roles import Roles
from shardwright.model.base_storage import quantization_settings
from shardwright.model.classifier import head_of
from shardwright.models.experts.expert_families import MXFP4, experts_modules
from shardwright.report.lines import say, say_table
from shardwright.weights.formats import fp8, integers, mxfp4
from shardwright.weights.formats.format import DEQUANTIZED, Format
from shardwright.weights.formats.plain_weights import PackedWeight
from shardwright.weights.hub_read import HubWeights
from shardwright.weights.lazy_tensors import Lazy
from shardwright.weights.names import first_names

SAME = "same"
_BLOCK, _GROUP = 128, 32
_FEW, _FLAT = 64, 16  # a projection to few numbers, and how many times longer its other side is, stays as it is
_PLAIN = "--format bf16"


@dataclass(frozen=True)
class Scheme:
    """A format to quantize to, where the base has no say."""

    form: Format
    settings: dict[str, Any]  # the quantization_config
    left_out: str = "modules_to_not_convert"  # its entry that lists the modules which are left out
    fused: bool = False  # it holds all experts of a layer together, and these alone
    # whether loaders read a weight of this shape that the format can hold, beside others of at most so many rows
    is_read: Callable[[Sequence[int], int], bool] = lambda shape, rows: True


def _packed(form: Format, name: str, **weights: Any) -> Scheme:
    """A scheme of compressed-tensors, as Kimi-K2.5 and Kimi-K3 have it but for the names of what is left out."""
    common = {"dynamic": False, "group_size": _GROUP, "num_bits": 4, "strategy": "group", "symmetric": True}
    group = {"input_activations": None, "output_activations": None, "targets": ["Linear"], "weights": common | weights}
    settings = {
        "config_groups": {"group_0": {**group, "format": name}},
        "format": name,
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }
    return Scheme(form, settings, left_out="ignore")


def _in_equal_blocks(shape: Sequence[int], rows: int) -> bool:
    """True if loaders read a weight in blocks rightly, beside weights of the same inputs with at most so many ``rows``.

    transformers takes blocks for equally large (Fp8Dequantize, 5.23). vLLM joins weights of the same inputs only where
    a block ends (validate_fp8_block_shape in layers/quantization/utils/fp8_utils.py, 0.33); where all are smaller than
    a block the model is a toy, which transformers reads.
    """
    equal = all(size <= _BLOCK or size % _BLOCK == 0 for size in shape)
    return equal and (shape[0] % _BLOCK == 0 or rows < _BLOCK)


_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [_BLOCK, _BLOCK]}
# the first that fits the model is taken
SCHEMES: dict[str, tuple[Scheme, ...]] = {
    "fp8": (Scheme(fp8.BLOCKS, _FP8, is_read=_in_equal_blocks),),
    "mxfp4": (
        Scheme(mxfp4.GPT_OSS, {"quant_method": "mxfp4"}, fused=True),
        _packed(mxfp4.PACKED, "mxfp4-pack-quantized", type="float", scale_dtype="torch.uint8"),
    ),
    "int4": (_packed(integers.PACKED, "pack-quantized", type="int"),),
}
_UNWRITTEN = f"--format fp8 or int4; or {_PLAIN}, from which its own tools make it"


@dataclass
class QuantizedTensors:
    """An export's tensors, some of them quantized."""

    asked: str
    settings: Mapping[str, Any]  # the quantization_config
    forms: Mapping[str, Format]  # plain name -> format of each weight that is quantized
    published: Mapping[str, PackedWeight]  # plain name -> the base's tensors of a weight
    errors: dict[str, float] = field(default_factory=dict)  # plain name -> relative error, once it is written
    kept: list[str] = field(default_factory=list)  # those whose tensors are the base's
    unread: Sequence[str] = ()  # linear weights that are not quantized, since no loader would read them
    _known: dict[Any, Mapping[str, torch.Tensor]] = field(default_factory=dict)

    def tensors(self, plain: Mapping[str, Lazy]) -> dict[str, Lazy]:
        """``plain`` with the tensors of its format in the place of each weight that is quantized.

        Raises UserError if a format can't hold a weight; nothing is read.
        """
        found: dict[str, Lazy] = {}
        for name, lazy in plain.items():
            found |= self._parts(name, lazy) if name in self.forms else {name: lazy}
        return found

    def carried(self, base: HubWeights) -> dict[str, Lazy]:
        """The base's tensors beside the model's own, as they are in its files where this export has that format."""
        forms = set(self.forms.values())
        found: dict[str, Array] = dict(base.untrained)
        for name, weight in self.published.items():
            if name in found and weight.form in forms:
                del found[name]
                found |= {weight.stem + tail: part for tail, part in weight.parts.items()}
        return {name: Lazy.of(array) for name, array in found.items()}

    def _parts(self, name: str, lazy: Lazy) -> dict[str, Lazy]:
        form, weight = self.forms[name], self.published.get(name)
        base = weight if weight is not None and weight.form is form else None
        try:
            made = self._likes(form, lazy.like, base)
            if base is not None:
                _check_alike(made, base)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:  # settings are the user's too
            why = f"{form.title} is written as its loaders read it"
            raise _refused(self.asked, f"{name}: {error}", why) from error
        # tensors are written once each: the first takes the weight, and leaves the others' values, which are small
        held: dict[str, torch.Tensor] = {}
        weight_of = [lazy]

        def read(tail: str, where: Slices) -> torch.Tensor:
            if weight_of:
                held.update(self._encoded(name, weight_of.pop(), form, base))
            return held.pop(tail)[where]

        stem = name.removesuffix(form.plain)
        return {stem + tail: Lazy.of(shaped_like(like, partial(read, tail))) for tail, like in made.items()}

    def _likes(self, form: Format, like: torch.Tensor, base: PackedWeight | None) -> Mapping[str, torch.Tensor]:
        """Shapes and dtypes of a weight's tensors, on meta; of the thousands of experts of one shape, once."""
        parts = () if base is None else tuple((part.dtype, tuple(part.shape)) for part in base.parts.values())
        key = (form, tuple(like.shape), like.dtype, parts)
        if key not in self._known:
            self._known[key] = self._encode(form, like, base)
        return self._known[key]

    def _encode(self, form: Format, values: torch.Tensor, base: PackedWeight | None) -> Mapping[str, torch.Tensor]:
        assert form.encode is not None  # else it is refused beforehand
        return form.encode(values, self.settings, base.parts if base is not None else {})

    def _encoded(self, name: str, lazy: Lazy, form: Format, base: PackedWeight | None) -> Mapping[str, torch.Tensor]:
        """The tensors of a weight, decoded again to tell their error; UserError for a value that is no number."""
        values = lazy.read()
        if not is_finite(values):
            why = "no scale fits them, and every weight of their block would be lost"
            instead = f"an earlier checkpoint; or {_PLAIN}, which writes them as they are"
            raise _refused(self.asked, f"{name} with values that are infinite or no numbers", why, instead)
        if base is not None and torch.equal(whole(form.weight(base.parts, self.settings)), values.to(DEQUANTIZED)):
            self.kept.append(name)
            return {tail: whole(part) for tail, part in base.parts.items()}
        parts = self._encode(form, values, base)
        back, values = whole(form.weight(parts, self.settings)).to(torch.float32), values.to(torch.float32)
        self.errors[name] = float((back - values).norm() / values.norm().clamp_min(torch.finfo(torch.float32).tiny))
        return parts

    def report(self, console: Console) -> None:
        """Print the error of each kind of module, and how many weights kept the base's tensors."""
        kinds = defaultdict(list)
        for name, error in self.errors.items():
            kinds[re.sub(r"^.*?\*\.", "", collapse(name)).removesuffix(".weight")].append(error)
        titles = ", ".join(sorted({form.title for form in self.forms.values()}))
        say(console, f"quantized: {len(self.forms):,} weights in {titles}; the rest stay as they are")
        if self.kept:
            say(console, f"           {len(self.kept):,} of them were not trained, and are the base's bit for bit")
        if self.unread:
            why = "sides that no blocks of equal size fill, which transformers or vLLM can't read"
            say(
                console,
                f"           {len(self.unread):,} linear weights stay bfloat16 ({why}): {first_names(self.unread)}",
            )
        if not kinds:
            return
        rows = [
            (kind, f"{len(errors):,}", f"{statistics.median(errors):.2%}", f"{max(errors):.2%}")
            for kind, errors in sorted(kinds.items())
        ]
        title = "error of the weights read back, ‖difference‖ / ‖weight‖"
        header = ("module", "weights", "median", "worst")
        say_table(console, header, rows, header_style="bold", title=title, title_justify="left")


def quantize(
    asked: str, model: PreTrainedModel, tensors: Mapping[str, Lazy], base: HubWeights | None
) -> QuantizedTensors | None:
    """Choose what of an export's plain ``tensors`` is quantized, and how; None: nothing is, as in the base.

    ``asked``: a name in :data:`SCHEMES`, or ``same``: the base's own. Where the base is quantized it says which weights
    are; else they are the linear ones in the decoder's layers without routers and projections to few numbers. Raises
    UserError for a format that is not written, or that no loader reads of such a model.
    """
    settings, untrained = quantization_settings(model.config), base.untrained if base is not None else {}
    packed = base.published.packed if base is not None else {}
    own = {name: weight.form for name, weight in packed.items() if name not in untrained}
    if absent := [name for name in own if name not in tensors]:
        why = "what is quantized there can't be found here"
        raise _refused(asked, f"a base that holds {len(absent)} weights under other names: {first_names(absent)}", why)
    if asked == SAME and base is not None and (titles := base.formats.keys() - {w.form.title for w in packed.values()}):
        why = "what is in GGUF is made by llama.cpp's own tools (convert_hf_to_gguf.py, llama-quantize)"
        raise _refused(asked, f"a base in {', '.join(sorted(titles))}", why, _UNWRITTEN)
    if asked == SAME and not own:
        if settings and base is None:
            why = "its files say which weights are quantized, and how"
            raise _refused(
                SAME, "a base that is quantized, and that is gone", why, f"the base in its place; or {_PLAIN}"
            )
        return None
    if asked == SAME:
        _check_written(settings, own, base)
    kept = bool(settings) and not (base is not None and base.published.unread)
    if asked == SAME or (own and kept and set(own.values()) <= {scheme.form for scheme in SCHEMES[asked]}):
        return QuantizedTensors(asked, settings, own, packed)
    if not kept:  # the base's tensors say nothing of those that are written
        packed = {}
    scheme, linear = _chosen(asked, model, tensors, own)
    mixed = _mixed(scheme, {name: tensors[name].shape for name in linear})
    chosen = [name for name in linear if _around(name) not in mixed]
    beside = {**tensors, **{name: Lazy.of(array) for name, array in untrained.items()}}
    left = {name for name, lazy in beside.items() if lazy.like.dim() == 2 and name.endswith(".weight")} - set(chosen)
    head = {name for name, module in model.named_modules() if module is head_of(model)}
    left_out = sorted(head | {name.removesuffix(".weight") for name in left}, key=dot_natural_key)
    forms = dict.fromkeys(chosen, scheme.form)
    unread = [name for name in linear if name not in forms]
    if not chosen:
        found = f"no linear weight that loaders read in it in the layers of {a_type(model)}"
        raise _refused(asked, found, "nothing would be quantized")
    settings = {**scheme.settings, scheme.left_out: left_out}
    return QuantizedTensors(asked, settings, forms, packed, unread=unread)


def _around(name: str) -> str:
    """The module around the module that a weight belongs to."""
    return ".".join(name.split(".")[:-2])


def _mixed(scheme: Scheme, shapes: Mapping[str, Sequence[int]]) -> set[str]:
    """The modules of which loaders would not read all weights; engines join some, and so want all in one format."""
    inputs = {name: (_around(name), shape[-1]) for name, shape in shapes.items()}  # equal where they may be joined
    rows: dict[Any, int] = defaultdict(int)
    for name, key in inputs.items():
        rows[key] = max(rows[key], shapes[name][0])
    return {_around(name) for name, key in inputs.items() if not scheme.is_read(shapes[name], rows[key])}


def _check_written(settings: Mapping[str, Any], own: Mapping[str, Format], base: HubWeights | None) -> None:
    """Raises UserError unless the base's formats can be written, and nothing in its files would be lost by it."""
    if not settings:
        found = "a base that is quantized, whose config.json has no quantization_config"
        raise _refused(SAME, found, "without one no loader knows what its codes are", f"--format fp8; or {_PLAIN}")
    if unwritten := {form.title: form.unwritten for form in own.values() if form.encode is None}:
        why = "; ".join(dict.fromkeys(unwritten.values()))
        raise _refused(SAME, f"a base in {', '.join(sorted(unwritten))}", why, _UNWRITTEN)
    if base is not None and (unread := base.published.unread):
        found = f"scales in the base that were measured on its activations: {first_names(unread)}"
        raise _refused(SAME, found, "they are wrong for other weights", f"--format fp8; or {_PLAIN}")


def _chosen(
    asked: str, model: PreTrainedModel, tensors: Mapping[str, Lazy], own: Collection[str]
) -> tuple[Scheme, list[str]]:
    """The scheme, and the names of what it quantizes; ``own``: of the base's. UserError if no loader reads it."""
    linear = set(own) or set(_linear(model, tensors))
    fused = [name for name in tensors if name in linear and not name.endswith(".weight")]
    owners = {own.rpartition(".")[0] for name in fused for own in tensors[name].names}
    read = {type(model.get_submodule(owner)).__name__ for owner in owners} <= MXFP4
    for scheme in SCHEMES[asked]:
        if scheme.fused == bool(fused) and read:
            return scheme, fused or [name for name in tensors if name in linear]
    found = f"experts that the hub holds in one tensor: {first_names(fused)}"
    others = "--format mxfp4; or " if read else ""
    raise _refused(asked, found, "loaders read it of the weights of single modules", others + _PLAIN)


def _linear(model: PreTrainedModel, tensors: Mapping[str, Lazy]) -> Iterator[str]:
    """The names of linear weights, and of those of experts, in the decoder's layers, but for routers and the like."""
    experts, layers = experts_modules(model), f"{layers_list(model)}."
    routers = Roles(model, experts).routers

    def is_linear(own: str) -> bool:
        owner = own.rpartition(".")[0]
        return owner in experts or (type(model.get_submodule(owner)) is nn.Linear and owner not in routers)

    for name, lazy in tensors.items():
        sides = sorted(lazy.shape[-2:])
        flat = len(sides) < 2 or (sides[0] <= _FEW and sides[1] >= _FLAT * sides[0])
        matrix = len(lazy.shape) == 3 or name.endswith(".weight")
        if matrix and not flat and lazy.names and all(own.startswith(layers) and is_linear(own) for own in lazy.names):
            yield name


def _check_alike(made: Mapping[str, torch.Tensor], base: PackedWeight) -> None:
    """Raises ValueError unless tensors have the shapes and dtypes of the base's."""
    for tail, like in made.items():
        there = base.parts[tail]
        if tuple(like.shape) != tuple(there.shape) or like.dtype != there.dtype:
            ours, theirs = (f"{list(each.shape)} in {each.dtype}" for each in (like, there))
            raise ValueError(f"{base.stem + tail} is {theirs} in the base, and would be {ours}")


def _refused(asked: str, found: str, why: str, instead: str = _PLAIN) -> UserError:
    return UserError(asked=f"--format {asked}", found=found, why=why, instead=instead)
