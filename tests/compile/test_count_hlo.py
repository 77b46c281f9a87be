"""scripts/measure/count_hlo.py: a module's text counted alone, beside the report of the compile that made it."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest

from shardwright.compile.report.report import CompileReport, Expected
from shardwright.errors import UserError
from shardwright.scripts.measure.count_hlo import axes, count_module, read_module
from tests.support.captured import MESH, captured
from tests.support.fork_server import run
from tests.support.paths import CAPTURED, ROOT

EXPECTED = Expected(model_flops=8 * 1e9, tokens=8 * 256)
# a matrix product, and a gather of eight megabytes over all chips that nothing runs beside
SMALL = """HloModule jit_step, is_scheduled=true, entry_computation_layout={()->f32[]}, num_partitions=8
body (state: (s32[], bf16[1024,1024])) -> (s32[], bf16[1024,1024]) {
  %state = (s32[]{:T(128)}, bf16[1024,1024]{1,0}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%state), index=0
  %x = bf16[1024,1024]{1,0} get-tuple-element(%state), index=1
  %y = bf16[1024,1024]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %t = (s32[]{:T(128)}, bf16[1024,1024]{1,0}) tuple(%i, %y)
}
condition (state: (s32[], bf16[1024,1024])) -> pred[] {
  %state.1 = (s32[]{:T(128)}, bf16[1024,1024]{1,0}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%state.1), index=0
  ROOT %c = pred[]{:T(512)} compare(%i.1, %i.1), direction=NE
}
ENTRY %main (p: s32[], q: bf16[1024,1024], w: bf16[512,1024]) -> bf16[4096,1024] {
  %p = s32[]{:T(128)} parameter(0)
  %q = bf16[1024,1024]{1,0} parameter(1)
  %w = bf16[512,1024]{1,0} parameter(2)
  %s = (s32[]{:T(128)}, bf16[1024,1024]{1,0}) tuple(%p, %q)
  %l = (s32[]{:T(128)}, bf16[1024,1024]{1,0}) while(%s), condition=%condition, body=%body
  ROOT %g = bf16[4096,1024]{1,0} all-gather(%w), replica_groups=[1,8]<=[8], dimensions={0}
}
"""


def count(hlo: str = SMALL, mesh: dict[str, int] = MESH, layers: int = 3) -> CompileReport:
    return count_module(hlo, "v5p:2x2x2", mesh, EXPECTED, layers=layers)


def test_a_text_alone_counts_as_the_compile_that_made_it_reported(report: CompileReport) -> None:
    found = count(captured("optimised.hlo"))
    assert found.estimate == report.estimate
    assert found.estimate.seconds > 0
    assert (found.flops, found.hbm_bytes, found.loops) == (report.flops, report.hbm_bytes, report.loops)
    # what a collective is for is not known without the step's arguments; how much it sends is
    assert (found.wire_bytes, found.exposed_bytes) == (report.wire_bytes, report.exposed_bytes)


def test_what_the_text_says_decides_the_count() -> None:
    found = count(SMALL)
    once = 2 * 1024**3
    assert found.flops == 3 * once  # a loop that does not tell its length runs once for each layer
    assert count(layers=5).flops == 5 * once
    assert found.loops == {"l": 3}
    gathered = 4096 * 1024 * 2
    assert found.wire_bytes == found.exposed_bytes == gathered * 7 / 8
    shares = found.estimate.shares
    assert shares["ici"] > 0
    assert found.estimate.mfu == pytest.approx(1e9 / 459e12 / found.estimate.seconds)
    alone = count(SMALL.replace("all-gather(%w)", "broadcast(%w)"))
    assert (alone.wire_bytes, alone.estimate.shares["ici"]) == (0, 0)
    assert alone.estimate.shares["products"] == shares["products"]


def test_the_command_prints_and_writes_the_estimate(tmp_path: Path) -> None:
    path, written = tmp_path / "module.txt.gz", tmp_path / "counted.json"
    path.write_bytes(gzip.compress(SMALL.encode()))
    model = CAPTURED.parents[2] / "docs" / "configs" / "mixtral_8x7b.json"
    words = ["--topology", "v5p:2x2x2", "--mesh", "fsdp=2,expert=4", "--layers", "3", "--json", str(written)]
    words += ["--model", str(model), "--rows", "16", "--sequence_length", "128"]
    done = run("scripts/measure/count_hlo.py", path, *words, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    printed = done.stdout
    counted = json.loads(written.read_text())
    seconds = count().estimate.seconds
    assert counted["estimate"]["seconds"] == seconds
    assert f"Estimated: {seconds:.6f} (" in printed
    assert f" s a step, {16 * 128 / 8 / seconds:,.0f} (" in printed
    # a token meets 2 of 8 experts: 12.7e9 weights, less the looked up embeddings
    assert counted["model_flops"] == pytest.approx(6 * 12.75e9 * 16 * 128 / 8, rel=0.01)
    assert "a loop taken to run 3 times: l" in printed
    assert re.search(r"all-gather +fsdp×expert +1 +8\.0 MiB +7\.0 MiB +7\.0 MiB", printed)


@pytest.mark.parametrize(
    ("hlo", "mesh", "found"),
    [
        ("ENTRY %main () -> f32[] {", MESH, "no text of a scheduled HloModule"),
        (SMALL.replace("is_scheduled=true, ", ""), MESH, "no text of a scheduled HloModule"),  # before the compiler
        (SMALL, {"fsdp": 4}, "a mesh of 4 chips"),
        (SMALL.replace("num_partitions=8", "num_partitions=64"), MESH, "a module compiled for 64 chips"),
        (SMALL.replace(", num_partitions=8", ""), MESH, "a module compiled for 1 chips"),
    ],
    ids=["no module", "not compiled", "mesh", "other chips", "one chip"],
)
def test_a_module_of_other_chips_is_refused(hlo: str, mesh: dict[str, int], found: str) -> None:
    with pytest.raises(UserError, match=found):
        count(hlo, mesh)


def test_a_mesh_over_slices_says_which_axis_spans_them() -> None:
    hlo = SMALL.replace("num_partitions=8", "num_partitions=16")
    mesh = {"fsdp": 4, "expert": 4}
    kept = count_module(hlo, "v5p:2x2x2", mesh, EXPECTED, slices=2, dcn={"fsdp": 2})
    assert (kept.slices, kept.devices) == (2, 16)
    with pytest.raises(UserError, match="axes over slices"):
        count_module(hlo, "v5p:2x2x2", mesh, EXPECTED, slices=2)


def test_what_is_no_text_and_no_mesh_is_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.gz").write_bytes(gzip.compress(SMALL.encode())[:40])
    for name in ("none.txt", "broken.gz"):
        with pytest.raises(UserError, match="the module in"):
            read_module(tmp_path / name)
    assert axes("fsdp=2, expert=4") == MESH
    for text in ("fsdp", "fsdp=0", "fsdp=-1"):
        with pytest.raises(UserError, match="not axis=number"):
            axes(text)
