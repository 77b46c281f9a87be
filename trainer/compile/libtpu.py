"""Compiles a lowered graph with the TPU's own compiler (libtpu), on a machine that need have no TPU.

libtpu can abort and take its process along, so a process of its own (shardwright.compile.libtpu_process) loads it. The
folder of files that it leaves is kept in the cache, under a key of all its inputs. The report is made from it each
time, so it is never older than the code.
"""

import base64
import gzip
import hashlib
import importlib.metadata
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwright.compile.lowered_graph import LoweredGraph
from shardwright.compile.report.memory import is_out_of_hbm
from shardwright.compile.report.report import CompileReport, Expected, make_report
from shardwright.errors import UserError
from shardwright.files.cache import cache_root, is_whole, publish, written_to_cache
from shardwright.files.scratch import scratch_folder
from shardwright.layout.partition import PartitionSpec, axes_of
from shardwright.models.ops.jax_call import jax, mlir, xla_client
from shardwright.xla.chips import find_topology
from shardwright.xla.libtpu_library import Library, find_library

_FORMAT = 5  # part of the cache's key: raise it when the compiling process leaves other files, or other names in them
_LINES_SHOWN = 12  # of the compiler's own words in an error message
_KERNEL = re.compile(r'(?<="custom_call_config": \{"body": ")[A-Za-z0-9+/=]+')  # of Pallas: MLIR in base64
_CHILD = ("-m", "shardwright.compile.libtpu_process")
_NAMES = ("result.json", "optimised.hlo.gz", "buffers.txt.gz")


class CompilerKilled(UserError):
    """The compiler was killed, which says nothing of what it compiled."""


@dataclass(frozen=True)
class CompileTarget:
    """The slices that a step is compiled for, and the compiler's options."""

    topology: str  # libtpu's name of a slice, `v5p:4x4x4`
    slices: int = 1
    dcn: dict[str, int] = field(default_factory=dict)  # mesh axis → number of slices that it spans, if not 1
    flags: dict[str, str] = field(default_factory=dict)  # by name without dashes; those in LIBTPU_INIT_ARGS hold too
    timeout: float = 3600.0  # seconds of wall time after which the compiler is killed
    libtpu: str | None = None  # as `find_library` takes it


def compile_for(
    lowered: LoweredGraph, target: CompileTarget, expected: Expected | None = None, cache_dir: Path | None = None
) -> CompileReport:
    """Compiles a graph for slices of TPUs, unless the cache has it (`files.cache.cache_root`), and makes the report.

    Raises:
        UserError: unknown topology; axes that don't fit the slices; no libtpu; the compiler failed or took too long.
    """
    where = find_topology(target.topology, target.slices)
    _check_slices(lowered.mesh, target)
    request = {
        "arguments": [(sharding_text(lowered.mesh, a.spec), a.output) for a in lowered.arguments],
        "outputs": [sharding_text(lowered.mesh, spec) for spec in lowered.outputs],
        "mesh": list(lowered.mesh.values()),
        "dcn": [target.dcn.get(axis, 1) for axis in lowered.mesh],
        "topology": where.libtpu(),
        "flags": sorted(target.flags.items()),
        "environment": os.environ.get("LIBTPU_INIT_ARGS", ""),
    }
    library = find_library(target.libtpu)
    folder = cache_root(cache_dir) / "compiled" / _key(lowered, request, library)
    if not is_whole(folder):
        with written_to_cache(folder):
            _compile(lowered, request, target, folder, library)
    result, *texts = (folder / name for name in _NAMES)
    hlo, buffers = (gzip.decompress(path.read_bytes()).decode() if path.exists() else "" for path in texts)
    return make_report(lowered, where, json.loads(result.read_text()), hlo, buffers, expected or Expected(), target.dcn)


def sharding_text(mesh: dict[str, int], spec: PartitionSpec) -> str:
    """``spec`` on ``mesh`` in HLO's notation."""
    abstract = jax.sharding.AbstractMesh(tuple(mesh.values()), tuple(mesh))
    split = (tuple(axis for axis in axes_of(entry) if mesh[axis] > 1) for entry in spec)
    sharding = jax.sharding.NamedSharding(abstract, jax.sharding.PartitionSpec(*(axes or None for axes in split)))
    return str(sharding._to_xla_hlo_sharding(len(spec)))  # semi-private: jax/_src/named_sharding.py, jax 0.7.1


def _check_slices(mesh: dict[str, int], target: CompileTarget) -> None:
    dcn, slices = target.dcn, target.slices
    divides = all(axis in mesh and mesh[axis] % factor == 0 for axis, factor in dcn.items())
    if not divides or math.prod(dcn.values()) != slices:
        raise UserError(
            asked=f"{slices} slices for the mesh {mesh}",
            found=f"axes over slices: {dcn}",
            why="the axes' factors over slices must divide them and multiply to the number of slices",
            instead=f"an outer axis whose size is a multiple of {slices}, and dcn={{axis: {slices}}}",
        )


def _key(lowered: LoweredGraph, request: dict[str, Any], library: Library) -> str:
    """A hash of everything that the compiler's result depends on."""
    versions = [_FORMAT, library.version, importlib.metadata.version("jaxlib")]
    key = hashlib.sha256(json.dumps([versions, request]).encode())
    # Without metadata: it names our files and lines, which change when the step does not.
    # Semi-private: jaxlib/xla_client.py (_xla is jaxlib/_jax.so), jaxlib 0.7.1.
    options = xla_client._xla.HloPrintOptions.short_parsable()
    options.print_large_constants = options.print_backend_config = True  # the latter has kernels' code
    try:
        text = xla_client.XlaComputation(lowered.hlo).get_hlo_module().to_string(options)
        key.update(_KERNEL.sub(_kernel_text, text).encode())
    except RuntimeError:  # no HLO: the compiling process will say so
        key.update(lowered.hlo)
    return key.hexdigest()[:32]


def _kernel_text(code: re.Match[str]) -> str:
    """A kernel's operations, without the names of our files and lines that its code has too."""
    with mlir.make_ir_context() as context:
        context.allow_unregistered_dialects = True
        return str(mlir.ir.Module.parse(base64.b64decode(code[0])).operation.get_asm(enable_debug_info=False))


def _compile(
    lowered: LoweredGraph, request: dict[str, Any], target: CompileTarget, folder: Path, library: Library
) -> None:
    """Runs the compiling process and publishes the files that it leaves as ``folder``, in one piece."""
    folder.parent.mkdir(exist_ok=True)
    with scratch_folder(folder.parent, ".working-") as work:
        (work / "step.hlo.pb").write_bytes(lowered.hlo)
        (work / "request.json").write_text(json.dumps(request))
        began = time.monotonic()
        ended = _run(work, target.timeout, library)
        if not (work / "result.json").exists():
            last = _lines_of((work / "log").read_text(errors="replace"))[-_LINES_SHOWN:]
            if ended is None:
                how = f"no result after {target.timeout:g} s; the compiler was killed"
                raise _failure(target, lowered.graph, how, last, "a longer timeout, or a smaller model first")
            if ended == -signal.SIGKILL:
                how = "the compiler was killed (SIGKILL), as the kernel does for want of memory"
                again = "the same command on a machine with more memory, or with less beside it"
                raise _failure(target, lowered.graph, how, last, again, CompilerKilled)
            how = f"the compiler's process ended with status {ended}" + (" (an abort)" if ended < 0 else "")
            unknown = any("Invalid TPU external name" in line for line in last)
            by = f"a newer libtpu than {library.version}, by pip install 'shardwright[tpu]' or --libtpu"
            raise _failure(target, lowered.graph, how, last, by if unknown else "")
        result = json.loads((work / "result.json").read_text())
        if "error" in result and not is_out_of_hbm(result["error"]):
            first = _lines_of(result["error"])[:_LINES_SHOWN]
            raise _failure(target, lowered.graph, "the TPU compiler refused it", first)
        result |= {"wall_seconds": time.monotonic() - began, "libtpu": library.version}
        (work / "result.json").write_text(json.dumps(result))
        made = work / folder.name
        made.mkdir()
        for kept in _NAMES:
            if (work / kept).exists():
                (work / kept).rename(made / kept)
        publish(made, folder)


def _run(work: Path, timeout: float, library: Library) -> int | None:
    """The exit status of the compiling process; None if it was killed for taking longer than ``timeout`` seconds."""
    environment = {
        **os.environ,
        "TPU_LIBRARY_PATH": str(library.path),
        # one device of the host will do: the chips are only described
        "JAX_PLATFORMS": "cpu",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5p-8",
        # in place of the parent's XLA_FLAGS, which are the CPU's; the dumps name the buffers alive at the peak
        "XLA_FLAGS": f"--xla_dump_to={work / 'dump'} --xla_dump_hlo_as_text",
    }
    words = [sys.executable, *_CHILD, str(work), str(os.getpid())]
    with (
        (work / "log").open("wb") as log,
        subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
        ) as child,
    ):
        try:
            return child.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        finally:
            child.kill()


def _lines_of(text: str) -> list[str]:
    """The lines of a log without warnings, information and empty ones."""
    lines = text.strip().splitlines()
    return [x for x in lines if x.strip() and not re.match(r"WARNING|I\d{4} |Failed to find host bounds", x)]


def _failure(
    target: CompileTarget,
    graph: str,
    how: str,
    lines: list[str],
    instead: str = "",
    kind: type[UserError] = UserError,
) -> UserError:
    flags = f" with {target.flags}" if target.flags else ""
    unknown = "; flags that this chip does not know are refused by name" if target.flags else ""
    return kind(
        asked=f"compiling the {graph} for {target.slices} × {target.topology}{flags}",
        found="\n           ".join(line[:300] for line in [how, *lines]),
        why="without its result there is no telling what the run takes on this TPU",
        instead=instead or f"see the last lines above{unknown}",
    )
