"""The one room that talks to torch_xla.distributed.spmd: place tensors, constrain values and gradients, check.

A layout becomes torch_xla's partition spec (per tensor dimension: None, an axis, or a tuple of axes in mesh order) in
`trainer.layout.plan`; here it meets the device. torch_xla's own `convert_to_xla_partition_spec` is not used: it forgets the
first of two axes on one dimension.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs

from trainer.arrays import Array, Slices
from trainer.errors import UserError
from trainer.layout.partition import PartitionSpec
from trainer.xla.mesh import AbstractMesh, local_devices

REPLICATED = "{replicated}"
# mesh and spec -> XLA's sharding, as an object for the compiler and as text; an op's argument must be plain data
_shardings: dict[str, object] = {}
_texts: dict[str, str] = {}


def place(
    name: str, values: Array, mesh: xs.Mesh, spec: PartitionSpec, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Lay ``values`` out over the XLA devices in one go: each device is sent its shard, and that alone is read.

    Marking a tensor that is not on XLA yet is the field's commonest mistake ("Input tensor is not an XLA tensor"), so
    there is no separate marking to call. On an :class:`AbstractMesh` nothing moves, and ``values`` may be on meta.

    Args:
        values: a tensor on the host, or what can be read by slices like one.
        dtype: what to store it in; default: its own.

    Raises:
        UserError: it holds no data on the host to move (meta), its rank is not the spec's, or it does not divide.
    """
    shape, dtype = tuple(values.shape), dtype or values.dtype
    if isinstance(mesh, AbstractMesh):
        return mesh.place(name, shape, dtype, spec)
    if isinstance(values, torch.Tensor) and values.device.type != "cpu":
        raise UserError(
            asked=f"place {name} as {spec}",
            found=f"it is on device {values.device}",
            why="a tensor goes from the host to its shards in one pass; one on another device has no host data to send",
            instead="give the tensor on the CPU (a meta model gets its weights from trainer.weights.place)",
        )
    if len(shape) != len(spec):
        raise UserError(
            asked=f"place {name} as {spec}",
            found=f"its shape is {list(shape)}",
            why="a partition spec names every dimension of its tensor; another rank is silently left replicated",
            instead=f"write a spec of {len(shape)} entries",
        )
    places = [shard_slices(name, shape, mesh, spec, device) for device in local_devices()]
    read = {str(where): where for where in places}  # replicas are read once
    sent = {key: values[where].to(dtype).contiguous() for key, where in read.items()}
    return torch_xla._XLAC._global_tensor_from_cpu_shards(
        [sent[str(where)] for where in places], mesh.get_op_sharding(spec), torch.Size(shape)
    )


def shard_slices(name: str, shape: Sequence[int], mesh: xs.Mesh, spec: PartitionSpec, device: int) -> Slices:
    """Which part of a tensor of ``shape`` device number ``device`` holds, a slice for each dimension.

    Raises:
        UserError: a dimension can't be divided by the axes that split it.
    """
    sizes = mesh.shape()
    coordinates = np.unravel_index(int(np.flatnonzero(mesh.device_ids == device)[0]), mesh.mesh_shape)
    position = dict(zip(sizes, coordinates, strict=True))
    slices = []
    for dim, (size, entry) in enumerate(zip(shape, spec, strict=True)):
        index, parts = 0, 1
        for axis in () if entry is None else (entry,) if isinstance(entry, str) else entry:
            index, parts = index * sizes[axis] + int(position[axis]), parts * sizes[axis]
        if size % parts:
            raise UserError(
                asked=f"place {name} as {spec}",
                found=f"dimension {dim} of shape {list(shape)} is to be split {parts} ways",
                why="shards are equal",
                instead="a size that the axes' product divides, or fewer axes on this dimension",
            )
        slices.append(slice(index * (size // parts), (index + 1) * (size // parts)))
    return tuple(slices)


def zeros(name: str, like: torch.Tensor, dtype: torch.dtype, mesh: xs.Mesh, spec: PartitionSpec) -> torch.Tensor:
    """Zeros of the shape of ``like``, placed."""
    return place(name, torch.zeros((), dtype=dtype).expand(like.shape), mesh, spec)


def zeros_on_device(shape: Sequence[int], dtype: torch.dtype, mesh: xs.Mesh, spec: PartitionSpec) -> torch.Tensor:
    """Zeros that the devices make themselves, each its shard, once they are run; the host holds none of them."""
    return constrain(torch.zeros(tuple(shape), dtype=dtype, device=torch_xla.device()), mesh, spec)


def shards(tensor: torch.Tensor) -> list[tuple[Slices, torch.Tensor]]:
    """(where it lies in the whole, values on the host) of each shard of this process's devices, replicas left out.

    No computation is compiled for it.
    """
    xm.wait_device_ops()  # shards are read as they lie, and a step that is still being launched has none yet
    ((values, places),) = zip(
        torch_xla._XLAC._get_local_shards([tensor]),
        torch_xla._XLAC._get_local_shard_replica_and_indices([tensor]),
        strict=True,
    )
    whole = tuple(slice(0, size) for size in tensor.shape)
    return [
        (whole if where is Ellipsis else tuple(where), shard)
        for (shard, _), (replica, where) in zip(values, places, strict=True)
        if replica == 0
    ]


def fetch(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a placed tensor on the host, put together from its shards."""
    whole = torch.empty(tensor.shape, dtype=tensor.dtype)
    for where, shard in shards(tensor):
        whole[where] = shard
    return whole


def check_placed(tensors: Mapping[str, torch.Tensor], mesh: xs.Mesh, specs: Mapping[str, PartitionSpec]) -> None:
    """Assert that every tensor is on XLA and laid out as planned.

    Raises:
        UserError: names the tensor, its device or layout, and the layout that was planned.
    """
    for name, tensor in tensors.items():
        if tensor.device.type != "xla":
            raise UserError(
                asked=f"{name} laid out as {specs[name]}",
                found=f"it is on device {tensor.device}, not on XLA",
                why="only tensors on XLA devices are laid out over the mesh",
                instead="move it with trainer.xla.sharding.place, which moves and lays out in one call",
            )
        found, planned = torch_xla._XLAC._get_xla_sharding_spec(tensor), planned_sharding(mesh, specs[name])
        if (found or REPLICATED) != planned:
            raise UserError(
                asked=f"{name} laid out as {specs[name]}, that is {planned}",
                found=f"the device has it as {found or REPLICATED}",
                why="a tensor whose layout is not the plan's costs memory or communication that nobody asked for",
                instead="place it with trainer.xla.sharding.place",
            )


def planned_sharding(mesh: xs.Mesh, spec: PartitionSpec) -> str:
    """XLA's own text of the sharding that ``spec`` means on ``mesh``, read off a probe of one element a shard."""
    key = f"{mesh}{spec}"
    if key not in _texts:
        sizes = mesh.shape()
        axes = [() if a is None else (a,) if isinstance(a, str) else a for a in spec]
        probe = torch.zeros([math.prod(sizes[axis] for axis in group) for group in axes])
        _texts[key] = torch_xla._XLAC._get_xla_sharding_spec(place("a probe", probe, mesh, spec)) or REPLICATED
    return _texts[key]


@torch.library.custom_op("shardwright::constrain", mutates_args=())
def _constrain(tensor: torch.Tensor, key: str) -> torch.Tensor:
    # out of place: parameters marked in place have a second copy in every step (pytorch/xla#8809; docs/tpu.md)
    # (a `clone` of a tensor that waits on the device is that tensor again, and keeps its first annotation)
    out = torch.ops.aten.view_copy(tensor, tensor.shape)
    torch_xla._XLAC._xla_mark_sharding(out, _shardings[key])
    return out


@_constrain.register_fake
def _(tensor: torch.Tensor, key: str) -> torch.Tensor:
    return torch.empty_like(tensor)


def _setup(ctx, inputs, output) -> None:
    ctx.key = inputs[1]


def _backward(ctx, gradient: torch.Tensor):
    return _constrain(gradient, ctx.key), None


_constrain.register_autograd(_backward, setup_context=_setup)


def constrain(tensor: torch.Tensor, mesh: xs.Mesh, spec: PartitionSpec) -> torch.Tensor:
    """A copy of ``tensor`` laid out as ``spec`` says; in the backward its gradient is laid out likewise.

    Out of place in both directions, and one opaque op for AOTAutograd, so it may stand inside a scanned layer.
    """
    key = f"{mesh}{spec}"
    if key not in _shardings:
        _shardings[key] = mesh.get_op_sharding(spec)
    return _constrain(tensor, key)
