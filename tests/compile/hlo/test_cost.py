"""FLOPs, bytes, cycles and collectives of real compiles, and of modules so small that the right number is plain."""

from __future__ import annotations

import pytest

from shardwright.compile.hlo.communication import Collective, Traffic
from shardwright.compile.hlo.cost import Cost
from tests.support.captured import V5P, counted


def ideal_flops(tokens: int, hidden: int, intermediate: int, vocabulary: int, head: int) -> float:
    """The captured step's, on a chip: forward, recomputation (but of down_proj), two gradients.

    Args:
        head: how many products with the vocabulary the compiler makes.
    """
    attention, up, down = 4 * hidden * hidden, 4 * hidden * intermediate, 3 * hidden * intermediate
    return 2.0 * tokens * (3 * (attention + up + down) + head * hidden * vocabulary)


def test_flops_are_those_of_the_models_matmuls_layers_multiplied_out(cost: Cost) -> None:
    assert cost.flops == pytest.approx(ideal_flops(256, 256, 512, 1024, head=3), rel=1e-3)


def test_flops_of_windowed_einsums_are_the_same_work(large_cost: Cost) -> None:
    # here the compiler makes the logits twice: once for their sum, once for the gradient
    assert large_cost.flops == pytest.approx(ideal_flops(2**21, 1024, 2048, 8192, head=4), rel=1e-3)


def test_a_batched_matmul_as_a_dilated_convolution_counts_no_holes() -> None:
    hlo = """HloModule convolution
ENTRY %main (a: bf16[4,512,128], b: bf16[4,128,256]) -> bf16[4,512,256] {
  %a = bf16[4,512,128]{2,1,0} parameter(0)
  %b = bf16[4,128,256]{2,1,0} parameter(1)
  ROOT %c = bf16[4,512,256]{2,1,0} convolution(%a, %b), window={size=4 stride=3 lhs_dilate=4}, dim_labels=0bf_0io->0bf
}
"""
    assert counted(hlo, {"data": 1}).flops == 2 * 4 * 512 * 128 * 256


def test_a_kernels_own_estimate_counts_and_one_without_is_named() -> None:
    hlo = """HloModule kernels
ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %told = f32[8]{0} custom-call(%a), custom_call_target="tpu_custom_call", metadata={op_name="model.a.gmm/x"}, \
backend_config={"custom_call_config":{"body":"xyz","cost_estimate":{"flops":"7696","bytes_accessed":"24"}}}
  ROOT %silent = f32[8]{0} custom-call(%told), custom_call_target="tpu_custom_call", metadata={op_name="model.b/y"}
}
"""
    found = counted(hlo, {"data": 1})
    assert (found.flops, found.kernel_flops, found.kernels) == (7696, 7696, {"model.b": 1})


def test_a_layers_slice_of_stacked_weights_counts_as_the_slice() -> None:
    hlo = """HloModule slices
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
    layer, index = 64 * 64 * 4, 4
    # the slice is read and written, the copy to VMEM read, the update from VMEM written, and the index read twice
    assert counted(hlo, {"data": 1}).hbm_bytes == 4 * layer + 2 * index


def test_estimated_cycles_leave_out_what_the_compiler_does_not_know(cost: Cost) -> None:
    assert 1e5 < cost.cycles < 1e6


def totals(cost: Cost) -> dict[tuple[str, str], tuple[float, float]]:
    """(kind, axis) → (how many run, bytes)."""
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


def test_a_gather_fused_with_a_product_is_not_exposed_and_one_that_stands_alone_is(cost: Cost) -> None:
    gathers = {key.module: [] for key in cost.collectives if key.kind == "all-gather"}
    for key, traffic in cost.collectives.items():
        if key.kind == "all-gather":
            gathers[key.module].append(traffic.exposed_bytes / traffic.wire_bytes)
    assert sorted(gathers["model.layers.*.mlp.experts"]) == [0, 0, 0, 1]
    assert gathers["model.embed_tokens"] == [1]
    assert all(t.exposed_bytes == t.wire_bytes for k, t in cost.collectives.items() if k.kind == "all-to-all")


@pytest.mark.parametrize(("cycles", "left"), [(0, 1.0), (500, 0.5), (5000, 0.0)])
@pytest.mark.parametrize("on_the_sparse_core", [False, True])
def test_what_is_computed_meanwhile_hides_a_collective(cycles: int, left: float, on_the_sparse_core: bool) -> None:
    sent = round(1000 * V5P.ici_bandwidth / V5P.clock)  # what all links send in a thousand cycles
    local, gathered = f"s8[{sent}]{{0}}", f"s8[{2 * sent}]{{0}}"
    gather = f"{gathered} all-gather(%x), replica_groups=[4,2]<=[8], dimensions={{0}}"
    begin, end = (
        (f"({local}, {gathered}) call-start(%x), to_apply=%there", f"{gathered} call-done(%begun), to_apply=%there")
        if on_the_sparse_core
        else (
            f"({local}, {gathered}) all-gather-start(%x), replica_groups=[4,2]<=[8], dimensions={{0}}",
            f"{gathered} all-gather-done(%begun)",
        )
    )
    hlo = f"""HloModule overlap
%there (x: {local}) -> {gathered} {{
  %x = {local} parameter(0)
  ROOT %gathered = {gather}
}}
ENTRY %main (x: {local}) -> {gathered} {{
  %x = {local} parameter(0)
  %begun = {begin}
  %work = {local} negate(%x), backend_config={{"estimated_cycles":"{cycles}"}}
  ROOT %done = {end}
}}
"""
    ((key, traffic),) = counted(hlo).collectives.items()
    assert (key.kind, key.axis, traffic.wire_bytes) == ("all-gather", "within expert", sent)
    assert traffic.exposed_bytes == pytest.approx(left * sent, rel=0.01)


def test_what_a_loop_of_no_turn_would_send_leaves_no_trace() -> None:
    inside, outside = (
        Cost(flops=1.0, collectives={Collective("all-reduce", "fsdp", "", "f32[8]", 2, "ici"): Traffic(1)}),
        Cost(),
    )
    outside.add(inside, 0)
    assert outside == Cost()
    outside.add(inside, 2)
    assert [traffic.count for traffic in outside.collectives.values()] == [2]
