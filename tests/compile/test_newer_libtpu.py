"""Real compiles by the libtpu of the extra `tpu`, where `.ci/run` put it: the same report as by the older one."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path

import pytest

from shardwright.compile.libtpu import CompileTarget, compile_for
from shardwright.compile.report.report import CompileReport
from shardwright.errors import UserError
from shardwright.xla.chips import CHIPS, FLAGS, NEWER_FLAGS, RUN_FLAGS, find_topology
from shardwright.xla.libtpu_library import find_library
from tests.compile.test_libtpu import on_one_chip
from tests.support.captured import MESH, captured_step
from tests.support.paths import ROOT
from tests.support.tpu_compiler import needs_libtpu

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NEWER = PROJECT["optional-dependencies"]["tpu"][0].removeprefix("libtpu==")


def _is_there() -> bool:
    try:
        return find_library(NEWER).version == NEWER
    except UserError:
        return False


needs_newer = pytest.mark.skipif(
    not _is_there(), reason=f"libtpu {NEWER} is not in the cache, as .ci/run puts it there"
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def compiled(topology: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> CompileReport:
    monkeypatch.setenv("TPU_LIBRARY_PATH", str(find_library(NEWER).path))
    report = compile_for(captured_step(), CompileTarget(topology, timeout=300), cache_dir=cache)
    assert report.libtpu == NEWER
    return report


@needs_newer
def test_its_collectives_are_read_with_their_axes_and_its_flags_hide_the_gathers(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = CHIPS["v5p"].missing_flags("", NEWER)
    monkeypatch.setenv("LIBTPU_INIT_ARGS", " ".join(f"--{name}={value}" for name, value in flags.items()))
    report = compiled("v5p:2x2x2", cache, monkeypatch)
    assert report.flops == pytest.approx(2.2135e9, rel=1e-2)  # as by the older one
    by_axis = {(line.kind, line.axis): line.wire_bytes for line in report.collectives if line.count > 1}
    assert by_axis["all-gather", "fsdp"] == 1572864  # the experts' weights, as by the older one
    assert by_axis["all-to-all", "expert"] == 1474560  # tokens
    assert report.alias_bytes == report.weights_bytes + report.optimizer_bytes  # every weight and moment is in place
    named = [buffer.bytes for buffer in report.largest_buffers if buffer.name.startswith("param")]
    assert named.count(786432) == 4  # the moments of the experts' two weights
    gathers = [line for line in report.collectives if line.kind == "all-gather"]
    assert len(gathers) > 2
    assert not any(line.exposed_bytes for line in gathers)  # all of them are without NEWER_FLAGS


@needs_newer
def test_a_chip_of_two_devices_is_compiled_for_with_the_flags_of_all_chips(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = {
        name: value
        for chip in (*FLAGS.values(), *RUN_FLAGS.values(), *NEWER_FLAGS.values())
        for name, value in chip.items()
    }
    monkeypatch.setenv("LIBTPU_INIT_ARGS", " ".join(f"--{name}={value}" for name, value in flags.items()))
    report = compiled("tpu7x:2x2x1", cache, monkeypatch)
    assert (report.devices, report.mesh) == (8, MESH)
    assert ("all-to-all", "expert") in {(line.kind, line.axis) for line in report.collectives}
    assert report.estimate.seconds > 0


@needs_newer
def test_a_step_too_large_is_a_report(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_LIBRARY_PATH", str(find_library(NEWER).path))
    rows = 200_000
    step = dataclasses.replace(on_one_chip(rows, 1024), mesh={"data": 2})
    report = compile_for(step, CompileTarget("tpu7x:1x1x1", timeout=300), cache_dir=cache)
    assert not report.fits
    assert report.required_bytes > 4 * rows**2 > report.chip_hbm_bytes
    assert report.chip_hbm_bytes == find_topology("tpu7x:1x1x1").chip.hbm_bytes  # what the compiler says, to 16 MiB
    assert report.largest_buffers[0].shape == f"f32[{rows},{rows}]"


@needs_libtpu
def test_a_generation_that_the_older_one_does_not_know_is_refused_with_the_way_to_a_newer_one(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    step = dataclasses.replace(on_one_chip(128, 128), mesh={"data": 2})
    if find_library().version == NEWER:
        pytest.skip("the older one is not installed")
    with pytest.raises(UserError, match="a newer libtpu than"):
        compile_for(step, CompileTarget("tpu7x:1x1x1", timeout=300), cache_dir=cache)
