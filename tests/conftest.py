"""8 virtual CPU devices for every test of this process; the environment must be set before torch_xla's first call."""

import os

os.environ["PJRT_DEVICE"] = "CPU"
os.environ["CPU_NUM_DEVICES"] = "8"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest


@pytest.fixture(scope="session")
def spmd() -> None:
    """XLA in SPMD mode on the 8 devices."""
    import torch_xla.runtime as xr

    xr.use_spmd()
