"""Devices in mesh order, by the links between chips, for a run's own chips and for those that libtpu describes.

It is jax's own layout. torch_xla's `HybridMesh` is an older copy of it for fewer slices: it asserts a TPU in this
process, takes one slice with an index for several, and misplaces chips whose coordinates do not begin at 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Device:
    """A device as the runtime reports it, in the attributes that jax reads.

    Args:
        id: torch_xla's, from 0.
        slice_index: -1 where the runtime reports none.
        device_kind: the runtime's name of the chip, ``TPU v5 lite``.
    """

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
    """The devices in torch_xla's `global_runtime_device_attributes`, by id."""
    devices = [
        Device(
            id=int(each["name"].rpartition(":")[2]),
            coords=tuple(each.get("coords", ())),
            core_on_chip=each.get("core_on_chip", 0),
            slice_index=each.get("slice_index", -1),
            device_kind=kind,
        )
        for each in attributes
    ]
    return sorted(devices, key=lambda device: device.id)


def in_mesh_order(devices: Sequence[Any], ici: Sequence[int], dcn: Sequence[int]) -> list[Any]:
    """The devices, row by row, of a mesh with these factors within a slice and over slices.

    Raises:
        Exception: any of jax's, if the devices can't be laid out so.
    """
    from jax.experimental import mesh_utils

    if math.prod(dcn) == 1:
        mesh = mesh_utils.create_device_mesh(ici, devices, allow_split_physical_axes=True)
    else:
        mesh = mesh_utils.create_hybrid_device_mesh(ici, dcn, devices, allow_split_physical_axes=True)
    return list(np.asarray(mesh).ravel())
