"""Adapters in PEFT's format: writing, proving and reading their files.

PEFT (0.21.2, tuners/lora/layer.py) keeps the factors of a fused experts' weight as two matrices: A is [E·r, in], expert
after expert, and B is [out, r·E], in which the experts of one rank stand side by side. Its names leave out the
parameter: each adapted parameter of a module wraps the module once more, the last one outermost.

r: rank, E: experts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import load
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

# semi-private: transformers/core_model_loading.py, transformers 5.23
from transformers.core_model_loading import revert_weight_conversion

from shardwright.errors import UserError, command
from shardwright.files.arrays import whole
from shardwright.files.folder import Folder, as_json
from shardwright.hosts.hosts import hosts
from shardwright.model.lora_options import CONFIG, WEIGHTS, adapted_shapes, as_config
from shardwright.models.adapters.lora import A, B, Lora
from shardwright.report.bars import byte_bar
from shardwright.report.lines import say
from shardwright.weights.hub_write import write_files
from shardwright.weights.lazy_tensors import Lazy
from shardwright.weights.serving_engines import engine_notes
from shardwright.weights.tokenizer_files import tokenizer_files
from shardwright.weights.weight_sources import Source

_PROBES = 4  # columns that a saved adapter is tried on
_PREFIX, _TAILS = "base_model.model.", {A: ".lora_A.weight", B: ".lora_B.weight"}


@dataclass(frozen=True)
class AdapterFiles:
    """The format of an adapter's files; raises UserError if ``per_expert``, and experts are fused on the hub too."""

    lora: Lora
    model: PreTrainedModel  # transformers' own, on meta, whose weights are adapted; perhaps a part of `whole`
    whole: PreTrainedModel  # loads the adapter
    names: Mapping[str, str]  # those of `model` → those of `whole`
    base: str | None  # hub id or folder of the weights of `whole`, for PEFT to find; None: unknown
    # under the names of the hub's weights, each expert by itself, for serving engines; PEFT loads it onto Mixtral and
    # Qwen2-MoE alone
    per_expert: bool = False

    def config(self) -> dict[str, Any]:
        """The content of `adapter_config.json`."""
        values = as_config(self.lora, self.whole, self.base, self.names)
        if self.per_expert:
            modules = {stem.rpartition(".")[2] for target in self.lora.targets for stem in self._stems(target)}
            values |= {"target_modules": sorted(modules), "target_parameters": None}
        return values

    def tensors(self, factors: Source) -> dict[str, Lazy]:
        """Name in the file → values; nothing is read yet."""
        found: dict[str, Lazy] = {}
        keys = peft_keys(self.lora, self.model, self.names)
        for target in self.lora.targets:
            a, b = (Lazy.of(factors(target + suffix)) for suffix in (A, B))
            if not self.per_expert:
                found |= {keys[target + A]: as_peft(target + A, a), keys[target + B]: as_peft(target + B, b)}
                continue
            pieces = self._split(target, b)
            each = len(pieces) // (b.shape[0] if len(b.shape) == 3 else 1)  # gate and up have one A
            same = self._split(target, torch.cat([a] * each, dim=-2) if each > 1 else a)  # type: ignore[list-item]
            for tail, values in zip(_TAILS.values(), (same, pieces), strict=True):
                found |= {_PREFIX + name.removesuffix(".weight") + tail: lazy for name, lazy in values.items()}
        return found

    def actions(self, found: Mapping[str, torch.Tensor], probe: torch.Tensor, target: str) -> dict[str, torch.Tensor]:
        """Name → the product of a file's factors with the columns ``probe`` [in, n], as a loader computes it."""
        if self.per_expert:
            got = {}
            for stem in self._stems(target):
                a, b = (found[_PREFIX + stem + tail].double() for tail in _TAILS.values())
                got[f"{stem}.weight"] = self.lora.scale * (b @ (a @ probe))
            return got
        keys = peft_keys(self.lora, self.model, self.names)
        a, b = (found[keys[target + suffix]].double() for suffix in (A, B))
        count, r = a.shape[0] // self.lora.r, self.lora.r
        added = [self.lora.scale * (b[:, e::count] @ (a[e * r : (e + 1) * r] @ probe)) for e in range(count)]
        return {target: torch.stack(added) if len(adapted_shapes(self.model)[target]) == 3 else added[0]}

    def expected(self, action: torch.Tensor, target: str) -> dict[str, torch.Tensor]:
        """The product of the run's own factors, ``action`` [.., out, n], under the names of :meth:`actions`."""
        if not self.per_expert:
            return {target: action}
        return {name: lazy.read() for name, lazy in self._split(target, Lazy.of(action)).items()}

    def _stems(self, target: str) -> list[str]:
        """The hub's names of the parts of ``target``, without their ``.weight``."""
        narrow = torch.empty(*adapted_shapes(self.model)[target][:-1], 1, device="meta")
        return [name.removesuffix(".weight") for name in self._split(target, Lazy.of(narrow))]

    def _split(self, target: str, tensor: Any) -> dict[str, Lazy]:
        """The hub's name → its part of ``tensor``, a stand-in for the weight ``target``."""
        name = self.names.get(target, target)
        try:
            found = dict(revert_weight_conversion(self.whole, {name: tensor}))
        except Exception as error:  # of torch's and of transformers' kinds: the tensor is narrower than the weight
            raise self._fused(target, f"{type(error).__name__}: {error}") from error
        if len(tensor.shape) == 3 and len(found) % tensor.shape[0] | (len(found) < tensor.shape[0]):
            raise self._fused(target, "all experts in one tensor")
        return found

    def _fused(self, target: str, found: str) -> UserError:
        return UserError(
            asked="--adapter_format per_expert",
            found=f"{target} of a {type(self.model).__name__}, on the hub: {found}",
            why="its experts have no weights by themselves there",
            instead="--adapter_format peft",
        )


def save_adapter(
    folder: Folder, files: AdapterFiles, factors: Source, tokenizer: PreTrainedTokenizerBase | None, console: Console
) -> None:
    """Writes the adapter, its config last, and says what serving engines would not read of it.

    Raises UserError if it can't be written, or reads back another than was trained.
    """
    tensors = files.tensors(factors)
    total = sum(lazy.like.nbytes for lazy in tensors.values())
    with byte_bar(console, "writing the adapter", total) as advance:
        write_files(folder, {WEIGHTS: list(tensors)}, tensors, advance)
    if tokenizer is not None:
        for name, data in tokenizer_files(tokenizer, config=b"{}").items():  # no model's config lies beside an adapter
            place, _, file = name.rpartition("/")
            (folder / place if place else folder).write(file, data)
    folder.write(CONFIG, as_json(files.config()))
    hosts().once(lambda: None)  # by now the first host has written them
    prove(folder, files, factors)
    for note in engine_notes(files.lora, files.model, files.whole, per_expert=files.per_expert):
        say(console, f"note: {note}")


def prove(folder: Folder, files: AdapterFiles, factors: Source) -> None:
    """Raises UserError unless the adapter in ``folder``, merged by its format's own rule, equals ``factors``.

    Products with random columns are compared, so no merged weight is ever held.
    """
    found, shapes = _read(folder), adapted_shapes(files.model)
    generator = torch.Generator().manual_seed(0)
    for target in files.lora.targets:
        probe = torch.randn(shapes[target][-1], _PROBES, generator=generator, dtype=torch.float64)
        a, b = (whole(factors(target + suffix)).double() for suffix in (A, B))
        expected = files.expected(files.lora.scale * (b @ (a @ probe)), target)
        got = files.actions(found, probe, target)
        if got.keys() != expected.keys() or any(not _equal(got[name], expected[name]) for name in expected):
            raise UserError(
                asked=f"an adapter in {folder}",
                found=f"read back and merged, {target} is another weight than the one that was trained",
                why="whoever loads it would run another model",
                instead=f"its checkpoint, which is whole: {command('export')} writes it again",
            )


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:  # to the rounding of float64 sums
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-9, atol=1e-12, equal_nan=True)


def peft_keys(lora: Lora, model: nn.Module, names: Mapping[str, str]) -> dict[str, str]:
    """Name of a factor → its name in PEFT's file; arguments as of :class:`AdapterFiles`."""
    keys, order = {}, {name: number for number, (name, _) in enumerate(model.named_parameters())}
    for target in lora.targets:
        owner = names.get(target, target).rpartition(".")[0]
        mine = [t for t in lora.targets if t.rpartition(".")[0] == target.rpartition(".")[0]]
        outside = sum(order[other] > order[target] for other in mine)
        for suffix, tail in _TAILS.items():
            keys[target + suffix] = _PREFIX + owner + ".base_layer" * outside + tail
    return keys


def as_peft(name: str, factor: Any) -> Any:
    """The factor ``name``, a tensor or a lazy one, as PEFT's matrix."""
    if len(factor.shape) == 2:
        return factor
    if name.endswith(A):
        return factor.flatten(0, 1)
    return factor.permute(1, 2, 0).flatten(1, 2)


def from_peft(name: str, matrix: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The inverse of :func:`as_peft`, for a factor of ``shape``."""
    if len(shape) == 2:
        return matrix
    if name.endswith(A):
        return matrix.unflatten(0, (shape[0], shape[1]))
    return matrix.unflatten(1, (shape[2], shape[0])).permute(2, 0, 1)


def open_adapter(folder: Folder, lora: Lora, model: PreTrainedModel, names: Mapping[str, str]) -> Source:
    """A source of the factors in ``folder``, in PEFT's format; the host holds them. ``lora`` is from its config.

    Raises UserError if there is no such file, or factors are missing, left over, of another shape or not finite.
    """
    found, keys, shapes = _read(folder), peft_keys(lora, model, names), factor_shapes(lora, model)
    wrong = [f"{key} is missing" for key in keys.values() if key not in found]
    wrong += [f"{key} is left over" for key in found if key not in keys.values()]
    for name, key in keys.items():
        if key in found:
            matrix, flat = found[key], as_peft(name, torch.empty(shapes[name], device="meta")).shape
            if matrix.shape != flat:
                wrong.append(f"{key} of shape {list(matrix.shape)}, where {list(flat)} is needed")
            elif not matrix.is_floating_point() or not bool(torch.isfinite(matrix).all()):
                wrong.append(f"{key} has values that are no finite numbers")
    if wrong:
        raise UserError(
            asked=f"the adapter in {folder}",
            found="; ".join(wrong[:4]) + (f"; and {len(wrong) - 4} more" if wrong[4:] else ""),
            why=f"its factors are not those that its {CONFIG} describes for this model",
            instead="the adapter as PEFT saved it, and the model that it was trained on; "
            "one written with --adapter_format peft",
        )
    return lambda name: from_peft(name, found[keys[name]], shapes[name])


def factor_shapes(lora: Lora, model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Name of a factor → its shape."""
    found, shapes = {}, adapted_shapes(model)
    for target in lora.targets:
        *experts, rows, columns = shapes[target]
        found[target + A], found[target + B] = (*experts, lora.r, columns), (*experts, rows, lora.r)
    return found


def _read(folder: Folder) -> dict[str, torch.Tensor]:
    try:
        if folder.remote:
            return load(folder.read(WEIGHTS))
        with safe_open(f"{folder}/{WEIGHTS}", framework="pt") as opened:
            return {key: opened.get_tensor(key).clone() for key in opened.keys()}  # noqa: SIM118
    except UserError:
        raise
    except Exception as error:  # safetensors', the system's, and torch's for shapes that it can't hold
        raise UserError(
            asked=f"the adapter in {folder}",
            found=f"{WEIGHTS}: {type(error).__name__}: {str(error)[:300]}",
            why="its weights can't be read",
            instead=f"a folder with {CONFIG} and {WEIGHTS}, as PEFT saves one",
        ) from error
