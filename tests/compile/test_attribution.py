"""Which parameter a collective is about, along which axes it is sharded, and what is flagged."""

from __future__ import annotations

import pytest

from shardwright.compile.hlo.communication import Collective, Traffic
from shardwright.compile.lowered_graph import Argument, LoweredGraph
from shardwright.compile.report.attribution import collective_lines
from shardwright.compile.report.report import CompileReport
from tests.support.captured import MESH, counted

BOTH = ("fsdp", "expert")


def test_collectives_name_the_parameters_they_are_about(report: CompileReport) -> None:
    purposes = {(x.kind, x.axis, x.module): x.purpose for x in report.collectives}
    experts = "model.layers.*.mlp.experts"
    assert purposes["all-gather", "fsdp", experts] == "weights"
    assert purposes["all-reduce", "fsdp", experts] == "gradients"
    assert purposes["all-to-all", "expert", experts] == ""


@pytest.mark.parametrize(("elements", "why"), [(4096 * 8192, ""), (1024 * 8192, ""), (1000 * 8192, "exchanged over")])
def test_an_exchange_of_parts_of_a_gradient_is_told_from_one_of_tokens(elements: int, why: str) -> None:
    weight = Argument("layers.*.weight", "weights", (3, 4096, 8192), "float32", (None, BOTH, None), 0)
    exchange = Collective("all-to-all", "fsdp", "", f"bf16[{elements}]", 4, "ici")
    lowered = LoweredGraph(b"", (weight,), (), MESH, 3)
    (line,) = collective_lines({exchange: Traffic(1, 2**30, 2**30)}, lowered, exchange="expert")
    assert why in line.unplanned if why else not line.unplanned


@pytest.mark.parametrize(("width", "why"), [(1024, ""), (2048, ""), (4096, ""), (3000, "layout was lost")])
def test_a_gather_of_experts_a_ring_at_a_time_is_of_weights(width: int, why: str) -> None:
    """Mixtral's on 64 chips of v5p: over 4, 16 and 64 of them in turn, of which the last were taken for a batch's."""
    batch = Argument("input_ids", "batch", (8, 4096), "int32", (BOTH, None), None)
    experts = Argument("layers.*.experts", "weights", (3, 8, 28672, 4096), "float32", (None, None, None, BOTH), 0)
    rings = Collective("all-gather", "within fsdp", "", f"bf16[1,8,28672,{width}]", 2, "ici")
    reduced = Collective("all-to-all", "fsdp×expert", "", "bf16[8,4096,28672]", 8, "ici")
    traffic = dict.fromkeys((rings, reduced), Traffic(1, 2**30, 2**30))
    lowered = LoweredGraph(b"", (experts, batch), (), MESH, 3)
    lines = {line.kind: line for line in collective_lines(traffic, lowered, exchange="expert")}
    assert lines["all-gather"].purpose == ("" if why else "weights")
    assert why in lines["all-gather"].unplanned if why else not lines["all-gather"].unplanned
    assert not lines["all-to-all"].unplanned


def test_what_the_recipe_did_not_plan_is_flagged() -> None:
    """One collective of each kind that must not pass unseen, at Mixtral's sizes and in the captured step's layout."""
    shapes = {"gather": "bf16[3,4,1024,8192]", "reduce": "bf16[1024,8192]", "batch": "bf16[65536,8192]"}
    hlo = f"""HloModule flags
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
    batch = Argument("input_ids", "batch", (8, 8192), "int32", (BOTH, None), None)
    weight = Argument("layers.*.experts", "weights", (3, 4, 1024, 8192), "float32", (None, None, None, BOTH), 0)
    lowered = LoweredGraph(b"", (weight, batch), (), MESH, 3)
    lines = collective_lines(counted(hlo, layers=3).collectives, lowered, exchange="expert")
    flagged = [line.unplanned for line in lines]
    assert len(flagged) == 4
    assert any("all layers at once" in why for why in flagged)
    assert any("a reduce-scatter moves half" in why for why in flagged)
    assert any("tokens are exchanged over expert" in why for why in flagged)
    assert any("layout was lost" in why for why in flagged)
