"""Placed: a model's parameters as they lie on the mesh, which the steps share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.layout.partition import PartitionSpec
from shardwright.models.ops.partial_gradients import Tensors
from shardwright.xla.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Placed:
    """Parameters on the mesh.

    Args:
        mesh: the device grid.
        batch_axes: the mesh axes that split a batch's rows.
        parameters: name → placed parameter. Train step, evaluation and export share this dict.
        specs: name → partition spec of the parameter, of its gradient and of its moments.
    """

    mesh: DeviceMesh
    batch_axes: tuple[str, ...]
    parameters: Tensors
    specs: Mapping[str, PartitionSpec]
