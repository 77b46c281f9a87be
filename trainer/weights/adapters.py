"""LoRA adapters in and out: in PEFT's format, merged into plain weights, and as the start of a run.

PEFT (0.21.2, tuners/lora/layer.py) keeps the factors of a fused experts' weight as two matrices: A is [E·r, in], expert
after expert, and B is [out, r·E], in which the experts of one rank stand side by side. Their names do not have the
parameter's: each adapted parameter of a module wraps the module once more, and the last one is outermost.

Shape suffixes: r rank, E experts.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel

# semi-private: transformers/core_model_loading.py, transformers 5.23
from transformers.core_model_loading import revert_weight_conversion

from models.adapters.lora import A, B, Lora, base_of
from trainer.arrays import Array, Slices
from trainer.errors import UserError
from trainer.lora import CONFIG, WEIGHTS, adapted_shapes
from trainer.storage import Folder
from trainer.weights.sources import Source

_PREFIX, _TAILS = "base_model.model.", {A: ".lora_A.weight", B: ".lora_B.weight"}


def seeded_factors(model: nn.Module, seed: int) -> Source:
    """A source of the factors that a run starts with: A uniform as PEFT draws it, B zero, so that nothing changes.

    Each factor's values depend on its name and the seed alone.

    Args:
        model: with factors, on meta.
    """

    def source(name: str) -> torch.Tensor:
        shape = model.get_parameter(name).shape
        if name.endswith(B):
            return torch.zeros(shape)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
        bound = 1 / math.sqrt(shape[-1])  # nn.Linear's: kaiming_uniform_ with a = sqrt(5)
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)

    return source


def beside(base: Source, own: Source) -> Source:
    """A source of an adapted model: factors come from ``own``, everything else from ``base``."""
    return lambda name: (base if base_of(name) is None else own)(name)


def merged(base: Source, factors: Source, lora: Lora, model: PreTrainedModel) -> Source:
    """A source of plain weights: those of ``base`` plus what ``factors`` add, in the dtype of ``base``.

    Args:
        model: transformers' own, whose weights they are; on meta.
    """
    targets = frozenset(lora.targets)

    def source(name: str) -> Array:
        if name not in targets:
            return base(name)
        turned = bool(getattr(model.get_submodule(name.rpartition(".")[0]), "is_transposed", False))
        return _Merged(base(name), factors(name + A), factors(name + B), lora.scale, turned)

    return source


@dataclass(frozen=True)
class _Merged:
    """A weight plus scale·B·A, as an array; ``turned``: the weight is stored [.., in, out]."""

    base: Array
    a: Array
    b: Array
    scale: float
    turned: bool

    @property
    def shape(self) -> Sequence[int]:
        return self.base.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.base.dtype

    def __getitem__(self, where: Slices) -> torch.Tensor:
        *experts, rows, columns = where
        rows, columns = (columns, rows) if self.turned else (rows, columns)
        a = self.a[(*experts, slice(0, self.a.shape[-2]), columns)].to(torch.float32)
        b = self.b[(*experts, rows, slice(0, self.b.shape[-1]))].to(torch.float32)
        delta = self.scale * (b @ a)
        return (self.base[where] + (delta.transpose(-1, -2) if self.turned else delta)).to(self.dtype)


def peft_keys(lora: Lora, model: nn.Module, names: Mapping[str, str]) -> dict[str, str]:
    """Name of a factor → its name in PEFT's file.

    Args:
        model: whose weights are adapted, on meta.
        names: its names → those of the model that PEFT loads the adapter onto, where they differ.
    """
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
    """A source of the factors that lie in ``folder`` in PEFT's format; they are held on the host.

    Args:
        lora: what its config says (`trainer.lora.read_config`).
        model: transformers' own, on meta.

    Raises:
        UserError: there is no such file, or factors are missing, left over, of another shape or not finite.
    """
    found = _read(folder)
    keys, shapes = peft_keys(lora, model, names), factor_shapes(lora, model)
    wrong = [f"{key} is missing" for key in keys.values() if key not in found]
    wrong += [f"{key} is left over" for key in found if key not in keys.values()]
    factors = {}
    for name, key in keys.items():
        if key in found:
            matrix, flat = found[key], as_peft(name, torch.empty(shapes[name], device="meta")).shape
            if matrix.shape != flat:
                wrong.append(f"{key} of shape {list(matrix.shape)}, where {list(flat)} is needed")
            elif not matrix.is_floating_point() or not bool(torch.isfinite(matrix).all()):
                wrong.append(f"{key} has values that are no finite numbers")
            else:
                factors[name] = from_peft(name, matrix, shapes[name])
    if wrong:
        raise UserError(
            asked=f"the adapter in {folder}",
            found="; ".join(wrong[:4]) + (f"; and {len(wrong) - 4} more" if wrong[4:] else ""),
            why=f"its factors are not those that its {CONFIG} describes for this model",
            instead="the adapter as PEFT saved it, and the model that it was trained on; "
            "one written with --adapter_format peft",
        )
    return lambda name: factors[name]


def factor_shapes(lora: Lora, model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Name of a factor → its shape."""
    found, shapes = {}, adapted_shapes(model)
    for target in lora.targets:
        *experts, rows, columns = shapes[target]
        found[target + A], found[target + B] = (*experts, lora.r, columns), (*experts, rows, lora.r)
    return found


def _read(folder: Folder) -> dict[str, torch.Tensor]:
    """Name in the file → tensor, on the host."""
    try:
        if folder.remote:
            from safetensors.torch import load

            return load(folder.read(WEIGHTS))
        with safe_open(f"{folder}/{WEIGHTS}", framework="pt") as opened:
            return {key: opened.get_tensor(key).clone() for key in opened.keys()}  # noqa: SIM118
    except UserError:
        raise
    except Exception as error:  # safetensors' own, the system's, and torch's of shapes that it can't hold
        raise UserError(
            asked=f"the adapter in {folder}",
            found=f"{WEIGHTS}: {type(error).__name__}: {str(error)[:300]}",
            why="its weights can't be read",
            instead=f"a folder with {CONFIG} and {WEIGHTS}, as PEFT saves one",
        ) from error
