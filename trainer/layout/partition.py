"""Partition specs, torch_xla's form of a layout: dimension → axes instead of axis → dimension."""

from collections.abc import Iterable, Sequence

from shardwright.errors import UserError
from shardwright.layout.placement import Shard
from shardwright.layout.recipe import Layout, layout_text

# per dimension of the tensor: None (not split), the axis that splits it, or several in mesh order
PartitionSpec = tuple[str | tuple[str, ...] | None, ...]


def shards_of(layout: Layout, axes: Iterable[str] | None = None) -> dict[str, Shard]:
    """The ones of ``axes``, or of the layout's own, that split a dimension, in their order."""
    return {axis: shard for axis in axes or layout if isinstance(shard := layout.get(axis), Shard)}


def partition_spec(layout: Layout, rank: int, mesh_axes: Sequence[str]) -> PartitionSpec:
    """The partition spec of a tensor with ``rank`` dimensions; ``mesh_axes``: all axes of the mesh, in order.

    Raises:
        UserError: the layout names a dimension that the tensor lacks, or an axis that the mesh lacks.
    """
    for axis, shard in shards_of(layout).items():
        if axis not in mesh_axes or shard.dim >= rank:
            raise UserError(
                asked=f"layout {layout_text(layout)}",
                found=f"a tensor of {rank} dimensions on a mesh of {', '.join(mesh_axes)}",
                why=f"axis {axis!r} cannot split dimension {shard.dim} of it",
                instead=f"a dimension below {rank}, an axis of the mesh, or leave the axis out to replicate",
            )
    shards = shards_of(layout, mesh_axes)
    axes_of_dim = [tuple(axis for axis, shard in shards.items() if shard.dim == dim) for dim in range(rank)]
    return tuple(axes if len(axes) > 1 else axes[0] if axes else None for axes in axes_of_dim)


def axes_of(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The axes in a partition spec's entry: none, one, or several."""
    return () if entry is None else (entry,) if isinstance(entry, str) else entry
