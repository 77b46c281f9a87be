"""Devices in mesh order, by the links between chips, for a run's own chips and for those that libtpu describes.

It is jax's own layout. torch_xla's `HybridMesh` is an older copy of it for fewer slices: it asserts a TPU in this
process, takes one slice with an index for several, and misplaces chips whose coordinates do not begin at 0.
"""

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Device:
    """A device in the attributes that jax reads; ``slice_index`` is -1 where the runtime reports none."""

    id: int
    coords: tuple[int, ...]
    core_on_chip: int
    slice_index: int
    device_kind: str
    platform: str = "tpu"

    def __str__(self) -> str:
        core = f", core {self.core_on_chip}" if self.core_on_chip else ""
        where = f" of slice {self.slice_index}" if self.slice_index >= 0 else ""
        return f"{','.join(map(str, self.coords))}{core}{where}"


def as_reported(attributes: Sequence[Mapping[str, Any]], kind: str) -> list[Device]:
    """The devices of ``kind`` (``TPU v5 lite``) in torch_xla's `global_runtime_device_attributes`, by id."""
    devices = []
    for each in attributes:
        coords, core = tuple(each.get("coords", ())), each.get("core_on_chip", 0)
        number = int(each["name"].rpartition(":")[2])
        devices.append(Device(number, coords, core, each.get("slice_index", -1), kind))
    return sorted(devices, key=operator.attrgetter("id"))


def in_mesh_order(devices: Sequence[Any], ici: Sequence[int], dcn: Sequence[int]) -> list[Any]:
    """The devices, row by row, of a mesh with these factors within a slice and over slices; errors are jax's own."""
    from jax.experimental import mesh_utils

    if math.prod(dcn) == 1:
        mesh = mesh_utils.create_device_mesh(ici, devices, allow_split_physical_axes=True)
    else:
        mesh = mesh_utils.create_hybrid_device_mesh(ici, dcn, devices, allow_split_physical_axes=True)
    return list(np.asarray(mesh).ravel())
