"""What needs no device does not load torch_xla, so it works beside another backend, and starts at once."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.paths import ROOT

MODULES = [
    *(f"shardwright.weights.{name}" for name in ("weight_sources", "lazy_tensors", "hub_read", "hub_write")),
    *(f"shardwright.checkpoint.{name}" for name in ("host_state", "manifest", "tensors", "read")),
    *(f"shardwright.data.{path.stem}" for path in sorted((ROOT / "trainer" / "data").glob("[!_]*.py"))),
]
LOADED_BY = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    if "torch_xla" in sys.modules:
        sys.exit(name)
"""


def test_what_needs_no_device_does_not_load_torch_xla():
    # transformers loads torch_xla where it is installed, unless told not to
    environment = {**os.environ, "USE_TORCH_XLA": "0"}
    command = [sys.executable, "-c", LOADED_BY, *MODULES, "shardwright.weights.place"]
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, check=False)
    assert done.stderr.splitlines()[-1] == "shardwright.weights.place", "the first that loads it, and no other does"
