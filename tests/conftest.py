"""8 virtual CPU devices for every test of this process; the environment must be set before torch_xla's first call."""

import os

os.environ["PJRT_DEVICE"] = "CPU"
os.environ["CPU_NUM_DEVICES"] = "8"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest

from trainer.mesh import init_runtime


@pytest.fixture(scope="session", autouse=True)
def spmd() -> None:
    """XLA in SPMD mode on the 8 devices, for every test.

    Counting the devices makes the client: torch's autograd fixes its number of devices at a process's first backward,
    and one on the CPU before there is a client breaks the later ones on XLA.
    """
    assert init_runtime().startswith("8 virtual CPU devices")
