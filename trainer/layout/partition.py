"""A layout in torch_xla's convention, a partition spec: per dimension None, an axis, or several."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.tensor import Shard

from trainer.errors import UserError
from trainer.layout.recipe import Layout, layout_text

PartitionSpec = tuple[str | tuple[str, ...] | None, ...]


def shards_of(layout: Layout) -> dict[str, Shard]:
    return {axis: placement for axis, placement in layout.items() if isinstance(placement, Shard)}


def partition_spec(layout: Layout, rank: int, mesh_axes: Sequence[str]) -> PartitionSpec:
    """``layout`` in torch_xla's convention: per dimension None, an axis, or a tuple of axes in mesh order.

    Args:
        layout: axis → placement.
        rank: dimensions of the tensor.
        mesh_axes: every axis of the mesh, in its order.

    Raises:
        UserError: a dimension the tensor lacks, or an axis the mesh lacks.
    """
    shards = shards_of(layout)
    for axis, shard in shards.items():
        if axis not in mesh_axes or shard.dim >= rank:
            raise UserError(
                asked=f"layout {layout_text(layout)}",
                found=f"a tensor of {rank} dimensions on a mesh of {', '.join(mesh_axes)}",
                why=f"axis {axis!r} cannot split dimension {shard.dim} of it",
                instead=f"a dimension below {rank}, an axis of the mesh, or leave the axis out to replicate",
            )
    axes_of_dim = [
        tuple(axis for axis in mesh_axes if axis in shards and shards[axis].dim == dim) for dim in range(rank)
    ]
    return tuple(axes if len(axes) > 1 else axes[0] if axes else None for axes in axes_of_dim)


def axes_of(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The axes that a partition spec's entry names: none, one, or several."""
    return () if entry is None else (entry,) if isinstance(entry, str) else entry
