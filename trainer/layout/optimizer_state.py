"""The state tensors of an optimizer, as plans, steps, checkpoints and reports read them. Pure data.

A tensor of the state has the parameter's shape and layout, or those without one dimension: then the axes that split
that dimension replicate the tensor, and the others split what they split in the parameter. A stack keeps its layers in
front, so each layer has what it would have alone, and a checkpoint's names are the same however layers are stacked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwright.layout.placement import Shard
from shardwright.layout.recipe import Layout
from shardwright.layout.stacking import is_stacked
from shardwright.optimizers import OPTIMIZERS
from shardwright.optimizers.optimizer import Optimizer


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


def optimizer_of(optim: str, name: str, shape: Sequence[int]) -> type[Optimizer]:
    """The entry that updates the parameter ``name`` under ``--optim``: its own, or one that it leaves the rest to."""
    entry = OPTIMIZERS[optim]
    while entry.rest is not None and not entry.takes(name, _in_a_layer(name, shape)):
        entry = entry.rest
    return entry


def state_tensors(
    optim: str, name: str, shape: Sequence[int], layout: Mapping[str, Shard], local_shape: Sequence[int]
) -> tuple[StateTensor, ...]:
    """The state of ``--optim`` for the parameter ``name``, in the order in which its entry takes it."""
    found = []
    for kept, lacks in optimizer_of(optim, name, shape).state(_in_a_layer(name, shape)).items():
        dim = len(shape) - lacks  # where none is lacking the rank, which is no dimension
        axes = {axis: Shard(shard.dim - (shard.dim > dim)) for axis, shard in layout.items() if shard.dim != dim}
        whole, local = ((*sizes[:dim], *sizes[dim + 1 :]) for sizes in (shape, local_shape))
        found.append(StateTensor(kept, whole, axes, local))
    return tuple(found)


def _in_a_layer(name: str, shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(shape[1:] if is_stacked(name) else shape)
