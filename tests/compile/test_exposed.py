"""Which bytes of a collective the schedule has no work for."""

from __future__ import annotations

import pytest

from tests.support.captured import MESH, V5P, captured
from trainer.compile.hlo.cost import count
from trainer.compile.hlo.text import parse


def test_a_gather_fused_with_a_product_is_not_exposed_and_one_that_stands_alone_is() -> None:
    cost = count(parse(captured("optimised.hlo")), MESH, layers=3, chip=V5P)
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
    sent = round(1000 * V5P.ici_bandwidth / V5P.clock)  # in a thousand cycles, over all links
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
    module = parse(f"""HloModule overlap
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
""")
    ((key, traffic),) = count(module, MESH, 1, V5P).collectives.items()
    assert (key.kind, key.axis, traffic.wire_bytes) == ("all-gather", "within expert", sent)
    assert traffic.exposed_bytes == pytest.approx(left * sent, rel=0.01)
