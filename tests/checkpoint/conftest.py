"""A small state on the devices, and the folders that it is saved into."""

from __future__ import annotations

import uuid

import pytest

from shardwright.files.folder import Folder
from shardwright.layout.mesh import Mesh
from shardwright.xla import sharding
from shardwright.xla.device_mesh import build_mesh
from tests.support.checkpoints import SPECS, VALUES


@pytest.fixture(scope="module")
def state():
    mesh = build_mesh(Mesh(fsdp=2, tensor=4))
    return {name: sharding.place(name, values, mesh, SPECS[name]) for name, values in VALUES.items()}


@pytest.fixture(params=["disk", "memory"])
def output(request, tmp_path):
    return Folder(tmp_path / "run" if request.param == "disk" else f"memory://{uuid.uuid4()}/run")
