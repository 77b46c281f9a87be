"""A lowered step through the TPU's own compiler, on a machine that need have no TPU.

libtpu is loaded in a child process only: it can abort, and takes its process along. The child leaves files in a folder
(memory sizes, the optimised HLO, the buffers alive at the peak, or the error), which is kept in the cache under a key
of everything that went in. The report is made from those files each time, so it is never older than the code.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from models.jax_call import xla_client
from trainer.cache import cache_root
from trainer.compile.lowering import Lowered
from trainer.compile.memory import is_out_of_hbm
from trainer.compile.report import CompileReport, make_report
from trainer.errors import UserError
from trainer.xla.chips import Topology, find_topology

_FORMAT = 2  # part of the key: raise it when what the child leaves changes
_LAST_LINES = 12
_CHILD = ("-m", "trainer.compile.libtpu_process")
_NAMES = {"result.json", "optimised.hlo.gz", "buffers.txt.gz"}


def compile_for(
    lowered: Lowered,
    topology: str,
    *,
    slices: int = 1,
    dcn: dict[str, int] | None = None,
    flags: dict[str, str] | None = None,
    timeout: float = 3600,
    model_flops: float | None = None,
    exchange: str | None = None,
    cache_dir: Path | None = None,
) -> CompileReport:
    """Compile a step for a slice of TPUs and say what it would take there.

    Args:
        topology: libtpu's name, ``v5p:4x4x4``.
        slices: how many of them, joined by DCN.
        dcn: the factor of each mesh axis over slices, as the recipe's mesh has them; None: the outermost axes first.
        flags: compiler options by name without dashes, ``{"xla_tpu_enable_latency_hiding_scheduler": "true"}``;
            those in LIBTPU_INIT_ARGS hold too.
        timeout: seconds of wall time after which the child is killed.
        model_flops: of one step on all chips, as MFU counts them (no recomputation); None: MFU is not estimated.
        exchange: the axis over which tokens are meant to be exchanged: an all-to-all over another is flagged.

    Raises:
        UserError: unknown topology; mesh of another size; no libtpu; the compiler failed or took too long.
    """
    where = find_topology(topology, slices)
    _check_size(lowered, where)
    factors = _dcn_factors(lowered.mesh, slices, dcn)
    request = {
        "arguments": [(a.sharding, a.output) for a in lowered.arguments],
        "outputs": lowered.outputs,
        "mesh": list(lowered.mesh.values()),
        "dcn": [factors.get(axis, 1) for axis in lowered.mesh],
        "topology": where.libtpu(),
        "flags": sorted((flags or {}).items()),
        "environment": os.environ.get("LIBTPU_INIT_ARGS", ""),
    }
    folder = cache_root(cache_dir) / "compiled" / _key(lowered, request)
    if not (folder / "result.json").exists():
        _compile(lowered, request, where, folder, timeout)
    return _read(folder, lowered, where, model_flops, exchange)


def _read(
    folder: Path, lowered: Lowered, where: Topology, model_flops: float | None, exchange: str | None
) -> CompileReport:
    def text(name: str) -> str:
        path = folder / f"{name}.gz"
        return gzip.decompress(path.read_bytes()).decode() if path.exists() else ""

    result = json.loads((folder / "result.json").read_text())
    return make_report(
        lowered, where, result, text("optimised.hlo"), text("buffers.txt"), model_flops=model_flops, exchange=exchange
    )


def _check_size(lowered: Lowered, where: Topology) -> None:
    size = 1
    for axis in lowered.mesh.values():
        size *= axis
    if size != where.devices:
        raise UserError(
            asked=f"{where.slices} × {where.name}, {where.devices} chips",
            found=f"a step lowered for a mesh of {size}: {lowered.mesh}",
            why="each chip is one position of the mesh",
            instead=f"a mesh of {where.devices} devices, or a topology of {size} chips",
        )


def _dcn_factors(mesh: dict[str, int], slices: int, dcn: dict[str, int] | None) -> dict[str, int]:
    """How many slices each axis spans; the outermost axes, which communicate least, take them unless told."""
    if dcn is None:
        dcn, left = {}, slices
        for axis, size in mesh.items():
            dcn[axis] = next(f for f in range(min(size, left), 0, -1) if size % f == 0 and left % f == 0)
            left //= dcn[axis]
    spanned = 1
    for axis, factor in dcn.items():
        spanned *= factor if axis in mesh and mesh[axis] % factor == 0 else 0
    if spanned != slices:
        raise UserError(
            asked=f"{slices} slices for the mesh {mesh}",
            found=f"axes over slices: {dcn}",
            why="the axes' factors over slices must divide them and multiply to the number of slices",
            instead=f"an outer axis whose size is a multiple of {slices}, and dcn={{axis: {slices}}}",
        )
    return dcn


def libtpu_version() -> str:
    """The installed libtpu's version.

    Raises:
        UserError: there is none.
    """
    try:
        return importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError as error:
        raise UserError(
            asked="compiling for a TPU",
            found="libtpu is not installed",
            why="it holds the compiler; it needs no TPU to run",
            instead="pip install -e '.[tpu]'",
        ) from error


def _key(lowered: Lowered, request: dict[str, Any]) -> str:
    versions = [_FORMAT, libtpu_version(), importlib.metadata.version("jaxlib")]
    digest = hashlib.sha256(json.dumps([versions, request]).encode())
    # without the metadata, which tells files and lines of ours: those change when the step does not
    options = xla_client._xla.HloPrintOptions.short_parsable()
    options.print_large_constants = True
    try:
        digest.update(xla_client.XlaComputation(lowered.hlo).get_hlo_module().to_string(options).encode())
    except RuntimeError:  # no HLO: the child will say so
        digest.update(lowered.hlo)
    return digest.hexdigest()[:32]


def _compile(lowered: Lowered, request: dict[str, Any], where: Topology, folder: Path, timeout: float) -> None:
    """Run the child and put what it leaves into ``folder``, in one piece."""
    folder.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".working-") as name:
        work = Path(name)
        (work / "step.hlo.pb").write_bytes(lowered.hlo)
        (work / "request.json").write_text(json.dumps(request))
        began = time.monotonic()
        ended = _run(work, timeout)
        if not (work / "result.json").exists():
            raise _failure(ended, work, where, timeout, request["flags"])
        result = json.loads((work / "result.json").read_text())
        if "error" in result and not is_out_of_hbm(result["error"]):
            raise _failure(ended, work, where, timeout, request["flags"], result["error"])
        result["wall_seconds"] = time.monotonic() - began
        (work / "result.json").write_text(json.dumps(result))
        done = work / "done"
        done.mkdir()
        for kept in _NAMES:
            if (work / kept).exists():
                (work / kept).rename(done / kept)
        shutil.rmtree(folder, ignore_errors=True)
        try:
            done.rename(folder)
        except OSError:
            if not (folder / "result.json").exists():  # else another process was faster, with the same
                raise


def _run(work: Path, timeout: float) -> int | None:
    """The child's exit status, None if it was killed for taking longer than ``timeout`` seconds."""
    environment = {
        **os.environ,
        # one device of the host will do: the chips are described, not there
        "JAX_PLATFORMS": "cpu",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5p-8",
        # the parent's XLA_FLAGS are the CPU's; libtpu's dumps tell which buffers live at the peak
        "XLA_FLAGS": f"--xla_dump_to={work / 'dump'} --xla_dump_hlo_as_text",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    with (work / "log").open("wb") as log:
        child = subprocess.Popen(
            [sys.executable, *_CHILD, str(work), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )
        try:
            return child.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()


def _failure(
    ended: int | None, work: Path, where: Topology, timeout: float, flags: list[tuple[str, str]], error: str = ""
) -> UserError:
    lines = (error or (work / "log").read_text(errors="replace")).strip().splitlines()
    lines = [
        line for line in lines if line.strip() and not re.match(r"WARNING|I\d{4} |Failed to find host bounds", line)
    ]
    if error:
        shown, how = lines[:_LAST_LINES], "the TPU compiler refused it"
    else:
        shown = lines[-_LAST_LINES:]
        if ended is None:
            how = f"no result after {timeout:g} s; the compiler was killed"
        else:
            how = f"the compiler's process ended with status {ended}" + (" (an abort)" if ended < 0 else "")
    found = "\n           ".join([how, *(line[:300] for line in shown)])
    return UserError(
        asked=f"compiling the step for {where.slices} × {where.name}" + (f" with {dict(flags)}" if flags else ""),
        found=found,
        why="without its result there is no telling what the step takes on this TPU",
        instead="a longer timeout, or a smaller model first"
        if ended is None
        else "see the last lines above" + ("; flags that this chip does not know are refused by name" if flags else ""),
    )
