"""The optimised HLO of a real TPU compile, and libtpu's own out-of-memory error, read back as numbers.

What is captured: tests/compile/captured/make_step.py.
"""

from __future__ import annotations

import json
import re
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from tests.support.captured import GIB, MESH, V5P, captured, captured_step
from tests.support.paths import CAPTURED
from trainer.compile.attribution import axes_of_dimensions
from trainer.compile.hlo.collectives import axes_of_group, module_of, replica_groups
from trainer.compile.hlo.cost import Cost, count
from trainer.compile.hlo.loops import trip_count
from trainer.compile.hlo.text import Module, leaves, parse
from trainer.compile.lowering import Argument, Lowered
from trainer.compile.page import page, write_page
from trainer.compile.report import CompileReport, _lines, make_report
from trainer.compile.terminal import print_report
from trainer.xla.chips import find_topology


@pytest.fixture(scope="module")
def small() -> Module:
    return parse(captured("optimised.hlo"))


@pytest.fixture(scope="module")
def cost(small: Module) -> Cost:
    return count(small, MESH, layers=3, chip=V5P)


@pytest.fixture(scope="module")
def large_cost() -> Cost:
    return count(parse(captured("optimised_large.hlo")), MESH, layers=3, chip=V5P)


@pytest.fixture(scope="module")
def report() -> CompileReport:
    result = {**json.loads((CAPTURED / "result.json").read_text()), "wall_seconds": 8.0}
    return make_report(
        captured_step(),
        find_topology("v5p:2x2x2"),
        result,
        captured("optimised.hlo"),
        captured("buffers.txt"),
        model_flops=1e9 * 8,
    )


@pytest.fixture(scope="module")
def refused() -> CompileReport:
    result = {"error": (CAPTURED / "out_of_memory.txt").read_text(), "cpu_seconds": 185.0, "wall_seconds": 236.0}
    return make_report(captured_step(), find_topology("v5p:2x2x2"), result, captured("optimised_large.hlo"), "")


def ideal_flops(tokens: int, hidden: int, intermediate: int, vocabulary: int, head: int) -> float:
    """Of the captured step on a chip: forward, recomputation, two gradients (down_proj needs no recomputation)."""
    attention, up, down = 4 * hidden * hidden, 4 * hidden * intermediate, 3 * hidden * intermediate
    return 2.0 * tokens * (3 * (attention + up + down) + head * hidden * vocabulary)


# ---- FLOPs, bytes, loops ----


def test_flops_are_those_of_the_models_matmuls_layers_multiplied_out(cost: Cost) -> None:
    assert cost.flops == pytest.approx(ideal_flops(256, 256, 512, 1024, head=3), rel=1e-3)


def test_flops_of_windowed_einsums_are_the_same_work(large_cost: Cost) -> None:
    # in this one the compiler makes the logits twice: once for their sum, once for the gradient
    assert large_cost.flops == pytest.approx(ideal_flops(2**21, 1024, 2048, 8192, head=4), rel=1e-3)


def test_loops_run_as_often_as_their_counters_say(small: Module) -> None:
    assert trips(small) == {"while.6": 3, "while.7": 3}
    # windowed einsums over 4 positions, unrolled by two: the counter goes to 4 in steps of 2
    assert trips(parse(captured("optimised_large.hlo"))) == {
        "while.15": 3,
        "while.17": 3,
        "while.18": 2,
        "while.19": 2,
        "while.20": 2,
    }


def trips(module: Module) -> dict[str, int | None]:
    return {
        loop.name: trip_count(module, computation, loop)
        for computation in module.computations.values()
        for loop in computation.instructions
        if loop.opcode == "while"
    }


def loop(condition: str, annotation: str = "") -> Module:
    return parse(
        f"""HloModule loop
%body (p: (u32[], u32[], f32[8])) -> (u32[], u32[], f32[8]) {{
  %p = (u32[], u32[], f32[8]) parameter(0)
  %low = u32[] get-tuple-element(%p), index=0
  %high = u32[] get-tuple-element(%p), index=1
  %x = f32[8]{{0}} get-tuple-element(%p), index=2
  %one = u32[] constant(1)
  %next = u32[] add(%low, %one)
  ROOT %out = (u32[], u32[], f32[8]) tuple(%next, %high, %x)
}}
%condition (q: (u32[], u32[], f32[8])) -> pred[] {{
  %q = (u32[], u32[], f32[8]) parameter(0)
  %l = u32[] get-tuple-element(%q), index=0
  %h = u32[] get-tuple-element(%q), index=1
  %zero = s32[] constant(0)
  %limit = u32[] constant(32)
{condition}
}}
ENTRY %main (x: f32[8]) -> (u32[], u32[], f32[8]) {{
  %x.1 = f32[8]{{0}} parameter(0)
  %start = u32[] constant(0)
  %begin = (u32[], u32[], f32[8]) tuple(%start, %start, %x.1)
  ROOT %loop = (u32[], u32[], f32[8]) while(%begin), condition=%condition, body=%body{annotation}
}}
"""
    )


def test_a_64_bit_counter_compared_in_halves_gives_its_trip_count() -> None:
    # as torch_xla's scan comes out
    module = loop(
        """  %signed = s32[] bitcast-convert(%h)
  %negative = pred[] compare(%signed, %zero), direction=LT
  %no_high = pred[] compare(%h, %zero), direction=EQ
  %below = pred[] compare(%l, %limit), direction=LT
  %both = pred[] and(%no_high, %below)
  ROOT %or = pred[] or(%negative, %both)"""
    )
    assert trips(module) == {"loop": 32}


def test_an_annotated_trip_count_wins_and_one_that_depends_on_data_is_said_to() -> None:
    unreadable = "  ROOT %below = pred[] compare(%l, %h), direction=LT"
    assert trips(loop(unreadable)) == {"loop": None}
    assert count(loop(unreadable), {"data": 1}, layers=7, chip=V5P).loops == {"loop": 7}
    annotated = ', backend_config={"known_trip_count":{"n":"5"}}'
    assert trips(loop(unreadable, annotated)) == {"loop": 5}


def test_a_layers_slice_of_stacked_weights_counts_as_the_slice() -> None:
    module = parse(
        """HloModule slices
%fused (w: f32[32,64,64], i: s32[]) -> f32[1,64,64] {
  %w = f32[32,64,64]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %slice = f32[1,64,64]{2,1,0} dynamic-slice(%w, %i, %i, %i), dynamic_slice_sizes={1,64,64}
}
%updated (w.1: f32[32,64,64], u: f32[1,64,64], i.1: s32[]) -> f32[32,64,64] {
  %w.1 = f32[32,64,64]{2,1,0} parameter(0)
  %u = f32[1,64,64]{2,1,0} parameter(1)
  %i.1 = s32[] parameter(2)
  ROOT %update = f32[32,64,64]{2,1,0} dynamic-update-slice(%w.1, %u, %i.1, %i.1, %i.1)
}
ENTRY %main (a: f32[32,64,64], b: s32[]) -> f32[32,64,64] {
  %a = f32[32,64,64]{2,1,0} parameter(0)
  %b = s32[] parameter(1)
  %layer = f32[1,64,64]{2,1,0} fusion(%a, %b), kind=kLoop, calls=%fused
  %near = f32[1,64,64]{2,1,0:T(8,128)S(1)} copy(%layer)
  ROOT %done = f32[32,64,64]{2,1,0} fusion(%a, %near, %b), kind=kLoop, calls=%updated
}
"""
    )
    layer, index = 64 * 64 * 4, 4
    # slice: read and written; copy to VMEM: read; update: written, from VMEM; and the index, twice
    assert count(module, {"data": 1}, 1, V5P).hbm_bytes == 4 * layer + 2 * index


def test_a_batched_matmul_as_a_dilated_convolution_counts_no_holes() -> None:
    module = parse(
        """HloModule convolution
ENTRY %main (a: bf16[4,512,128], b: bf16[4,128,256]) -> bf16[4,512,256] {
  %a = bf16[4,512,128]{2,1,0} parameter(0)
  %b = bf16[4,128,256]{2,1,0} parameter(1)
  ROOT %c = bf16[4,512,256]{2,1,0} convolution(%a, %b), window={size=4 stride=3 lhs_dilate=4}, dim_labels=0bf_0io->0bf
}
"""
    )
    assert count(module, {"data": 1}, 1, V5P).flops == 2 * 4 * 512 * 128 * 256


def test_estimated_cycles_leave_out_what_the_compiler_does_not_know(cost: Cost) -> None:
    assert 1e5 < cost.cycles < 1e6


def test_shapes_in_vmem_and_on_the_host_are_not_hbm() -> None:
    (vmem, host, hbm) = leaves("(bf16[8,128]{1,0:T(8,128)(2,1)S(1)}, f32[4]{0:T(128)S(5)}, pred[3]{0})")
    assert (vmem.hbm_bytes, host.hbm_bytes, host.host_bytes, hbm.hbm_bytes) == (0, 0, 16, 3)


# ---- collectives ----


def totals(cost: Cost) -> dict[tuple[str, str], tuple[float, float]]:
    found: dict[tuple[str, str], tuple[float, float]] = {}
    for key, traffic in cost.collectives.items():
        times, size = found.get((key.kind, key.axis), (0, 0))
        found[key.kind, key.axis] = times + traffic.count, size + traffic.bytes
    return found


def test_asynchronous_collectives_count_once_a_layer(cost: Cost) -> None:
    found = totals(cost)
    expert, attention, embedding = 256 * 512 * 2, 256 * 256 * 2, 1024 * 256 * 2
    # up_proj and down_proj, gathered in forward and in backward, most of them by fusions that overlap other work
    assert found["all-gather", "fsdp"] == (3 * 4, 3 * 4 * expert)
    assert found["all-gather", "fsdp×expert"] == (3 * 2 + 1, 3 * 2 * attention + embedding)
    # tokens there and back: forward 2, recomputed 1, backward 2
    assert found["all-to-all", "expert"] == (3 * 5, 3 * 5 * 2 * 128 * 256 * 2)
    assert found["all-reduce", "fsdp"] == (3, 3 * 2 * expert)


def test_an_all_reduce_fused_with_its_slice_is_a_reduce_scatter(large_cost: Cost) -> None:
    found = totals(large_cost)
    assert found["reduce-scatter", "fsdp"] == (3, 3 * 1024 * 2048 * 2)
    key, traffic = next(item for item in large_cost.collectives.items() if item[0].kind == "reduce-scatter")
    assert traffic.wire_bytes == pytest.approx(traffic.bytes * (key.group - 1) / key.group)


def test_permutes_of_windowed_einsums_are_multiplied_by_their_loops(large_cost: Cost) -> None:
    times = sum(t.count for k, t in large_cost.collectives.items() if k.kind == "collective-permute")
    assert times == 63
    assert all(k.axis == "fsdp×expert" for k in large_cost.collectives if k.kind == "collective-permute")


@pytest.mark.parametrize(
    ("text", "axis"),
    [
        ("replica_groups=[16,4]<=[64]", "expert"),
        ("replica_groups=[4,16]<=[16,4]T(1,0)", "fsdp"),
        ("replica_groups=[1,64]<=[64]", "fsdp×expert"),
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", "expert"),
        ("replica_groups={{0,4,8,12,16,20,24,28,32,36,40,44,48,52,56,60}}", "fsdp"),
        ("replica_groups={{0,1},{2,3}}", "within expert"),
        ("replica_groups=[8,8]<=[2,8,4]T(0,2,1)", "within fsdp"),
        ("channel_id=3", "fsdp×expert"),
    ],
)
def test_groups_are_told_by_the_axes_they_span(text: str, axis: str) -> None:
    mesh = {"fsdp": 16, "expert": 4}
    assert axes_of_group(mesh, replica_groups(text, 64)[0]) == axis


@pytest.mark.parametrize(
    ("sharding", "axes"),
    [
        ("{replicated}", ((), (), ())),
        ("{devices=[64,1,1]<=[64]}", (("fsdp", "expert"), (), ())),
        ("{devices=[1,4,16]<=[16,4]T(1,0)}", ((), ("expert",), ("fsdp",))),
        ("{devices=[16,1,1,4]<=[64] last_tile_dim_replicate}", (("fsdp",), (), ())),
        ("{devices=[2,1,1,2]0,1,2,3 last_tile_dim_replicate}", (("outer",), (), ())),
    ],
)
def test_a_sharding_tells_which_axis_splits_which_dimension(sharding: str, axes: tuple[tuple[str, ...], ...]) -> None:
    mesh = (("outer", 2), ("inner", 2)) if "0,1,2,3" in sharding else (("fsdp", 16), ("expert", 4))
    assert axes_of_dimensions(sharding, 3, mesh) == axes


@pytest.mark.parametrize(
    ("op_name", "module"),
    [
        ("jit(step)/transpose(jvp(model.embed_tokens))/scatter-add", "model.embed_tokens"),
        ("jit(step)/jvp()/while/body/closed_call/model.layers.*.mlp.experts/ebsd", "model.layers.*.mlp.experts"),
        ("xla__scan/call.1024/model.layers.*.self_attn/aten__mm", "model.layers.*.self_attn"),
        ("xla__scan/call.6602/aot_backward.195/aten__mm", "aten__mm (backward)"),
        ("xla__scan/call.7/model.layers.*.mlp.experts.12/aten__mm.3/aten__mm", "model.layers.*.mlp.experts"),
        ("xla__scan/while.1137", "xla__scan"),
        ("aten__topk", "aten__topk"),
        ("", ""),
    ],
)
def test_the_module_is_found_in_the_compilers_metadata(op_name: str, module: str) -> None:
    assert module_of(op_name) == module


# ---- the report ----


def test_a_report_of_a_step_that_fits_adds_up(report: CompileReport) -> None:
    assert report.fits
    assert report.weights_bytes == report.optimizer_bytes == report.alias_bytes // 2
    kinds = report.weights_bytes + report.optimizer_bytes + report.batch_bytes + report.other_bytes
    assert kinds == report.argument_bytes == 3_605_504
    assert report.argument_bytes + report.temp_bytes <= report.required_bytes < report.chip_hbm_bytes
    names = {b.module for b in report.largest_buffers}
    assert {"model.layers.*.mlp.experts.up_proj", "model.layers.*.mlp.experts.down_proj first moment"} <= names
    assert list(report.largest_buffers) == sorted(report.largest_buffers, key=lambda b: -b.bytes)
    assert report.roofline.mfu_bound == pytest.approx(1e9 / 459e12 / report.roofline.seconds)


def test_modules_share_the_step_among_them(report: CompileReport) -> None:
    assert sum(x.cycles for x in report.modules) == report.estimated_cycles
    assert sum(x.flops for x in report.modules) == report.flops
    assert sum(x.hbm_bytes for x in report.modules) == report.hbm_bytes
    experts = next(x for x in report.modules if x.module == "model.layers.*.mlp.experts")
    assert experts.flops > report.flops / 2


def test_a_kernels_own_estimate_counts_and_one_without_is_named() -> None:
    module = parse(
        """HloModule kernels
ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %told = f32[8]{0} custom-call(%a), custom_call_target="tpu_custom_call", metadata={op_name="model.a.gmm/x"}, \
backend_config={"custom_call_config":{"body":"xyz","cost_estimate":{"flops":"7696","bytes_accessed":"24"}}}
  ROOT %silent = f32[8]{0} custom-call(%told), custom_call_target="tpu_custom_call", metadata={op_name="model.b/y"}
}
"""
    )
    found = count(module, {"data": 1}, 1, V5P)
    assert (found.flops, found.kernel_flops, found.kernels) == (7696, 7696, {"model.b": 1})


def test_the_json_holds_what_was_promised(report: CompileReport) -> None:
    plain = json.loads(json.dumps(report.as_json()))
    promised = """fits topology devices chip_hbm_bytes peak_bytes argument_bytes alias_bytes temp_bytes code_bytes
        host_temp_bytes flops hbm_bytes estimated_cycles compile_seconds collectives largest_buffers"""
    assert set(promised.split()) <= plain.keys()
    assert {"kind", "axis", "count", "bytes", "wire_bytes", "module"} <= plain["collectives"][0].keys()
    assert {"bytes", "shape", "module"} <= plain["largest_buffers"][0].keys()


def test_collectives_name_the_parameters_they_are_about(report: CompileReport) -> None:
    purposes = {(x.kind, x.axis, x.module): x.purpose for x in report.collectives}
    experts = "model.layers.*.mlp.experts"
    assert purposes["all-gather", "fsdp", experts] == "weights"
    assert purposes["all-reduce", "fsdp", experts] == "gradients"
    assert purposes["all-to-all", "expert", experts] == ""


def test_what_the_recipe_did_not_plan_is_flagged() -> None:
    """At Mixtral's sizes, in the captured step's layout: one collective of each kind that must not pass unseen."""
    shapes = {"gather": "bf16[3,4,1024,8192]", "reduce": "bf16[1024,8192]", "batch": "bf16[65536,8192]"}
    module = parse(
        f"""HloModule flags
%add (x: bf16[], y: bf16[]) -> bf16[] {{
  %x = bf16[] parameter(0)
  %y = bf16[] parameter(1)
  ROOT %sum = bf16[] add(%x, %y)
}}
ENTRY %main (a: bf16[3,4,1024,1024], b: bf16[4,1024,8192], c: bf16[8192,8192]) -> bf16[65536,8192] {{
  %a = bf16[3,4,1024,1024]{{3,2,1,0}} parameter(0)
  %b = bf16[4,1024,8192]{{2,1,0}} parameter(1)
  %c = bf16[8192,8192]{{1,0}} parameter(2)
  %all = {shapes["gather"]}{{3,2,1,0}} all-gather(%a), replica_groups=[1,8]<=[8], dimensions={{3}}
  %sum.1 = bf16[4,1024,8192]{{2,1,0}} all-reduce(%b), replica_groups=[1,8]<=[8], to_apply=%add
  %moved = bf16[8192,8192]{{1,0}} all-to-all(%c), replica_groups=[4,2]<=[2,4]T(1,0), dimensions={{0}}
  ROOT %lost = {shapes["batch"]}{{1,0}} all-gather(%moved), replica_groups=[1,8]<=[8], dimensions={{0}}
}}
"""
    )
    batch = Argument("input_ids", "batch", (8, 8192), "int32", "{devices=[8,1]<=[8]}", None)
    weight = Argument("experts", "weights", (3, 4, 1024, 8192), "float32", "{devices=[1,1,1,8]<=[8]}", 0)
    lowered = Lowered(b"", (weight, batch), (), MESH, 3)
    flagged = [line.unplanned for line in _lines(count(module, MESH, 3, V5P), lowered, exchange="expert")]
    assert any("all layers at once" in why for why in flagged)
    assert any("a reduce-scatter moves half" in why for why in flagged)
    assert any("tokens are exchanged over expert" in why for why in flagged)
    assert any("layout was lost" in why for why in flagged)


def test_a_refusal_names_what_did_not_fit(refused: CompileReport) -> None:
    assert not refused.fits
    assert refused.required_bytes == pytest.approx(144 * GIB, rel=1e-3)
    assert refused.chip_hbm_bytes == find_topology("v5p:2x2x2").chip.hbm_bytes
    first = refused.largest_buffers[0]
    assert (first.bytes, first.shape) == (64 * GIB, "f32[2048,1023,8192]")
    assert refused.flops > 3e14  # what was compiled so far is still counted


# ---- the page ----


def test_the_page_needs_nothing_else_and_escapes_what_it_shows(refused: CompileReport, tmp_path: Path) -> None:
    write_page(refused, tmp_path / "deep" / "report.html", title="<script>alert(1)</script>")
    text = (tmp_path / "deep" / "report.html").read_text()
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert not re.search(r"(?:src|href)=|https?://|@import|url\(", text)
    assert "prefers-color-scheme: dark" in text
    assert "Does not fit: 144.0 GiB of 95.7 GiB HBM" in text
    assert "Ran out of memory" in text
    assert "f32[2048,1023,8192]" in text


def test_page_and_terminal_say_the_same_and_call_estimates_estimates(report: CompileReport) -> None:
    out = StringIO()
    print_report(report, Console(file=out, width=200))
    for text in (page(report), out.getvalue()):
        assert "Fits:" in text
        assert "estimate" in text
        assert "model.layers.*.mlp.experts (gradients)" in text
        assert "optimizer state" in text
