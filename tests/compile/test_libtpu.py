"""Real compiles by libtpu, in seconds, on a machine without a TPU; and every way in which a compile can fail."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import math
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.memory
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from shardwright.compile import libtpu
from shardwright.compile.libtpu import CompileTarget, compile_for
from shardwright.compile.lowered_graph import Argument, LoweredGraph
from shardwright.errors import UserError
from shardwright.models.ops.jax_call import mlir
from shardwright.xla.chips import FLAGS
from shardwright.xla.libtpu_library import Library
from tests.support.captured import captured_step
from tests.support.fork_server import Forked
from tests.support.tpu_compiler import needs_libtpu


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("SHARDWRIGHT_CACHE", str(folder))
        yield folder


def on_one_chip(rows: int, columns: int) -> LoweredGraph:
    """``x + 1`` donated, and the largest element of ``x xᵀ`` (a temporary of rows × rows floats), for one chip."""

    def function(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        product = jax.lax.optimization_barrier(jnp.dot(x, x.T, preferred_element_type=jnp.float32))
        return x + 1, jnp.max(product, axis=0) + jnp.sum(product * product, axis=0)

    x = jax.ShapeDtypeStruct((rows, columns), jnp.bfloat16)
    hlo = jax.jit(function).trace(x).lower(lowering_platforms=("tpu",)).compiler_ir("hlo")
    argument = Argument("x", "weights", (rows, columns), "bfloat16", (None, None), 0)
    return LoweredGraph(hlo.as_serialized_hlo_module_proto(), (argument,), ((None, None), (None,)), {"data": 1}, 1)


@needs_libtpu
def test_a_small_step_compiles_with_its_layout_and_its_donation_and_the_second_time_it_is_there(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = captured_step()
    report = compile_for(step, CompileTarget("v5e:2x4", timeout=300))
    assert report.fits
    assert (report.devices, report.topology, report.mesh) == (8, "v5e:2x4", {"fsdp": 2, "expert": 4})
    # every weight and moment is in place, an eighth of it on each chip
    state = sum(4 * math.prod(a.shape) // 8 for a in step.arguments if a.kind != "batch")
    assert report.alias_bytes == report.weights_bytes + report.optimizer_bytes == state
    assert report.flops == pytest.approx(2.2135e9, rel=1e-2)
    assert {(x.kind, x.axis) for x in report.collectives} >= {("all-to-all", "expert"), ("all-gather", "fsdp")}
    assert report.largest_buffers
    assert report.compile_seconds > 0.5

    def no_child(*_: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(libtpu, "_run", no_child)
    assert compile_for(step, CompileTarget("v5e:2x4")) == report
    damaged = shutil.copytree(cache, tmp_path / "damaged")
    for path in damaged.rglob("optimised.hlo.gz"):
        path.write_bytes(bytes(path.stat().st_size))
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(damaged))
    with pytest.raises(AssertionError, match="compiled again"):
        compile_for(step, CompileTarget("v5e:2x4"))


def test_a_kernel_with_other_code_is_compiled_again_and_one_from_another_line_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(kernel: Callable[[Any, Any], None]) -> LoweredGraph:
        x = jax.ShapeDtypeStruct((8, 128), jnp.float32)
        traced = jax.jit(pl.pallas_call(kernel, x)).trace(x)
        version = mlir.LoweringParameters(for_export=True)
        hlo = traced.lower(lowering_platforms=("tpu",), _private_parameters=version).compiler_ir("hlo")
        argument = Argument("x", "weights", x.shape, "float32", (None, None), None)
        return LoweredGraph(hlo.as_serialized_hlo_module_proto(), (argument,), ((None, None),), {"data": 1}, 1)

    def double(x: Any, out: Any) -> None:
        out[...] = x[...] * 2.0

    def twice(x: Any, out: Any) -> None:
        out[...] = x[...] * 2.0

    def half(x: Any, out: Any) -> None:
        out[...] = x[...] * 0.5

    twice.__name__ = half.__name__ = "double"
    library = Library(tmp_path, "1")
    first, same, other = (libtpu._key(step(kernel), {}, library) for kernel in (double, twice, half))
    assert first == same
    assert first != other


@needs_libtpu
def test_what_is_offloaded_is_counted_on_the_host_and_not_in_hbm() -> None:
    def function(x: jax.Array) -> jax.Array:
        def forward(c: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
            return jnp.tanh(c @ c), jax.device_put(c, jax.memory.Space.Host)

        def backward(c: jax.Array, y: jax.Array) -> tuple[jax.Array, None]:
            y = jax.device_put(y, jax.memory.Space.Device)
            return c @ y + y, None

        c, ys = jax.lax.scan(forward, x, None, length=8)
        return jax.lax.scan(backward, c, ys, reverse=True)[0]

    size = 2 * 4096**2
    hlo = jax.jit(function).trace(jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)).lower(lowering_platforms=("tpu",))
    argument = Argument("x", "weights", (4096, 4096), "bfloat16", (None, None), 0)
    module = hlo.compiler_ir("hlo").as_serialized_hlo_module_proto()
    lowered = LoweredGraph(module, (argument,), ((None, None),), {"data": 1}, 8)
    report = compile_for(lowered, CompileTarget("v5e:1x1", timeout=300))
    assert report.host_temp_bytes == 8 * size
    assert report.host_traffic_bytes == 2 * 8 * size  # there and back
    assert report.peak_bytes <= report.required_bytes < 4 * size
    assert all(buffer.bytes <= size for buffer in report.largest_buffers)
    assert report.flops == 2 * 8 * 2 * 4096**3


@needs_libtpu
def test_a_step_too_large_is_a_report_with_the_buffer_that_was_too_large() -> None:
    report = compile_for(on_one_chip(80_000, 1024), CompileTarget("v5e:1x1", timeout=300))
    assert not report.fits
    assert report.required_bytes > 4 * 80_000**2 > report.chip_hbm_bytes
    assert report.largest_buffers[0].bytes == pytest.approx(4 * 80_000**2, rel=0.01)
    assert report.largest_buffers[0].shape == "f32[80000,80000]"


@needs_libtpu
def test_a_flag_reaches_the_compiler_and_an_unknown_one_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="xla_tpu_nonesuch"):
        compile_for(on_one_chip(128, 128), CompileTarget("v5e:1x1", flags={"xla_tpu_nonesuch": "true"}))
    step = captured_step()
    plain = compile_for(step, CompileTarget("v5e:2x4", timeout=300))
    target = CompileTarget("v5e:2x4", flags={"xla_tpu_enable_async_collective_fusion": "false"}, timeout=300)
    assert compile_for(step, target).hbm_bytes != plain.hbm_bytes


@needs_libtpu
def test_libtpu_takes_the_flags_that_a_run_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {name: value for chip in FLAGS.values() for name, value in chip.items()}
    monkeypatch.setenv("LIBTPU_INIT_ARGS", " ".join(f"--{name}={value}" for name, value in flags.items()))
    assert compile_for(on_one_chip(128, 128), CompileTarget("v5e:1x1", timeout=300)).fits
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_nonesuch=true")  # an unknown one it would have refused
    with pytest.raises(UserError, match="xla_tpu_nonesuch"):
        compile_for(on_one_chip(128, 128), CompileTarget("v5e:1x1", timeout=300))


@needs_libtpu
def test_what_is_no_hlo_comes_back_as_an_error_with_the_compilers_last_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = dataclasses.replace(on_one_chip(128, 128), hlo=b"not a module")
    with pytest.raises(UserError, match="ended with status") as error:
        compile_for(broken, CompileTarget("v5e:1x1", timeout=120))
    assert "Error" in error.value.found.splitlines()[-1]
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path))
    (tmp_path / "compiled").touch()  # a disk that refuses
    with pytest.raises(UserError, match=f"the cache folder {tmp_path / 'compiled'}"):
        compile_for(broken, CompileTarget("v5e:1x1", timeout=120))


@needs_libtpu
def test_a_compiler_that_takes_too_long_is_killed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # a child that never ends: a real compile of a small module may be done before a busy parent looks
    monkeypatch.setattr(libtpu, "_CHILD", ("-c", "import time; time.sleep(3600)"))
    children: list[subprocess.Popen[bytes]] = []

    class Recorded(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            children.append(self)

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    with pytest.raises(UserError, match=r"no result after 0\.5 s; the compiler was killed"):
        compile_for(on_one_chip(256, 256), CompileTarget("v5e:1x1", timeout=0.5))
    assert [child.returncode for child in children] == [-signal.SIGKILL]
    assert not [path for path in (cache / "compiled").iterdir() if path.name.startswith(".working")]


_COMPILES = """
import os, sys
os.environ["SHARDWRIGHT_CACHE"] = sys.argv[1]
from tests.support.captured import captured_step
from shardwright.compile.libtpu import CompileTarget, compile_for
compile_for(captured_step(), CompileTarget("v5p:2x2x2"))
"""


@needs_libtpu
def test_the_compiler_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    with Forked("-c", _COMPILES, tmp_path) as parent:
        tasks = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
        while not (children := [int(pid) for pid in tasks.read_text().split()]):
            assert parent.poll() is None
            time.sleep(0.02)
        while not list((tmp_path / "compiled").glob(".working-*/dump")):  # it compiles
            assert parent.poll() is None
            time.sleep(0.02)
        os.kill(children[0], signal.SIGSTOP)  # else it may be done before anyone looks
        parent.kill()
    end = time.monotonic() + 60
    try:
        while Path(f"/proc/{children[0]}").exists() and _state(children[0]) != "Z":
            assert time.monotonic() < end, "the compiler outlived its parent"
            time.sleep(0.02)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(children[0], signal.SIGKILL)


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@needs_libtpu
def test_a_compiler_that_aborts_is_an_error_with_its_last_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    abort = "import os, sys; print('Check failed: !IsManual()', file=sys.stderr, flush=True); os.abort()"
    monkeypatch.setattr(libtpu, "_CHILD", ("-c", abort))
    with pytest.raises(UserError, match=r"status -6 \(an abort\)") as error:
        compile_for(on_one_chip(512, 512), CompileTarget("v5e:1x1", timeout=60))
    assert "Check failed: !IsManual()" in error.value.found
    monkeypatch.setattr(libtpu, "_CHILD", ("-c", "import os; os.kill(os.getpid(), 9)"))  # as the kernel does
    with pytest.raises(libtpu.CompilerKilled, match="for want of memory"):
        compile_for(on_one_chip(512, 512), CompileTarget("v5e:1x1", timeout=60))


def test_without_libtpu_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'shardwright\[tpu\]'"):
        compile_for(on_one_chip(128, 128), CompileTarget("v5e:1x1"))


def test_slices_that_the_mesh_cannot_be_split_over_are_refused() -> None:
    odd = dataclasses.replace(captured_step(), mesh={"fsdp": 12})
    with pytest.raises(UserError, match="multiply to the number of slices"):
        compile_for(odd, CompileTarget("v5e:2x2", slices=3, dcn={"fsdp": 2}))
