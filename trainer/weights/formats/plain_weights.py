"""Tensors of a checkpoint as published, read as plain weights: dequantized a slice at a time, where they are quantized.

The tensors' names and dtypes tell the format of each weight, since one checkpoint may have several; the config's
quantization_config tells what they can't: the size of a block, the order of packed codes.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from shardwright.files.arrays import Array
from shardwright.model.base_storage import quantization_settings
from shardwright.weights.formats import bitsandbytes, fp8, gptq, integers, mxfp4, nvfp4
from shardwright.weights.formats.format import BYTES, DEQUANTIZED, Format, Parts, Settings
from shardwright.weights.names import dtype_name, first_names

# the first that holds a weight's tensors is its format
FORMATS: tuple[Format, ...] = (
    *(fp8.BLOCKS, fp8.ROWS, fp8.SCALE, *fp8.FUSED),
    *(nvfp4.MODELOPT, nvfp4.PACKED),
    *(mxfp4.GPT_OSS, mxfp4.GPT_OSS_SAVED, mxfp4.PACKED, mxfp4.MODELOPT, *mxfp4.DEEPSEEK),
    *(integers.PACKED, bitsandbytes.INT8, integers.PLAIN),
    *(gptq.GPTQ, gptq.AWQ, *bitsandbytes.FOUR_BITS),
)
# scales of activations and of an inference engine's cache, on whatever module they lie
_SERVING = tuple(
    f"{of}_{kind}"
    for of in (".input", ".output", ".activation", ".q", ".k", ".v", ".kv", ".prob")
    for kind in ("scale", "zero_point", "global_scale")
)
# dtypes that no plain weight has
_FP8 = {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu}
_WORDS = {torch.int16, torch.int32}


class FormatError(ValueError):
    """Tensors that do not go together, by their names in the files."""

    def __init__(self, text: str, tensors: Sequence[str]) -> None:
        super().__init__(text)
        self.tensors = tensors


@dataclass(frozen=True)
class PackedWeight:
    """A weight in a published format."""

    form: Format
    stem: str  # the name without its end
    parts: Parts  # end of the name -> tensor; those that the format reads

    @property
    def name(self) -> str:
        """The plain weight's name."""
        return self.stem + self.form.plain


@dataclass(frozen=True)
class PlainWeights:
    """A checkpoint's tensors, with plain weights in the place of packed ones."""

    tensors: Mapping[str, Array]  # by the names that an unquantized checkpoint would have
    packed: Mapping[str, PackedWeight]  # by those names: the weights that are dequantized
    unread: frozenset[str]  # names in the files of scales that serve inference alone

    def stored(self, name: str) -> list[Array]:
        """The tensors in the files that the weight ``name`` is read from."""
        return list(self.packed[name].parts.values()) if name in self.packed else [self.tensors[name]]


def plain(
    tensors: Mapping[str, Array],
    settings: Settings | None,
    beside: Callable[[Set[str]], Set[str]] = lambda names: frozenset(),
    dtype: torch.dtype = DEQUANTIZED,
) -> PlainWeights:
    """``tensors`` by the files' names, dequantized to ``dtype``; ``settings``: the config's quantization_config.

    ``beside`` tells those of many names that no model needs: such tensors stay as they are where they can't be
    dequantized. Else raises FormatError where the parts of a weight are missing or do not go together.
    """
    settings = settings or {}
    found = _packed(tensors)
    used = {weight.stem + tail for weight in found.values() for tail in weight.parts}
    unread = {weight.stem + tail for weight in found.values() for tail in weight.form.unread} & tensors.keys()
    if found or settings:
        unread |= {name for name in tensors if name.endswith(_SERVING)}
    without = beside(tensors.keys() | found.keys())
    done = used | unread
    _check_left({name: array for name, array in tensors.items() if name not in without}, done)
    _check_transforms(settings, sorted(used))
    values = {name: array for name, array in tensors.items() if name not in done}
    as_stored = set()
    for name, weight in found.items():
        parts = [weight.stem + tail for tail in weight.parts]
        if name in values:
            raise FormatError(f"{name} is there twice: plain, and in {weight.form.title}", [name, *parts])
        try:
            values[name] = weight.form.weight(weight.parts, settings, dtype)
        except Exception as error:  # settings and parts are the user's: of any shape, kind and value
            if name in without:
                values |= {part: tensors[part] for part in parts}
                as_stored.add(name)
                continue
            text = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
            raise FormatError(f"{name} in {weight.form.title}: {text}", parts) from error
    packed = {name: weight for name, weight in found.items() if weight.form.title and name not in as_stored}
    return PlainWeights(values, packed, frozenset(unread))


def base_dtype(config: PretrainedConfig) -> torch.dtype | None:
    """The dtype of the weights that a model of ``config`` is published with, once dequantized; None: it says none."""
    if quantization_settings(config) or (config.name_or_path or "").endswith(".gguf"):  # which states no dtype
        return DEQUANTIZED
    stated = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    return getattr(torch, stated) if isinstance(stated, str) else stated


def _packed(tensors: Mapping[str, Array]) -> dict[str, PackedWeight]:
    """Plain name -> the packed weight of it."""
    found: dict[str, PackedWeight] = {}
    by_main = defaultdict(list)
    for form in FORMATS:
        by_main[form.main].append(form)
    for main, forms in by_main.items():
        for name in tensors:
            stem = name.removesuffix(main)
            if stem == name:
                continue
            for form in forms:
                if (parts := form.parts_of(stem, tensors)) is not None:
                    found.setdefault(stem + form.plain, PackedWeight(form, stem, parts))
                    break
    return found


def _check_left(tensors: Mapping[str, Array], used: Collection[str]) -> None:
    """Raises FormatError for codes without all of their scales: as plain numbers they would be other weights."""
    mains = tuple({form.main for form in FORMATS})
    words = tuple({form.main for form in FORMATS} - {".weight"})  # a weight in int32 is none, and refused as such

    def coded(name: str, dtype: torch.dtype) -> bool:
        return dtype in _FP8 or (dtype in BYTES and name.endswith(mains)) or (dtype in _WORDS and name.endswith(words))

    left = [name for name, array in tensors.items() if name not in used and coded(name, array.dtype)]
    if not left:
        return
    first = left[0]
    main = next((main for main in mains if first.endswith(main)), "")
    stem = first.removesuffix(main)
    said = {name: f"{name} in {dtype_name(array.dtype)}" for name, array in tensors.items() if name.startswith(stem)}
    beside = [text for name, text in said.items() if name != first]
    there = f"{said[first]} has beside it {first_names(beside) or 'nothing'}"
    raise FormatError(f"{len(left)} tensors of codes without their scales: {first_names(left)}; {there}", left)


def _check_transforms(settings: Settings, tensors: Sequence[str]) -> None:
    """Raises FormatError where the weights are rotated, and only an engine that rotates activations too can use them.

    Rotations of weights alone (compressed-tensors' `weight_input` and `weight_output`) undo each other.
    """
    schemes = (settings.get("transform_config") or {}).get("config_groups") or {}
    places = {part.get("location") for scheme in schemes.values() for part in scheme.get("apply") or ()}
    online = sorted(str(place) for place in places - {"weight_input", "weight_output"})
    if tensors and online:
        text = f"transform_config says that activations are rotated as the model runs, at {', '.join(online)}"
        raise FormatError(text, tensors[:1])
