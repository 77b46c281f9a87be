"""Sums of a weight's gradient over devices: by reduce-scatters or exchanges, a mesh axis at a time.

A weight's gradient is a sum over tokens, and tokens are split over the batch axes. The partitioner makes of that sum an
all-reduce and then a slice, which sends twice as much. The compiler turns the two into a reduce-scatter only for some
sliced dimensions, and never over all chips of a torus at once. So the unfinished sum has a shape of its own (see
``shardwright.models.ops.partial_gradients``), and the collectives that finish it are written out.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from shardwright.job import Job
from shardwright.layout.partition import PartitionSpec, axes_of, partition_spec, shards_of
from shardwright.layout.placement import Shard
from shardwright.layout.plan import ParameterPlan
from shardwright.layout.recipe import Layout, Recipe
from shardwright.layout.stacking import first_name, is_stacked
from shardwright.models.experts.expert_families import experts_modules
from shardwright.models.ops import jax_call, partial_gradients
from shardwright.models.ops.collectives import rings
from shardwright.models.ops.jax_call import Manual
from shardwright.models.ops.operation import LinearMap
from shardwright.xla import sharding
from shardwright.xla.device_mesh import DeviceMesh, device_order

_LONGEST_RING = 16  # libtpu would turn a reduce-scatter over all the chips of a torus into an all-reduce
_LONGEST_EXCHANGE = 4  # the longer its ring, the more links a part crosses; few sides of a slice are shorter
_MOST_EXCHANGE = 8  # over 64 chips the sums of the parts, ring after ring, take longer than is saved


@dataclass(frozen=True)
class PartialGradient:
    """A weight gradient with one unreduced part for each batch shard."""

    parameter: str  # its stored name
    dim: int  # where the batch shards are inserted: 0, or 1 behind the layers of a stack
    axes: tuple[str, ...]  # that split the tokens where the parameter meets them
    layout: Mapping[str, Shard]  # axis → the dimension that it splits, of one layer's parameter
    rank: int  # of one layer's parameter
    mesh: DeviceMesh
    exchanges: bool = False  # the devices exchange parts while they compute: in the loop over layers

    @property
    def shards(self) -> int:
        return math.prod(self.mesh.shape()[axis] for axis in self.axes)

    @property
    def spec(self) -> PartitionSpec:
        """The inserted dimension included."""
        kept = {axis: shard for axis, shard in self.layout.items() if axis not in self.axes}
        return (None,) * self.dim + (self.axes,) + self._spec(kept)

    @property
    def scatters(self) -> bool:
        """Whether written-out reduce-scatters are cheaper than the compiler's, where the gradient is reduced at once.

        For a batched product over one ring the compiler makes a reduce-scatter by itself, in the layout that suits the
        product; ours would cost a copy of an operand.
        """
        scattered = len(self.sum.scatter)
        return scattered > 1 or (scattered == 1 and self.rank == 2)

    @property
    def exchanged(self) -> bool:
        """Whether the sum is by an exchange of parts: for a matrix over few devices, in the loop over layers."""
        few = self.exchanges and self.shards <= _MOST_EXCHANGE
        return few and self.dim == 0 and self.rank == 2 and is_stacked(self.parameter)

    @property
    def sum(self) -> partial_gradients.Sum:
        """The collectives: scatters, ring by ring, along the axes that split the parameter; sums along the others."""
        sizes = self.mesh.shape()
        longest = _LONGEST_EXCHANGE if self.exchanged else min(_LONGEST_RING, math.prod(sizes.values()) - 1)
        cut = {axis: rings(axis, size, longest) for axis, size in sizes.items()}
        before = [axes_of(entry) for entry in self.spec]
        scatter = [(axis, self.dim + self.layout[axis].dim) for axis in self.axes if axis in self.layout]
        # The axis that is scattered last is innermost, also where a later axis of the mesh splits the dimension.
        out: list[list[str]] = [[] for _ in range(self.dim + self.rank)]
        kept = [axis for axis in self.mesh.shape() if axis in self.layout and axis not in self.axes]
        for axis in [*kept, *(axis for axis, _ in scatter)]:
            out[self.dim + self.layout[axis].dim] += cut[axis]
        return partial_gradients.Sum(
            self.parameter,
            self.dim,
            scatter=tuple((ring, dim) for axis, dim in scatter for ring in cut[axis]),
            add=tuple(ring for axis in self.axes if axis not in self.layout for ring in cut[axis]),
            exchanged=self.exchanged,
            manual=Manual(
                tuple(pair for sizes in cut.values() for pair in sizes.items()),
                (tuple(tuple(ring for axis in group for ring in cut[axis]) or None for group in before),),
                (tuple(tuple(group) or None for group in out),),
                device_order(self.mesh),
            ),
        )

    def zeros(self, parameter: Tensor) -> Tensor:
        """Zeros of the shape of the stored ``parameter`` with the batch shards inserted."""
        shape = (*parameter.shape[: self.dim], self.shards, *parameter.shape[self.dim :])
        return torch.zeros(shape, dtype=parameter.dtype, device=parameter.device)

    def total(self, gradient: Tensor) -> Tensor:
        """The sum over batch shards, laid out as the parameter."""
        total = partial_gradients.total(sharding.constrain(gradient, self.mesh, self.spec), self.sum)
        return sharding.constrain(total, self.mesh, (None,) * self.dim + self._spec(self.layout))

    def leaf(self, parameter: Tensor) -> Tensor:
        """A tensor [shards, *shape], never read, whose gradient sums to that of one layer's ``parameter``."""
        return LinearMap.apply(
            lambda one: one.unsqueeze(0).expand(self.shards, *one.shape), replace(self, dim=0).total, parameter
        )

    def _spec(self, layout: Layout) -> PartitionSpec:
        return partition_spec(layout, self.rank, tuple(self.mesh.shape()))


def partial_gradients_of(job: Job, model: PreTrainedModel, mesh: DeviceMesh) -> dict[str, PartialGradient]:
    """Stored name → partial gradient, for every parameter of the assembled ``model`` that several batch shards meet."""
    experts_inside, found = experts_modules(model), {}
    for name, _ in model.named_parameters():
        # the kernel of dropless experts leaves their gradients reduced
        reduced = job.recipe.compute.experts == "dropless" and name.rpartition(".")[0] in experts_inside
        if reduced or name in job.untrained:
            continue
        entry, exchanges = job.plan[first_name(name)], jax_call.exchanges_beside()
        axes, layout = token_axes(name, entry, job.recipe, experts_inside), shards_of(entry.layout)
        partial = PartialGradient(name, int(is_stacked(name)), axes, layout, len(entry.shape), mesh, exchanges)
        if partial.shards > 1:
            found[name] = partial
    return found


def token_axes(name: str, entry: ParameterPlan, recipe: Recipe, experts_inside: Sequence[str]) -> tuple[str, ...]:
    # With capacity, tokens have crossed the axes that split the experts, which then split no expert's tokens.
    crosses = recipe.compute.experts == "capacity" and name.rpartition(".")[0] in experts_inside
    return tuple(axis for axis in recipe.batch if not (crosses and axis in entry.axes_of(0)))
