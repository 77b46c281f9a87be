"""A lowered step run on 8 virtual CPU devices by jax's runtime: ``python tests/support/lowered_on_cpu.py FOLDER``.

It is a process of its own so that torch_xla has no part in it. It reads ``step.hlo.pb``, ``request.json`` (the results'
shapes, and shardings and aliases as shardwright.compile.libtpu_process takes them) and ``inputs.npz`` (the whole
arguments ``0``, ``1``, …), and leaves ``outputs.npz`` (the whole results).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
# compiling is most of the time
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
sys.path.insert(0, str(Path(__file__).parents[2]))

import jax
import numpy as np

# semi-private: jax/_src/compiler.py, lib/__init__.py and sharding_impls.py, jax 0.7.1
from jax._src import compiler
from jax._src.lib import xla_client
from jax._src.sharding_impls import GSPMDSharding

from shardwright.compile.libtpu_process import annotate

jax.config.update("jax_enable_x64", True)  # torch's integers and scalars have 64 bits
jax.config.update("jax_use_shardy_partitioner", False)  # torch_xla has GSPMD partition its steps


def main(folder: Path) -> None:
    request = json.loads((folder / "request.json").read_text())
    devices = tuple(jax.devices())
    options = compiler.get_compile_options(
        num_replicas=1,
        num_partitions=len(devices),
        device_assignment=np.array([[device.id for device in devices]]),
        use_spmd_partitioning=True,
    )
    module = annotate((folder / "step.hlo.pb").read_bytes(), request)
    step = devices[0].client.compile_and_load(module, xla_client.DeviceList(devices), options)
    given, placed = np.load(folder / "inputs.npz"), []
    for number, sharding in enumerate(step.get_parameter_shardings()):
        placed.append(jax.device_put(given[str(number)], GSPMDSharding(devices, sharding)))
    results = step.execute_sharded(placed).disassemble_into_single_device_arrays()
    whole = {}
    for number, (shards, sharding) in enumerate(zip(results, step.get_output_shardings(), strict=True)):
        shape, laid_out = tuple(request["shapes"][number]), GSPMDSharding(devices, sharding)
        whole[str(number)] = np.asarray(jax.make_array_from_single_device_arrays(shape, laid_out, shards))
    np.savez(folder / "outputs.npz", **whole)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
