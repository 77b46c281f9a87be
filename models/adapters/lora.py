"""LoRA (arXiv:2106.09685): a frozen weight W acts as W + scale·B·A, with two small trained factors A and B.

The product B·A is never made: a token goes through A and then through B. A factor is a parameter of the module that
holds the weight, named like the weight with a suffix, so layers that repeat stack it like any other.

Shape suffixes: r rank, E experts. A is [r, in] or [E, r, in], and B is [out, r] or [E, out, r], however the family
stores its weight.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

A, B = "_lora_A", "_lora_B"
# the attribute of a module with factors that holds the factor on their product
SCALE = "lora_scale"


@dataclass(frozen=True)
class Lora:
    """The weights that have factors, by their names in ``named_parameters``, and the factors' rank ``r``."""

    r: int
    alpha: float
    rslora: bool  # rank-stabilised (arXiv:2312.03732)
    targets: tuple[str, ...]

    @property
    def scale(self) -> float:
        """The factor on the factors' product."""
        return self.alpha / (math.sqrt(self.r) if self.rslora else self.r)


def base_of(name: str) -> str | None:
    """The name of the weight that the factor ``name`` belongs to, stacked or not; None if it is no factor."""
    return name[: -len(A)] if name.endswith((A, B)) else None


def own_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name → parameter that a run with ``model`` learns and keeps: the factors, or all where there are none."""
    named = dict(model.named_parameters())
    return {name: p for name, p in named.items() if base_of(name) is not None} or named


def adaptable(model: nn.Module, experts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Name → (rows, columns), as in [out, in], of each weight that can have factors; experts have E in front."""
    found: dict[str, tuple[int, ...]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            found[f"{name}.weight"] = tuple(module.weight.shape)
        elif name in experts:
            # transformers' `use_experts_implementation` sets this on every experts module
            turned = bool(module.is_transposed)
            for key, parameter in module.named_parameters(recurse=False):
                if parameter.dim() == 3 and key.endswith("_proj"):
                    count, rows, columns = parameter.shape
                    found[f"{name}.{key}"] = (count, columns, rows) if turned else (count, rows, columns)
    return found


def attach(model: nn.Module, lora: Lora, shapes: dict[str, tuple[int, ...]]) -> None:
    """Add factors of :func:`adaptable`'s ``shapes`` to the targets in ``model``, on meta, in place; freeze all else."""
    model.requires_grad_(False)
    for name in lora.targets:
        owner, _, key = name.rpartition(".")
        module, (*experts, rows, columns) = model.get_submodule(owner), shapes[name]
        for suffix, shape in ((A, (lora.r, columns)), (B, (rows, lora.r))):
            module.register_parameter(key + suffix, nn.Parameter(torch.empty(*experts, *shape, device="meta")))
        setattr(module, SCALE, lora.scale)
        if isinstance(module, nn.Linear):
            original: Any = type(module)
            module.__class__ = _with_factors(original)


class _LoraLinear(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        this: Any = self
        return super().forward(x) + F.linear(F.linear(x, this.weight_lora_A), this.weight_lora_B) * this.lora_scale


@functools.cache
def _with_factors(original: type) -> type:
    """The class ``original`` with the forward above, made once, so that layers stay equal."""
    return type(original.__name__, (_LoraLinear, original), {})
