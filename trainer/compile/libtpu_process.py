"""The process that loads libtpu; only shardwright.compile.libtpu starts it.

``python -m shardwright.compile.libtpu_process FOLDER PARENT`` reads ``step.hlo.pb`` and ``request.json`` in FOLDER and
leaves there ``result.json`` (memory sizes in bytes and CPU seconds, or the compiler's error), ``optimised.hlo.gz`` and
``buffers.txt.gz`` (the allocations, and the buffers in HBM at its peak). It ends when the process PARENT does.
"""

import ctypes
import gzip
import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

# semi-private: jax/_src/compiler.py, interpreters/mlir.py and lib/__init__.py, jax 0.7.1; no public call compiles HLO
# that is not jax's own
from jax._src import compiler
from jax._src.interpreters import mlir
from jax._src.lib import xla_client
from jax._src.lib.mlir import ir
from jax.experimental import topologies

from shardwright.compile.hlo.buffers import peak_buffers
from shardwright.xla.device_order import in_mesh_order

_SIZES = ("argument", "output", "alias", "temp", "generated_code")


def main(folder: Path) -> None:
    """Compiles the step in ``folder`` and leaves the result there."""
    request = json.loads((folder / "request.json").read_text())
    module = annotate((folder / "step.hlo.pb").read_bytes(), request)
    devices = _devices(request)
    result: dict[str, Any] = {}
    try:
        compiled = _compile(module, devices, request["flags"])
    except jax.errors.JaxRuntimeError as error:
        result["error"] = str(error)
        text = _dumped(folder, "after_optimizations.txt")
    else:
        sizes = compiled.get_compiled_memory_stats()
        names = (*_SIZES, *(f"host_{name}" for name in _SIZES))
        result |= {name: getattr(sizes, f"{name}_size_in_bytes") for name in names}
        result["peak"] = sizes.peak_memory_in_bytes
        # its own text, not that of `hlo_modules()`: jaxlib 0.7.1 can't read all HLO of a newer libtpu, and drops the
        # groups of the collectives that it does read
        text = _dumped(folder, "after_codegen.txt")
    buffers = peak_buffers(_dumped(folder, "buffer-assignment.txt"))
    for name, content in {"optimised.hlo.gz": text, "buffers.txt.gz": buffers}.items():
        (folder / name).write_bytes(gzip.compress(content.encode(), compresslevel=5))
    used = resource.getrusage(resource.RUSAGE_SELF)
    result["cpu_seconds"] = used.ru_utime + used.ru_stime
    (folder / "result.json").write_text(json.dumps(result))


def annotate(hlo: bytes, request: dict[str, Any]) -> bytes:
    """The module as MLIR bytecode, annotated with shardings of parameters and results, and with donations."""
    # semi-private: jaxlib/xla_client.py (_xla is jaxlib/_jax.so), jaxlib 0.7.1
    text = xla_client._xla.mlir.xla_computation_to_mlir_module(xla_client.XlaComputation(hlo))
    with mlir.make_ir_context():
        module = ir.Module.parse(text)
        main = next(op for op in module.body.operations if ir.StringAttr(op.attributes["sym_name"]).value == "main")
        string, index = ir.StringAttr.get, ir.IntegerType.get_signless(32)
        parameters = []
        for sharding, output in request["arguments"]:
            replaced = {} if output is None else {"tf.aliasing_output": ir.IntegerAttr.get(index, output)}
            parameters.append(ir.DictAttr.get({"mhlo.sharding": string(sharding), **replaced}))
        main.attributes["arg_attrs"] = ir.ArrayAttr.get(parameters)
        outputs = [ir.DictAttr.get({"mhlo.sharding": string(s)}) for s in request["outputs"]]
        main.attributes["res_attrs"] = ir.ArrayAttr.get(outputs)
        return mlir.module_to_bytecode(module)


def _devices(request: dict[str, Any]) -> list[Any]:
    """The topology's devices in mesh order, as a run lays out those of a real slice."""
    name, options = request["topology"]
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    described = topologies.get_topology_desc(topology_name=name, platform="tpu", **options)
    inside = [size // factor for size, factor in zip(request["mesh"], request["dcn"], strict=True)]
    return in_mesh_order(described.devices, inside, request["dcn"])


def _compile(module: bytes, devices: list[Any], flags: list[tuple[str, str]]) -> Any:
    options = compiler.get_compile_options(
        num_replicas=1,
        num_partitions=len(devices),
        device_assignment=np.array([[device.id for device in devices]]),
        use_spmd_partitioning=True,
        env_options_overrides=dict(flags),
    )
    return devices[0].client.compile(module, xla_client.DeviceList(tuple(devices)), options)


def _dumped(folder: Path, ending: str) -> str:
    """The text of libtpu's last dump with this ending, empty if there is none."""
    found = sorted((folder / "dump").glob(f"module_*{ending}"))
    return found[-1].read_text(errors="replace") if found else ""


if __name__ == "__main__":
    if sys.platform == "linux":
        # has Linux kill this process when its parent ends, even if that is killed
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG
        if os.getppid() != int(sys.argv[2]):  # it ended before prctl
            sys.exit("the parent is gone")
    main(Path(sys.argv[1]))
