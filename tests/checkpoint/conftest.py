"""A small state on the devices, and the folders that it is saved into."""

from __future__ import annotations

import uuid

import pytest

from tests.support.checkpoints import SPECS, VALUES
from trainer.layout.mesh import Mesh
from trainer.storage import Folder
from trainer.xla import sharding
from trainer.xla.mesh import build_mesh


@pytest.fixture(scope="module")
def state():
    mesh = build_mesh(Mesh(fsdp=2, tensor=4))
    return {name: sharding.place(name, values, mesh, SPECS[name]) for name, values in VALUES.items()}


@pytest.fixture(params=["disk", "memory"])
def output(request, tmp_path):
    return Folder(tmp_path / "run" if request.param == "disk" else f"memory://{uuid.uuid4()}/run")
