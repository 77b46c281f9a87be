"""What an optimizer keeps of each parameter: the one table that plans, steps, checkpoints and reports read. Pure data.

A tensor of the state has the parameter's shape and layout, or those without one dimension: then the axes that split
that dimension replicate the tensor, and the others split what they split in the parameter. A stack keeps its layers in
front, so each layer has what it would have alone, and a checkpoint's names are the same however layers are stacked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwright.layout.partition import shards_of
from shardwright.layout.placement import Placement, Shard
from shardwright.layout.recipe import Layout
from shardwright.layout.stacking import is_stacked

TITLES = {"adamw": "AdamW", "adafactor": "Adafactor", "lion": "Lion", "muon": "Muon"}  # --optim → as people write it

# rule → name of a tensor of the state → the parameter's dimension that it lacks, counted from the end; 0: none
_KEPT: Mapping[str, Mapping[str, int]] = {
    "adamw": {"first moment": 0, "second moment": 0},
    "adafactor": {"second moment": 0},
    "factored adafactor": {"second moment rows": 1, "second moment columns": 2},
    "lion": {"momentum": 0},
    "muon": {"momentum": 0},
}
STATE_NAMES = tuple(dict.fromkeys(name for kept in _KEPT.values() for name in kept))


@dataclass(frozen=True)
class StateTensor:
    """One tensor of an optimizer's state.

    Args:
        name: after a space it follows the parameter's.
        shape: of the whole tensor.
        layout: the axes that split it, in mesh order.
        local_shape: of one device's share.
    """

    name: str
    shape: tuple[int, ...]
    layout: Layout
    local_shape: tuple[int, ...]


def rule_of(optim: str, name: str, shape: Sequence[int]) -> str:
    """Which rule updates the parameter ``name`` under ``--optim``: a key of the table above.

    Adafactor factors the second moment of whatever has two dimensions or more, as transformers' does. Muon is for the
    matrices of layers, one matrix for each expert, and AdamW for the rest: embeddings, head, norms, biases, and kernels
    of convolutions along a sequence, which are [channels, 1, width].
    """
    alone = tuple(shape[1:] if is_stacked(name) else shape)
    if optim == "adafactor":
        return "factored adafactor" if len(alone) > 1 else "adafactor"
    if optim == "muon":
        in_a_layer = any(part == "*" or part[:1].isdigit() for part in name.split("."))
        is_matrix = len(alone) > 1 and min(alone[-2:]) > 1 and "bias" not in name
        return "muon" if in_a_layer and is_matrix else "adamw"
    return optim


def state_tensors(
    optim: str, name: str, shape: Sequence[int], layout: Mapping[str, Placement], local_shape: Sequence[int]
) -> tuple[StateTensor, ...]:
    """What ``--optim`` keeps of the parameter ``name``, in the order in which its rule takes it."""
    found = []
    for kept, lacks in _KEPT[rule_of(optim, name, shape)].items():
        dim = len(shape) - lacks if lacks else len(shape)  # the rank is no dimension: then none is left out
        axes = {
            axis: Shard(shard.dim - (shard.dim > dim)) for axis, shard in shards_of(layout).items() if shard.dim != dim
        }
        whole, local = (tuple(size for at, size in enumerate(sizes) if at != dim) for sizes in (shape, local_shape))
        found.append(StateTensor(kept, whole, axes, local))
    return tuple(found)
