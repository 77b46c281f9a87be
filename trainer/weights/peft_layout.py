"""The layout of an adapter's files in PEFT's format: names and shapes.

PEFT (0.21.2, tuners/lora/layer.py) keeps the factors of a fused experts' weight as two matrices: A is [E·r, in], expert
after expert, and B is [out, r·E], in which the experts of one rank stand side by side. Its names leave out the
parameter: each adapted parameter of a module wraps the module once more, the last one outermost.

r: rank, E: experts.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

# semi-private: transformers/core_model_loading.py, transformers 5.23
from transformers.core_model_loading import revert_weight_conversion

from shardwright.files.arrays import Array, shaped_like
from shardwright.model.adapted_weights import adapted_shapes
from shardwright.models.adapters.lora import A, B, Lora, M, T, factor_shape
from shardwright.weights.lazy_tensors import Lazy
from shardwright.weights.weight_sources import Source

PREFIX = "base_model.model."
TAILS = {A: ".lora_A.weight", B: ".lora_B.weight", M: ".lora_magnitude_vector"}
_EXCHANGED = {A: TAILS[B], B: TAILS[A]}  # then the product of PEFT's two is that of ours, transposed
_ROWS = ".token_adapter.trainable_tokens_delta"  # the rows themselves


def peft_keys(lora: Lora, model: nn.Module, names: Mapping[str, str]) -> dict[str, str]:
    """Name of a factor, or of a parameter trained whole → its name in PEFT's file; arguments as `AdapterFiles`."""
    keys, order = {}, {name: number for number, (name, _) in enumerate(model.named_parameters())}
    for target in lora.targets:
        owner = names.get(target, target).rpartition(".")[0]
        tails = _EXCHANGED if _is_exchanged(model, target) else TAILS
        mine = [t for t in lora.targets if t.rpartition(".")[0] == target.rpartition(".")[0]]
        outside = sum(order[other] > order[target] for other in mine)
        for suffix in lora.suffixes:
            if suffix in tails:  # A0 and B0 are no part of PEFT's files
                keys[target + suffix] = PREFIX + owner + ".base_layer" * outside + tails[suffix]
    keys |= {n + T: PREFIX + names.get(n, n).rpartition(".")[0] + _ROWS for n, _ in lora.tokens}
    return keys | {name: PREFIX + names.get(name, name) for name in lora.whole}


def _is_exchanged(model: nn.Module, target: str) -> bool:
    """Whether PEFT takes the inputs of an experts' weight for its outputs, as Llama-4's: their class doesn't tell."""
    experts = model.get_submodule(target.rpartition(".")[0])
    return bool(getattr(experts, "is_transposed", False)) and "is_transposed" not in vars(experts)


def unstarted(factors: Source, lora: Lora) -> Source:
    """``factors`` with what they began as, A0 and B0, as more ranks of A and B; see `Lora.unstarted`."""
    if not lora.start:
        return factors

    def source(name: str) -> Array:
        if not name.endswith((A, B)):
            return factors(name)
        now, first = (Lazy.of(factors(key)) for key in (name, f"{name}0"))
        # torch's functions take them for tensors
        joined: list[Any] = [now, first] if name.endswith(A) else [now, torch.neg(first)]  # type: ignore[arg-type]
        lazy: Any = torch.cat(joined, dim=0 if name.endswith(A) else 1)
        return shaped_like(lazy.like, lazy.read)

    return source


def as_peft(key: str, name: str, factor: Any) -> Any:
    """The factor ``name``, a tensor or a lazy one, as PEFT's matrix ``key``; a parameter trained whole as it is."""
    if len(factor.shape) < 3 or not name.endswith((A, B)):
        return factor
    factor = factor if key.endswith(TAILS[name[-len(A) :]]) else factor.permute(0, 2, 1)
    if key.endswith(TAILS[A]):
        return factor.flatten(0, 1)
    return factor.permute(1, 2, 0).flatten(1, 2)


def from_peft(key: str, name: str, matrix: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The inverse of :func:`as_peft`, for a factor of ``shape``."""
    if len(shape) < 3 or not name.endswith((A, B)):
        return matrix
    same = key.endswith(TAILS[name[-len(A) :]])
    count, first, second = shape if same else (shape[0], shape[2], shape[1])
    if key.endswith(TAILS[A]):
        found = matrix.unflatten(0, (count, first))
    else:
        found = matrix.unflatten(1, (second, count)).permute(2, 0, 1)
    return found if same else found.transpose(1, 2)


def factor_shapes(lora: Lora, model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Name of a factor, or of a parameter trained whole → its shape."""
    shapes = adapted_shapes(model)
    found = {t + s: factor_shape(s, lora.rank(t), shapes[t]) for t in lora.targets for s in lora.suffixes}
    found |= {name + T: (len(rows), model.get_parameter(name).shape[1]) for name, rows in lora.tokens}
    return found | {name: tuple(model.get_parameter(name).shape) for name in lora.whole}


def hub_parts(whole: PreTrainedModel, name: str, tensor: Any) -> dict[str, Any]:
    """The hub's name → its part of ``tensor``, a stand-in for the weight ``name`` of ``whole``; may raise anything."""
    return dict(revert_weight_conversion(whole, {name: tensor}))
