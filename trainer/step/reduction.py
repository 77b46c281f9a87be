"""How a weight's gradient is summed over devices: by reduce-scatters, a mesh axis at a time.

A weight's gradient is a sum over tokens, and tokens are split over the batch axes. Left to the partitioner that sum is
an all-reduce and then a slice, at twice the traffic: whether the compiler makes a reduce-scatter of the two depends on
which dimension is sliced, and over all chips of a torus at once it never does. So the unfinished sum has a shape of its
own (see ``models.partial_gradients``), and what finishes it says what it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch_xla.distributed.spmd as xs
from transformers import PreTrainedModel

from models import partial_gradients
from models.jax_call import Manual
from trainer.layout.partition import PartitionSpec, partition_spec
from trainer.layout.placement import Shard
from trainer.layout.plan import ParameterPlan, ShardingPlan
from trainer.layout.recipe import Layout, Recipe
from trainer.model import experts_modules
from trainer.xla import sharding
from trainer.xla.mesh import device_order

_LONGEST_RING = 16


@dataclass(frozen=True)
class PartialGradient:
    """A weight gradient kept apart by batch shard.

    Args:
        parameter: whose gradient it is, as it is stored.
        dim: the dimension that the batch shards are inserted at: 0, or 1 behind the layers of a stack.
        axes: the axes that split the tokens where the parameter meets them.
        layout: axis -> the dimension that it splits, of the parameter, its layers not stacked.
        rank: dimensions of the parameter, its layers not stacked.
    """

    parameter: str
    dim: int
    axes: tuple[str, ...]
    layout: Mapping[str, Shard]
    rank: int
    mesh: xs.Mesh

    @property
    def shards(self) -> int:
        return math.prod(self.mesh.shape()[axis] for axis in self.axes)

    @property
    def spec(self) -> PartitionSpec:
        """Partition spec, the inserted dimension included."""
        kept = {axis: shard for axis, shard in self.layout.items() if axis not in self.axes}
        return (None,) * self.dim + (self.axes,) + self._spec(kept)

    @property
    def scatters(self) -> bool:
        """Whether reduce-scatters that are written out make it cheaper where it is reduced at once.

        Of a batched product over one ring the compiler makes a reduce-scatter by itself, in the layout that the product
        likes; ours costs a copy of an operand.
        """
        rings = len(self.sum.scatter)
        return rings > 1 or (rings == 1 and self.rank == 2)

    @property
    def layer(self) -> PartialGradient:
        """That of one layer, where layers are stacked."""
        return replace(self, dim=0)

    @property
    def sum(self) -> partial_gradients.Sum:
        """Scattered along each axis that splits the parameter, ring by ring; added along the others."""
        sizes = self.mesh.shape()
        rings = {axis: _rings(axis, size, math.prod(sizes.values())) for axis, size in sizes.items()}
        before = [() if entry is None else (entry,) if isinstance(entry, str) else entry for entry in self.spec]
        scatter = [(axis, self.dim + self.layout[axis].dim) for axis in self.axes if axis in self.layout]
        # what is scattered last is innermost, also where an axis that comes later splits the dimension already
        out: list[list[str]] = [[] for _ in range(self.dim + self.rank)]
        kept = [axis for axis in self.mesh.shape() if axis in self.layout and axis not in self.axes]
        for axis in [*kept, *(axis for axis, _ in scatter)]:
            out[self.dim + self.layout[axis].dim] += rings[axis]
        return partial_gradients.Sum(
            self.parameter,
            self.dim,
            scatter=tuple((ring, dim) for axis, dim in scatter for ring in rings[axis]),
            add=tuple(ring for axis in self.axes if axis not in self.layout for ring in rings[axis]),
            manual=Manual(
                tuple(pair for sizes in rings.values() for pair in sizes.items()),
                (tuple(tuple(ring for axis in group for ring in rings[axis]) or None for group in before),),
                (tuple(tuple(group) or None for group in out),),
                device_order(self.mesh),
            ),
        )

    def zeros(self, parameter: torch.Tensor) -> torch.Tensor:
        shape = (*parameter.shape[: self.dim], self.shards, *parameter.shape[self.dim :])
        return torch.zeros(shape, dtype=parameter.dtype, device=parameter.device)

    def total(self, gradient: torch.Tensor) -> torch.Tensor:
        """The sum over batch shards, laid out as the parameter."""
        total = partial_gradients.total(sharding.constrain(gradient, self.mesh, self.spec), self.sum)
        return sharding.constrain(total, self.mesh, (None,) * self.dim + self._spec(self.layout))

    def leaf(self, parameter: torch.Tensor) -> torch.Tensor:
        """A tensor [shards, *parameter shape] whose gradient is summed and becomes that of ``parameter``, one layer's.

        Its values are never read.
        """
        return _Leaf.apply(parameter, self)

    def _spec(self, layout: Layout) -> PartitionSpec:
        return partition_spec(layout, self.rank, tuple(self.mesh.shape()))


def _rings(axis: str, size: int, devices: int) -> dict[str, int]:
    """``axis`` as several of at most 16 devices each, and of fewer than there are: name -> size, outermost first.

    Where a reduce-scatter runs over all the chips of a torus, libtpu turns it into an all-reduce.
    """
    sizes = []
    longest = min(_LONGEST_RING, devices - 1)
    while size > longest and (ring := max((d for d in range(1, longest + 1) if size % d == 0), default=1)) > 1:
        sizes.append(ring)
        size //= ring
    return {f"{axis}.{i}": ring for i, ring in enumerate([*sizes, size])}


class _Leaf(torch.autograd.Function):
    @staticmethod
    def forward(ctx, parameter: torch.Tensor, partial: PartialGradient) -> torch.Tensor:  # type: ignore[override]
        ctx.partial = partial
        return parameter.unsqueeze(0).expand(partial.shards, *parameter.shape)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):  # type: ignore[override]
        return ctx.partial.total(gradient), None


def partial_gradients_of(
    model: PreTrainedModel, recipe: Recipe, plain_plan: ShardingPlan, mesh: xs.Mesh
) -> dict[str, PartialGradient]:
    """The gradient by batch shard of every parameter that several batch shards meet, by the parameter's stored name."""
    experts_inside = experts_modules(model)
    found = {}
    for name, _ in model.named_parameters():
        entry = plain_plan[name.replace(".*.", ".0.")]
        if recipe.compute.experts == "dropless" and name.rpartition(".")[0] in experts_inside:
            continue  # one operation, which leaves its gradients reduced
        axes = token_axes(name, entry, recipe, experts_inside)
        layout = {axis: shard for axis, shard in entry.layout.items() if isinstance(shard, Shard)}
        partial = PartialGradient(name, int(".*." in name), axes, layout, len(entry.shape), mesh)
        if partial.shards > 1:
            found[name] = partial
    return found


def token_axes(name: str, entry: ParameterPlan, recipe: Recipe, experts_inside: Sequence[str]) -> tuple[str, ...]:
    """The axes that split the tokens where they meet the parameter."""
    # tokens have crossed the axes that split the experts: these split no expert's tokens any more
    crosses = recipe.compute.experts == "capacity" and name.rpartition(".")[0] in experts_inside
    return tuple(axis for axis in recipe.batch if not (crosses and axis in entry.axes_of(0)))
