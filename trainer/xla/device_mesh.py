"""torch_xla's mesh from axis names and sizes, over this process's devices or over abstract ones."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch_xla.core.xla_builder import create_placeholder_tensor

from shardwright.errors import UserError
from shardwright.layout.mesh import Mesh
from shardwright.layout.partition import PartitionSpec
from shardwright.xla.chips import Chip
from shardwright.xla.device_order import as_reported, in_mesh_order
from shardwright.xla.runtime import chip, device_kind, init_runtime

# torch_xla's mesh, under a name that other packages use without importing torch_xla
DeviceMesh: TypeAlias = xs.Mesh
_SHOWN, _LETTERS = 8, 200  # devices, and characters of jax's message, in a refusal


def build_mesh(mesh: Mesh) -> DeviceMesh:
    """The mesh over every device, TPUs ordered by :mod:`shardwright.xla.device_order`, virtual CPU devices by ids.

    Raises:
        UserError: the mesh does not fit the devices, or its DCN factors the slices.
    """
    init_runtime()
    devices = xr.global_runtime_device_count()
    sizes = mesh.sizes(devices)
    ids = _tpu_order(mesh) if device_kind() == "TPU" else list(range(devices))
    return xs.Mesh(ids, tuple(sizes.values()), tuple(sizes))


def check_mesh(mesh: Mesh) -> None:
    """Raises UserError unless the TPUs of this runtime can be laid out as ``mesh``; opens no other devices."""
    if device_kind() == "TPU":
        _tpu_order(mesh)


def _tpu_order(mesh: Mesh) -> list[int]:
    devices = as_reported(xr.global_runtime_device_attributes(), xm.xla_device_kind())
    mesh = mesh.over_slices(len({device.slice_index for device in devices}), len(devices))
    ici = mesh.ici_sizes(len(devices))
    try:
        return [device.id for device in in_mesh_order(devices, tuple(ici.values()), tuple(mesh.dcn.values()))]
    # jax's assertions, and numpy's errors where its search can't divide an axis
    except Exception as error:
        shown = "; ".join(map(str, devices[:_SHOWN])) + (" …" if len(devices) > _SHOWN else "")
        raise UserError(
            asked=f"{mesh} on {len(devices)} × {devices[0].device_kind}",
            found=f"the runtime reports chips at {shown} ({type(error).__name__}: {str(error)[:_LETTERS]})",
            why="the order of devices follows the links between chips: they must fill a box, whose sides the axes "
            "divide",
            instead="every chip of a slice (no TPU_VISIBLE_CHIPS), and axes that are powers of two",
        ) from error


@dataclass(frozen=True)
class Placeholder:
    """A record of a tensor on an :class:`AbstractMesh`; a step that writes to the tensor does not change it."""

    name: str
    tensor: torch.Tensor
    spec: PartitionSpec


class AbstractMesh(xs.Mesh):
    """A mesh of absent devices, ids by position. Tensors placed on it have a shape and a layout, but no data."""

    def __init__(self, axes: Mapping[str, int], chip: Chip | None = None) -> None:
        # without the parent's __init__, which wants the runtime to have as many devices
        self.device_ids = np.arange(math.prod(axes.values()))
        self.mesh_shape, self.axis_names = tuple(axes.values()), tuple(axes)
        self.chip = chip
        self.placed: list[Placeholder] = []

    def place(self, name: str, shape: Sequence[int], dtype: torch.dtype, spec: PartitionSpec) -> torch.Tensor:
        placeholder = create_placeholder_tensor(tuple(shape), dtype)
        # a clone: writes to this tensor would reach a detached one
        self.placed.append(Placeholder(name, placeholder.clone(), spec))
        return placeholder


def device_order(mesh: DeviceMesh) -> tuple[int, ...] | None:
    """Device ids in mesh order, for kernels that run shard by shard; None for 0, 1, 2, …"""
    ids = tuple(int(i) for i in mesh.device_ids)
    return None if ids == tuple(range(len(ids))) else ids


def chip_of(mesh: DeviceMesh) -> Chip | None:
    """The chip of ``mesh``; None for virtual devices and unknown TPUs."""
    return mesh.chip if isinstance(mesh, AbstractMesh) else chip()


def local_devices() -> list[int]:
    """The ids, in a mesh, of this process's devices."""
    # semi-private: torch_xla/csrc/init_python_bindings.cpp, torch_xla 2.9
    return [int(name.rpartition(":")[2]) for name in torch_xla._XLAC._xla_get_runtime_devices()]
