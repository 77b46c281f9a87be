"""From axis names and sizes to torch_xla's device grid; the only room that turns SPMD on.

torch_xla is imported inside the functions: its import picks a device and logs it, and ``init_runtime`` says it better.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from trainer.errors import UserError
from trainer.layout.recipe import Mesh

if TYPE_CHECKING:
    from torch_xla.distributed.spmd import Mesh as XlaMesh
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
import torch_xla
import torch_xla.distributed.spmd as xs
from torch_xla.core.xla_builder import create_placeholder_tensor

from trainer.layout.partition import PartitionSpec
from trainer.xla.runtime import init_runtime

# torch_xla's mesh, under a name that other packages use without importing torch_xla
DeviceMesh: TypeAlias = xs.Mesh


def build_mesh(mesh: Mesh) -> XlaMesh:
    """The device grid over every device of the runtime, its axes in the recipe's order.

    On a TPU the order of devices follows the physical topology, slices outside (torch_xla's ``HybridMesh``);
    on virtual CPU devices, which have none, it is that of their ids.

    Raises:
        UserError: the mesh does not fit the devices, or its DCN factors the slices.
    """
    init_runtime()
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr

    devices = xr.global_runtime_device_count()
    sizes = mesh.sizes(devices)
    if xr.device_type() != "TPU":
        return xs.Mesh(list(range(devices)), tuple(sizes.values()), tuple(sizes))
    # single-slice devices need not have the attribute
    slices = {attributes.get("slice_index", 0) for attributes in xr.global_runtime_device_attributes()}
    check_slices(mesh, len(slices))
    return xs.HybridMesh(
        ici_mesh_shape=tuple(mesh.ici_sizes(devices).values()),
        dcn_mesh_shape=tuple(mesh.dcn_sizes().values()),
        axis_names=tuple(sizes),
    )


def check_slices(mesh: Mesh, slices: int) -> None:
    """Raise UserError unless the mesh's DCN factors multiply to ``slices``, the number that the devices form."""
    asked = math.prod(mesh.dcn_sizes().values())
    if asked != slices:
        outer = next(iter(mesh.axes))
        raise UserError(
            asked=f"{mesh}: DCN factors for {asked} slices",
            found=f"the devices form {slices} slices",
            why="only devices of one slice are joined by ICI",
            instead=f"dcn={{{outer!r}: {slices}}} on the axis that communicates least"
            if slices > 1
            else "no dcn=, and these factors in the axes' own sizes",
        )


@dataclass(frozen=True)
class Placeholder:
    """What stands for a tensor placed on an :class:`AbstractMesh`; a step that writes to that one leaves this alone."""

    name: str
    tensor: torch.Tensor
    spec: PartitionSpec


class AbstractMesh(xs.Mesh):
    """A mesh of devices that are not here. What is placed on it has a shape and a layout, and no data.

    Args:
        axes: axis -> size, in mesh order; device ids are positions in the mesh.
    """

    def __init__(self, axes: Mapping[str, int]) -> None:
        # not the parent's, which wants the runtime to have as many devices
        self.device_ids = np.arange(math.prod(axes.values()))
        self.mesh_shape, self.axis_names = tuple(axes.values()), tuple(axes)
        self.placed: list[Placeholder] = []

    def place(self, name: str, shape: Sequence[int], dtype: torch.dtype, spec: PartitionSpec) -> torch.Tensor:
        placeholder = create_placeholder_tensor(tuple(shape), dtype)
        self.placed.append(Placeholder(name, placeholder.clone(), spec))  # a detached one would be written to as well
        return placeholder


def device_order(mesh: xs.Mesh) -> tuple[int, ...] | None:
    """Device ids in mesh order, for kernels that run shard by shard; None where they count up."""
    ids = tuple(int(i) for i in mesh.device_ids)
    return None if ids == tuple(range(len(ids))) else ids


def local_devices() -> list[int]:
    """The numbers of this process's devices, as a mesh counts them."""
    return [int(name.rpartition(":")[2]) for name in torch_xla._XLAC._xla_get_runtime_devices()]
