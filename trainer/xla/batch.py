"""Batches on the mesh: the rows of tensors of any rank, split over the batch axes."""

import math
from collections.abc import Mapping, Sequence

import torch

from shardwright.files.arrays import Slices
from shardwright.layout.partition import PartitionSpec
from shardwright.xla.device_mesh import AbstractMesh, DeviceMesh, local_devices
from shardwright.xla.sharding import place, shard_slices


def batch_spec(rank: int, batch_axes: Sequence[str]) -> PartitionSpec:
    """The layout of a batch tensor: dimension 0 over the batch axes, all others, and a scalar, replicated."""
    return (tuple(batch_axes), *([None] * (rank - 1))) if rank else ()


def place_batch(
    batch: Mapping[str, torch.Tensor], mesh: DeviceMesh, batch_axes: Sequence[str]
) -> dict[str, torch.Tensor]:
    """Moves a batch of mixed rank to the devices, laid out by :func:`batch_spec`; each process passes its own rows."""
    index, count = batch_share(mesh, batch_axes)
    placed = {}
    for name, held in batch.items():
        values = held if count == 1 or not held.dim() else HostRows(held, index, count)
        placed[name] = place(name, values, mesh, batch_spec(held.dim(), batch_axes))
    return placed


def own_rows(batch: Mapping[str, torch.Tensor], mesh: DeviceMesh, batch_axes: Sequence[str]) -> dict[str, torch.Tensor]:
    """This process's rows, for :func:`place_batch`, of a batch that every process has whole."""
    index, count = batch_share(mesh, batch_axes)
    return {name: t.chunk(count)[index] for name, t in batch.items()}


class HostRows:
    """The `shardwright.files.arrays.Array` of a batch tensor [rows, ...], of which this process holds one share."""

    def __init__(self, held: torch.Tensor, index: int, count: int) -> None:
        self.held, self.first = held, index * len(held)
        self.shape, self.dtype = (count * len(held), *held.shape[1:]), held.dtype

    def __getitem__(self, where: Slices) -> torch.Tensor:
        first, last, _ = where[0].indices(self.shape[0])
        return self.held[(slice(first - self.first, last - self.first), *where[1:])]


def batch_share(mesh: DeviceMesh, batch_axes: Sequence[str], devices: Sequence[int] | None = None) -> tuple[int, int]:
    """(index, count) of the share of a batch's rows that ``devices`` (default: this process's) need, of equal shares.

    Processes with replicas of the same rows get the same share. Rows that are not exactly one of equal shares: (0, 1).
    """
    if devices is None:
        if isinstance(mesh, AbstractMesh):  # no process has its devices
            return 0, 1
        devices = local_devices()
    parts = math.prod(mesh.shape()[axis] for axis in batch_axes)
    spec = batch_spec(1, batch_axes)
    needed = sorted({shard_slices("rows", (parts,), mesh, spec, device)[0].start for device in devices})
    first, held = needed[0], len(needed)
    if needed != list(range(first, first + held)) or first % held or parts % held:
        return 0, 1
    return first // held, parts // held
