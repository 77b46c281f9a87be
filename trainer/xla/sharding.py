"""Tensors on the mesh: placing them, constraining the layout of values and gradients, checking it, fetching them back.

Specs come from `shardwright.layout.partition`: torch_xla's own `convert_to_xla_partition_spec` forgets the first of two
axes on one dimension.
"""

import functools
import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch_xla
from torch_xla import _XLAC  # semi-private: torch_xla/csrc/init_python_bindings.cpp, torch_xla 2.9

from shardwright.errors import UserError
from shardwright.files.arrays import Array, Slices
from shardwright.hosts.hosts import hosts
from shardwright.layout.partition import PartitionSpec, axes_of
from shardwright.models.ops.arguments_as_text import as_text, from_text
from shardwright.xla.device_mesh import AbstractMesh, DeviceMesh, device_order, local_devices
from shardwright.xla.runtime import device_count, run_now, wait_for_devices

REPLICATED = "{replicated}"
PIECE = 1 << 30  # bytes of a tensor that a device holds whole while the tensor is gathered for its host
_CACHED_LAYOUTS = 4096  # far more than a run has


def place(
    name: str, values: Array, mesh: DeviceMesh, spec: PartitionSpec, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Moves ``values`` from the host to the XLA devices, reading and sending each device's shard alone.

    Marking a tensor that is not on XLA yet is the field's commonest mistake ("Input tensor is not an XLA tensor"), so
    no separate call marks. On an :class:`AbstractMesh` nothing moves, and ``values`` may be on meta.

    Raises:
        UserError: there is no data on the host (meta), its rank is not the spec's, or a dimension does not divide.
    """
    shape, dtype = tuple(values.shape), dtype or values.dtype
    if isinstance(mesh, AbstractMesh):
        return mesh.place(name, shape, dtype, spec)
    if isinstance(values, torch.Tensor) and values.device.type != "cpu":
        raise UserError(
            asked=f"place {name} as {spec}",
            found=f"it is on device {values.device}",
            why="a tensor goes from the host to its shards in one pass; one on another device has no host data to send",
            instead="give the tensor on the CPU (a meta model gets its weights from shardwright.weights.place)",
        )
    if len(shape) != len(spec):
        raise UserError(
            asked=f"place {name} as {spec}",
            found=f"its shape is {list(shape)}",
            why="a partition spec names every dimension of its tensor; another rank is silently left replicated",
            instead=f"write a spec of {len(shape)} entries",
        )
    sent = shards_on_host(name, values, mesh, spec, dtype)
    return _XLAC._global_tensor_from_cpu_shards(sent, mesh.get_op_sharding(spec), torch.Size(shape))


def shards_on_host(
    name: str, values: Array, mesh: DeviceMesh, spec: PartitionSpec, dtype: torch.dtype
) -> list[torch.Tensor]:
    """``values`` as each device of this host is to have them; raises UserError if a dimension does not divide."""
    places = [shard_slices(name, values.shape, mesh, spec, device) for device in local_devices()]
    parts = {str(where): where for where in places}  # replicas are read once
    read = {key: values[where].to(dtype).contiguous() for key, where in parts.items()}
    return [read[str(where)] for where in places]


def shard_slices(name: str, shape: Sequence[int], mesh: DeviceMesh, spec: PartitionSpec, device: int) -> Slices:
    """A tensor's part on the device with the id ``device``; raises UserError if axes do not divide a dimension."""
    sizes = mesh.shape()
    coordinates = np.unravel_index(int(np.flatnonzero(mesh.device_ids == device)[0]), mesh.mesh_shape)
    position = dict(zip(sizes, coordinates, strict=True))
    slices = []
    for dim, (size, entry) in enumerate(zip(shape, spec, strict=True)):
        index, parts = 0, 1
        for axis in axes_of(entry):
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


def zeros(name: str, shape: Sequence[int], dtype: torch.dtype, mesh: DeviceMesh, spec: PartitionSpec) -> torch.Tensor:
    return place(name, torch.zeros((), dtype=dtype).expand(tuple(shape)), mesh, spec)


def zeros_on_device(shape: Sequence[int], dtype: torch.dtype, mesh: DeviceMesh, spec: PartitionSpec) -> torch.Tensor:
    """Lazy zeros, of which each device makes its own shard."""
    return constrain(torch.zeros(tuple(shape), dtype=dtype, device=torch_xla.device()), mesh, spec)


def shards(tensor: torch.Tensor) -> list[tuple[Slices, torch.Tensor]]:
    """The shards that this process has to keep: (slices of the whole, values on the host).

    All hosts together list every part of the whole once. Nothing is compiled.
    """
    return [(where, values) for replica, where, values in _local_shards(tensor) if replica == 0]


def fetch(tensor: torch.Tensor) -> torch.Tensor:
    """A placed tensor, whole, on the host.

    All of several hosts must call it: the tensor is gathered over the devices, :data:`PIECE` bytes at a time.
    """
    if not hosts().several:
        whole = torch.empty(tensor.shape, dtype=tensor.dtype)
        for where, shard in shards(tensor):
            whole[where] = shard
        return whole
    # Cut along a dimension of the shards, so that cutting moves nothing: the first piece has the first rows of each
    # shard. All pieces are of one size, the last overlaps: one program for all.
    held = _local_shards(tensor)[0][2].shape
    dim = max(range(tensor.dim()), key=lambda dim: held[dim], default=None)
    if dim is None or tensor.numel() * tensor.element_size() <= PIECE:
        return _gather(tensor.detach())
    cut = (*tensor.shape[:dim], tensor.shape[dim] // held[dim], held[dim], *tensor.shape[dim + 1 :])
    size = max(1, PIECE * held[dim] // (tensor.numel() * tensor.element_size()))
    whole, parts = torch.empty(cut, dtype=tensor.dtype), tensor.detach().view(cut)
    for start in range(0, held[dim], size):
        rows = torch.arange(size) + min(start, held[dim] - size)
        whole.index_copy_(dim + 1, rows, _gather(parts.index_select(dim + 1, rows.to(tensor.device))))
    return whole.view(tensor.shape)


def _gather(tensor: torch.Tensor) -> torch.Tensor:
    """Gathers a tensor whole onto each device and host."""
    # One row for each device, all equal, each the whole tensor. Not a replicated output: the compiler shards such an
    # output as its operand is sharded.
    count = device_count()
    rows = tensor.unsqueeze(0).expand(count, *tensor.shape)
    gathered = _constrain(rows, as_text(((("all", count),), None, ("all", *[None] * tensor.dim()))))
    run_now([gathered])
    return _local_shards(gathered)[0][2].squeeze(0)


def _local_shards(tensor: torch.Tensor) -> list[tuple[int, Slices, torch.Tensor]]:
    """(replica number, slices of the whole, values) for each local device."""
    wait_for_devices()  # a step that is being launched has no shards yet
    (values,), (places,) = _XLAC._get_local_shards([tensor]), _XLAC._get_local_shard_replica_and_indices([tensor])
    whole = tuple(slice(0, size) for size in tensor.shape)
    return [
        (replica, whole if where is Ellipsis else tuple(where), shard)
        for (shard, _), (replica, where) in zip(values, places, strict=True)
    ]


def check_placed(tensors: Mapping[str, torch.Tensor], mesh: DeviceMesh, specs: Mapping[str, PartitionSpec]) -> None:
    """Raises UserError unless every tensor is on XLA and laid out as planned."""
    for name, tensor in tensors.items():
        if tensor.device.type != "xla":
            raise UserError(
                asked=f"{name} laid out as {specs[name]}",
                found=f"it is on device {tensor.device}, not on XLA",
                why="only tensors on XLA devices are laid out over the mesh",
                instead="move it with shardwright.xla.sharding.place, which moves and lays out in one call",
            )
        found, planned = _XLAC._get_xla_sharding_spec(tensor), _xla_text(layout_text(mesh, specs[name]))
        if (found or REPLICATED) != planned:
            raise UserError(
                asked=f"{name} laid out as {specs[name]}, that is {planned}",
                found=f"the device has it as {found or REPLICATED}",
                why="a tensor whose layout is not the plan's costs memory or communication that nobody asked for",
                instead="place it with shardwright.xla.sharding.place",
            )


@functools.lru_cache(maxsize=_CACHED_LAYOUTS)
def _xla_text(layout: str) -> str:
    """XLA's own text of a layout, read off a placed probe with one element a shard."""
    axes, order, spec = from_text(layout)
    sizes = dict(axes)
    mesh = DeviceMesh(list(order or range(math.prod(sizes.values()))), tuple(sizes.values()), tuple(sizes))
    probe = torch.zeros([math.prod(sizes[axis] for axis in axes_of(entry)) for entry in spec])
    return _XLAC._get_xla_sharding_spec(place("a probe", probe, mesh, spec)) or REPLICATED


def layout_text(mesh: DeviceMesh, spec: PartitionSpec) -> str:
    """``spec`` on ``mesh`` as text, since an operation's arguments are plain data; read by :func:`op_sharding`."""
    return as_text((tuple(mesh.shape().items()), device_order(mesh), spec))


@torch.library.custom_op("shardwright::constrain", mutates_args=())
def _constrain(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    # Out of place: a parameter that is marked in place has a second copy in every step (pytorch/xla#8809).
    # Not `clone`: the clone of a device tensor is that tensor, and keeps its first annotation.
    out = torch.ops.aten.view_copy(tensor, tensor.shape)
    _XLAC._xla_mark_sharding(out, op_sharding(layout))
    return out


@_constrain.register_fake
def _(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    return torch.empty_like(tensor)


def _setup(ctx, inputs, output) -> None:
    ctx.layout = inputs[1]


def _backward(ctx, gradient: torch.Tensor):
    return _constrain(gradient, ctx.layout), None


_constrain.register_autograd(_backward, setup_context=_setup)


def constrain(tensor: torch.Tensor, mesh: DeviceMesh, spec: PartitionSpec) -> torch.Tensor:
    """A copy of ``tensor`` laid out by ``spec``, as is its gradient; opaque to AOTAutograd, so a scan may hold it."""
    return _constrain(tensor, layout_text(mesh, spec))


@functools.lru_cache(maxsize=_CACHED_LAYOUTS)
def op_sharding(layout: str) -> object:
    """XLA's sharding object of a layout's text (:func:`layout_text`)."""
    axes, order, spec = from_text(layout)
    mesh = AbstractMesh(dict(axes))
    if order is not None:
        mesh.device_ids = np.array(order)
    return mesh.get_op_sharding(spec)
