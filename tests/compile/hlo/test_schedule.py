"""A step's time: kernels by their work, the ring model, what runs beside a collective, and the sum of all."""

from __future__ import annotations

import itertools
import math

import pytest

from shardwright.compile.hlo.cost import Counter
from shardwright.compile.hlo.efficiency import KINDS, MEASURED, Reached
from shardwright.compile.hlo.kernels import kernel_work, told_of
from shardwright.compile.hlo.links import Links, Ring
from shardwright.compile.hlo.text import parse
from shardwright.compile.hlo.timeline import Schedule
from shardwright.compile.report.estimate import estimate, given_efficiencies, overlap
from shardwright.errors import UserError
from shardwright.models.ops.kernel_cost import Heads, Work, attention_work, gmm_work, met_blocks, tgmm_work, tiles
from shardwright.xla.chips import find_topology
from tests.support.captured import V5P
from tests.support.paths import ROOT

WHOLE = dict.fromkeys(KINDS, 1.0)
RING = Links(find_topology("v5p:4x4x4"), (4, 4, 4), (1, 1, 1))
MESH = {"a": 4, "b": 4, "c": 4}


def _seconds(text: str, efficiency: dict[str, float] = WHOLE) -> dict[str, float]:
    return Schedule(Counter(MESH, 1, RING), Reached("v5p", given=efficiency)).computation(parse(text)).seconds


@pytest.mark.parametrize(("length", "block", "window"), [(4096, 1024, None), (4096, 512, 1024), (768, 128, 129)])
def test_blocks_are_those_in_which_a_query_sees_a_key(length: int, block: int, window: int | None) -> None:
    seen = {
        (query // block, key // block)
        for query, key in itertools.product(range(0, length, 1), range(0, length, 16))
        if key <= query and (window is None or query - key < window)
    }
    count = length // block
    reach = count - 1 if window is None else min(-(-(window - 1) // block), count - 1)
    assert met_blocks(count, reach) == len(seen)


def test_attention_work_is_that_of_its_products_block_by_block() -> None:
    heads, block = Heads(rows=6, length=512, width=64, value_width=32, itemsize=2), 128
    pairs = 6 * 10 * block * block  # 10 of 16 blocks
    scores, value = 2 * 64 * pairs, 2 * 32 * pairs
    assert attention_work("forward", heads, block, 3).flops == scores + value
    assert attention_work("dq", heads, block, 3).flops == 2 * scores + value  # scores, dP = dO Vᵀ, dQ = dS K
    assert attention_work("dkv", heads, block, 3).flops == 2 * scores + 2 * value  # and dV = Pᵀ dO, dK = dSᵀ Q
    # each block of keys and values that is met passes by; query, output and a row's logarithm move once
    forward = 6 * 10 * block * (64 + 32) * 2 + 6 * 512 * ((64 + 32) * 2 + 128 * 4)
    assert attention_work("forward", heads, block, 3).hbm_bytes == forward


def test_kernels_are_known_by_their_shapes() -> None:
    entry = parse(
        """HloModule kernels
ENTRY %main (n: s8[1,4,2], q: bf16[3,8,4096,128], k: bf16[3,2,4096,128], i: s32[4096,128], x: bf16[2048,256], \
w: bf16[4,256,512], t: s32[7], y: bf16[2048,512], s: f32[4,256,512]) -> bf16[2048,512] {
  %n = s8[1,4,2]{2,1,0} parameter(0)
  %q = bf16[3,8,4096,128]{3,2,1,0} parameter(1)
  %k = bf16[3,2,4096,128]{3,2,1,0} parameter(2)
  %i = s32[4096,128]{1,0} parameter(3)
  %x = bf16[2048,256]{1,0} parameter(4)
  %w = bf16[4,256,512]{2,1,0} parameter(5)
  %t = s32[7]{0} parameter(6)
  %y = bf16[2048,512]{1,0} parameter(7)
  %s = f32[4,256,512]{2,1,0} parameter(8)
  %forward = (f32[3,1024,128]{2,1,0}, f32[3,1024,128]{2,1,0}, f32[3,1024,128]{2,1,0}, bf16[3,8,4096,128]{3,2,1,0}, \
f32[3,8,4096,128]{3,2,1,0}) custom-call(%n, %n, %q, %k, %k, %i), custom_call_target="tpu_custom_call"
  %dkv = (f32[3,1024,128]{2,1,0}, f32[3,1024,128]{2,1,0}, bf16[3,2,4096,128]{3,2,1,0}, bf16[3,2,4096,128]{3,2,1,0}) \
custom-call(%n, %n, %q, %k, %k, %i), custom_call_target="tpu_custom_call"
  %dq = (f32[3,1024,128]{2,1,0}, bf16[3,8,4096,128]{3,2,1,0}) custom-call(%n, %n, %q, %k, %k, %i), \
custom_call_target="tpu_custom_call"
  %p = bf16[8,4096,128]{2,1,0} bitcast(%q)
  %one = (f32[1024,128]{1,0}, bf16[8,4096,128]{2,1,0}) custom-call(%n, %n, %p, %p, %p, %i), \
custom_call_target="tpu_custom_call"
  %tgmm = f32[4,256,512]{2,1,0} custom-call(%t, %x, %y, %s), custom_call_target="tpu_custom_call"
  %strange = f32[4,256]{1,0} custom-call(%s), custom_call_target="tpu_custom_call"
  %unwritten = bf16[2048,512]{1,0} custom-call(%t), custom_call_target="tpu_custom_call"
  ROOT %gmm = bf16[2048,512]{1,0} custom-call(%t, %x, %w), custom_call_target="tpu_custom_call"
}
"""
    )
    names = ("forward", "dkv", "dq", "gmm", "tgmm", "strange", "unwritten", "one")
    found = {name: kernel_work(entry.by_name[name], V5P.flops_a_byte) for name in names}
    heads = Heads(24, 4096, 128, 128, 2)
    assert found == {
        **{phase: attention_work(phase, heads, 1024, reach=1) for phase in ("forward", "dkv", "dq")},
        "gmm": gmm_work(2048, 256, 512, 4, 7, 2, tiles(V5P.flops_a_byte)),
        "tgmm": tgmm_work(2048, 256, 512, 4, 7, 2, 4, tiles(V5P.flops_a_byte)),
        "strange": None,
        "one": attention_work("dq", Heads(8, 4096, 128, 128, 2), 1024, reach=1),  # of one sequence
        "unwritten": Work("unwritten", 0.0, 0.0),
    }


def test_a_grouped_product_with_some_of_the_groups_counts_their_share_of_the_rows() -> None:
    """An expert's matrix at a time, as packed weights are multiplied: 4 groups of 32, 136 tiles of 128 rows in all."""
    entry = parse(
        """HloModule parts
ENTRY %main (n: s32[], e: s32[33], t: s32[167], o: s32[1], x: bf16[17408,2880], w: bf16[4,2880,5760], \
y: bf16[17408,5760]) -> bf16[17408,5760] {
  %n = s32[] parameter(0)
  %e = s32[33]{0} parameter(1)
  %t = s32[167]{0} parameter(2)
  %o = s32[1]{0} parameter(3)
  %x = bf16[17408,2880]{1,0} parameter(4)
  %w = bf16[4,2880,5760]{2,1,0} parameter(5)
  %y = bf16[17408,5760]{1,0} parameter(6)
  ROOT %part = bf16[17408,5760]{1,0} custom-call(%n, %e, %t, %t, %o, %x, %w, %y), custom_call_target="tpu_custom_call"
}
"""
    )
    part = kernel_work(entry.by_name["part"], V5P.flops_a_byte)
    assert told_of(entry.by_name["part"]) == 1 / 8
    whole = gmm_work(17408, 2880, 5760, 32, 167, 2, tiles(V5P.flops_a_byte))
    assert part is not None
    assert (part.size, whole.size) == (128, 128)
    assert 8 * part.flops == pytest.approx(whole.flops, rel=0.05)


# of a batch of one sequence the kernels have no dimension; a ring's pair of two pieces has no positions
@pytest.mark.parametrize(
    ("masks", "reach"),
    [("", None), (", %s, %t", None), (", %i", 3), (", %s, %t, %i", 3)],
    ids=["earlier keys", "earlier keys, documents", "causal", "causal, documents"],
)
def test_a_rings_pairs_count_each_block_that_runs(masks: str, reach: int | None) -> None:
    entry = parse(
        f"""HloModule ring
ENTRY %main (n: s8[1,4,4], q: bf16[8,4096,128], k: bf16[2,4096,128], v: bf16[2,4096,64], i: s32[4096,128], \
s: s32[4096,128], t: s32[8,4096], r: f32[8,1,4096], g: bf16[8,4096,64]) -> (f32[1024,128], bf16[8,4096,128]) {{
  %n = s8[1,4,4]{{2,1,0}} parameter(0)
  %q = bf16[8,4096,128]{{2,1,0}} parameter(1)
  %k = bf16[2,4096,128]{{2,1,0}} parameter(2)
  %v = bf16[2,4096,64]{{2,1,0}} parameter(3)
  %i = s32[4096,128]{{1,0}} parameter(4)
  %s = s32[4096,128]{{1,0}} parameter(5)
  %t = s32[8,4096]{{1,0}} parameter(6)
  %r = f32[8,1,4096]{{2,1,0}} parameter(7)
  %g = bf16[8,4096,64]{{2,1,0}} parameter(8)
  %forward = (f32[1024,128]{{1,0}}, f32[1024,128]{{1,0}}, f32[1024,64]{{1,0}}, bf16[8,4096,64]{{2,1,0}}, \
f32[8,4096,128]{{2,1,0}}) custom-call(%n, %n, %q, %k, %v{masks}), custom_call_target="tpu_custom_call"
  %dkv = (f32[1024,128]{{1,0}}, f32[1024,64]{{1,0}}, bf16[2,4096,128]{{2,1,0}}, bf16[2,4096,64]{{2,1,0}}) \
custom-call(%n, %n, %q, %k, %v, %r, %g, %r{masks}), custom_call_target="tpu_custom_call"
  ROOT %dq = (f32[1024,128]{{1,0}}, bf16[8,4096,128]{{2,1,0}}) custom-call(%n, %n, %q, %k, %v, %r, %g, %r{masks}), \
custom_call_target="tpu_custom_call"
}}
"""
    )
    phases = ("forward", "dkv", "dq")
    found = [kernel_work(entry.by_name[phase], V5P.flops_a_byte) for phase in phases]
    heads = Heads(8, 4096, 128, 64, 2)
    assert found == [attention_work(phase, heads, 1024, reach) for phase in phases]
    assert found[0] is not None
    # 16 pairs of blocks, of which a causal mask leaves 10
    assert found[0].flops == 2 * 8 * (16 if reach is None else 10) * 1024**2 * (128 + 64)


def test_the_ring_model() -> None:
    link = V5P.link_bandwidth
    ring, plane = [0, 1, 2, 3], list(range(16))
    assert RING.rings(ring) == [Ring(4, 2.0)]
    assert RING.rings([0, 2]) == [Ring(2, 1.0)]  # every other chip: a ring too, whose links two groups share
    assert RING.seconds("all-gather", "ici", ring, 3e9) == pytest.approx(3e9 / (2 * link))
    assert RING.seconds("reduce-scatter", "ici", plane, 3e9) == pytest.approx(3e9 / (4 * link))
    # of 4 parts of a GB two go one step, one goes two: 4 GB-steps over two links of each chip
    assert RING.seconds("all-to-all", "ici", ring, 3e9) == pytest.approx(2e9 / link)
    line = Links(find_topology("v6e:4x4"), (4, 4), (1, 1))  # not as long as the pod: open
    assert line.rings(ring) == [Ring(4, 1.0)]
    # the first half sends half of its 4 GB over the middle, one link: 2 chips × 2 GB
    assert line.seconds("all-to-all", "ici", ring, 3e9) == pytest.approx(4e9 / line.topology.chip.link_bandwidth)
    assert line.seconds("all-gather", "dcn", (), 1e9) == pytest.approx(1e9 / line.topology.chip.dcn_bandwidth)


def test_two_devices_of_a_chip_share_its_links() -> None:
    chips = Links(find_topology("tpu7x:4x4x4"), (64, 2), (1, 1))
    chip, one, both = chips.topology.chip, [2 * n for n in range(64)], list(range(128))
    assert chips.coordinates[0][:3] == chips.coordinates[1][:3] != chips.coordinates[2][:3]
    # 63 parts of a GB come over all six links of the chip: for one of its devices over half of each
    assert chips.seconds("all-gather", "ici", one, 63e9) == pytest.approx(63e9 / (3 * chip.link_bandwidth))
    # of 127 parts the chip takes in 126 once, for both
    assert chips.seconds("all-gather", "ici", both, 127e9) == pytest.approx(126e9 / (6 * chip.link_bandwidth))
    assert chips.seconds("all-gather", "ici", [0, 1], 1e9) == pytest.approx(1e9 / chip.inner_bandwidth)


def test_only_what_nothing_hides_of_a_collective_is_waited_for() -> None:
    def step(cycles: int) -> dict[str, float]:
        return _seconds(
            f"""HloModule beside
ENTRY %main (a: f32[1024,1024], b: f32[1024,1024]) -> f32[4096,1024] {{
  %a = f32[1024,1024]{{1,0}} parameter(0)
  %b = f32[1024,1024]{{1,0:S(1)}} parameter(1)
  %s = (f32[1024,1024]{{1,0}}, f32[4096,1024]{{1,0}}) all-gather-start(%a), \
replica_groups=[16,4]<=[64], dimensions={{0}}
  %work = f32[1024,1024]{{1,0:S(1)}} negate(%b), backend_config={{"estimated_cycles":"{cycles}"}}
  ROOT %d = f32[4096,1024]{{1,0}} all-gather-done(%s)
}}
"""
        )

    alone = 3 * 4 * 2**20 / (2 * V5P.link_bandwidth)
    half = int(alone / 2 * V5P.clock)
    assert step(half)["ici"] == pytest.approx(alone - half / V5P.clock)
    assert "ici" not in step(4 * half)


def test_only_what_nothing_hides_of_a_copy_to_the_host_is_waited_for() -> None:
    def step(cycles: int) -> dict[str, float]:
        return _seconds(
            f"""HloModule parked
ENTRY %main (a: f32[1024,1024], b: f32[1024,1024]) -> f32[1024,1024] {{
  %a = f32[1024,1024]{{1,0}} parameter(0)
  %b = f32[1024,1024]{{1,0:S(1)}} parameter(1)
  %s = (f32[1024,1024]{{1,0:S(5)}}, f32[1024,1024]{{1,0}}, u32[]{{:S(2)}}) copy-start(%a)
  %work = f32[1024,1024]{{1,0:S(1)}} negate(%b), backend_config={{"estimated_cycles":"{cycles}"}}
  ROOT %d = f32[1024,1024]{{1,0:S(5)}} copy-done(%s)
}}
"""
        )

    alone = 4 * 2**20 / V5P.host_bandwidth
    half = int(alone / 2 * V5P.clock)
    assert step(half)["host"] == pytest.approx(alone - half / V5P.clock)
    assert "host" not in step(4 * half)


def test_a_loops_time_is_its_bodys_times_its_turns_and_shares_make_the_whole() -> None:
    loop = """HloModule loops
%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]{0:S(1)}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[8]{0:S(1)} get-tuple-element(%p), index=1
  %y = f32[8]{0:S(1)} negate(%x), backend_config={"estimated_cycles":"1750000"}
  ROOT %out = (s32[], f32[8]{0}) tuple(%i, %y)
}
%condition (p.1: (s32[], f32[8])) -> pred[] {
  %p.1 = (s32[], f32[8]{0}) parameter(0)
  ROOT %go = pred[] constant(true)
}
ENTRY %main (a: (s32[], f32[8])) -> (s32[], f32[8]) {
  %a = (s32[], f32[8]{0}) parameter(0)
  ROOT %w = (s32[], f32[8]{0}) while(%a), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"5"}}
}
"""
    assert _seconds(loop) == {"rest": pytest.approx(5e-3)}
    slower = _seconds(loop, WHOLE | {"compiler": 0.5})
    assert slower == {"rest": pytest.approx(10e-3)}


def test_what_multiplies_nothing_takes_its_bytes_and_not_the_compilers_cycles() -> None:
    copy = """HloModule copies
ENTRY %main (a: f32[1024,1024]) -> f32[1024,1024] {
  %a = f32[1024,1024]{1,0} parameter(0)
  ROOT %y = f32[1024,1024]{1,0} negate(%a), backend_config={"estimated_cycles":"1750000"}
}
"""
    seconds = 2 * 4 * 2**20 / V5P.hbm_bandwidth
    assert _seconds(copy) == {"rest": pytest.approx(seconds)}
    assert _seconds(copy, WHOLE | {"hbm": 0.5}) == {"rest": pytest.approx(2 * seconds)}


def test_what_belongs_to_a_collective_that_goes_on_only_passes_through_a_fusion() -> None:
    passing = """HloModule passing
%goes_on (p: f32[256,1024], q: f32[1024,1024], x: f32[1024,1024]) -> (f32[1024,1024], f32[256,1024], f32[1024,1024]) {
  %p = f32[256,1024]{1,0} parameter(0)
  %q = f32[1024,1024]{1,0} parameter(1)
  %x = f32[1024,1024]{1,0} parameter(2)
  %g = f32[1024,1024]{1,0} all-gather(%p), replica_groups=[16,4]<=[64], dimensions={0}, \
frontend_attributes={chain_id="7"}
  %y = f32[1024,1024]{1,0} negate(%x)
  ROOT %t = (f32[1024,1024]{1,0}, f32[256,1024]{1,0}, f32[1024,1024]{1,0}) tuple(%y, %p, %g)
}
ENTRY %main (p.1: f32[256,1024], q.1: f32[1024,1024], x.1: f32[1024,1024]) -> f32[1024,1024] {
  %p.1 = f32[256,1024]{1,0} parameter(0)
  %q.1 = f32[1024,1024]{1,0} parameter(1)
  %x.1 = f32[1024,1024]{1,0} parameter(2)
  %f = (f32[1024,1024]{1,0}, f32[256,1024]{1,0}, f32[1024,1024]{1,0}) fusion(%p.1, %q.1, %x.1), kind=kCustom, \
output_to_operand_aliasing={{1}: (0, {}), {2}: (1, {})}, calls=%goes_on
  ROOT %out = f32[1024,1024]{1,0} get-tuple-element(%f), index=0
}
"""
    assert _seconds(passing) == {"rest": pytest.approx(2 * 4 * 2**20 / V5P.hbm_bandwidth)}


@pytest.mark.parametrize(
    ("rows", "groups", "tile", "inner", "outer", "counted"),
    [
        (16384, 8, 512, 4096, 14336, 39 / 32),  # 32 tiles, and 7 groups that begin inside one
        (8192, 32, 128, 2048, 2880, 95 / 64 * 3072 / 2880),  # 2,880 columns fill four tiles of 768
        (4096, 1, 256, 1024, 1024, 1.0),
    ],
)
def test_a_grouped_product_counts_each_visit_of_a_tile_whole(
    rows: int, groups: int, tile: int, inner: int, outer: int, counted: float
) -> None:
    visits, most = rows // tile + groups - 1, tiles(V5P.flops_a_byte)
    for work in (
        gmm_work(rows, inner, outer, groups, visits, 2, most),
        tgmm_work(rows, inner, outer, groups, visits, 2, 4, most),
    ):
        assert work.size == tile
        assert work.flops == pytest.approx(2 * rows * inner * outer * counted)


def test_the_part_of_a_peak_is_that_measured_at_its_size_and_between_two_on_the_logarithm() -> None:
    ends = {which: Reached("v5p", which) for which in ("low", "middle", "high")}  # type: ignore[arg-type]
    # splash attention on tpu7x, heads of 128: 25 and 31 % of a peak that they half fill, at 8k and 32k tokens
    assert [ends["high"]("attention_forward", size) for size in (8192, 32768)] == [0.25 / 0.5, 0.31 / 0.5]
    assert ends["middle"]("attention_forward", 16384) == pytest.approx((0.45 + 0.56) / 2)
    assert ends["high"]("attention_forward", 512) == ends["high"]("attention_forward", 4096)
    assert Work("attention_forward", 1.0, 0.0, (128, 128)).filled(256) == 0.5
    assert Work("attention_forward", 1.0, 0.0, (192, 128)).filled(256) == (192 + 128) / 512
    # an all-gather on tpu7x: 72, 162 and 179 GB/s of two links' 200
    measured = {1.6e6: 72 / 200, 25e6: 162 / 200, 400e6: 179 / 200}
    assert {size: ends["middle"]("ici", size) for size in measured} == pytest.approx(measured, rel=0.01)
    # a copy on v6e and on tpu7x, of 1,640 and 7,380 GB/s
    assert Reached("v6e")("hbm") == pytest.approx(1360 / 1640, rel=0.01)
    assert Reached("tpu7x", "high")("hbm") == pytest.approx(6400 / 7380, rel=0.01)
    assert Reached("v5p", given={"gmm": 0.9})("gmm", 128) == 0.9


def test_each_measured_range_has_its_source_and_is_stated_in_the_docs() -> None:
    text = (ROOT / "docs" / "estimate.md").read_text(encoding="utf-8")
    assert {row.kind for row in MEASURED} == {*KINDS}
    for row in MEASURED:
        assert 0 < row.low <= row.middle <= row.high
        size = f"{row.size:,.0f}" if row.size else ""
        cells = (row.kind, row.chip or "any", size, f"{row.low:g}", f"{row.middle:g}", f"{row.high:g}", row.source)
        assert f"| {' | '.join(cells)} |" in text


def test_a_range_is_the_root_of_its_causes_squares_and_the_hosts_program_may_be_the_longer() -> None:
    seconds = {
        "low": {"products": 7.0, "ici": 4.0},
        "middle": {"products": 4.0, "ici": 0.0},
        "high": {"products": 3.5, "ici": 0.0},
    }
    found = estimate(seconds, V5P, 100.0, V5P.flops, {})
    assert (found.seconds, found.fastest, found.slowest) == (4.0, 3.5, 9.0)
    assert found.rates() == (100 / 9, 100 / 3.5)
    assert found.mfus() == (1 / 9, 1 / 3.5)
    traced = estimate(seconds, V5P, 100.0, V5P.flops, {}, traced_layers=200)
    assert (traced.seconds, traced.shares["trace"]) == (6.0, 2.0)
    assert (traced.fastest, traced.slowest) == (3.5, 9.0)
    assert overlap((1, 3), (3, 4))
    assert not overlap((1, 2), (3, 4))


def test_efficiencies_are_the_users_to_set() -> None:
    assert given_efficiencies() == {}
    assert given_efficiencies("gmm=0.9, ici=1, compiler=1.1") == {"gmm": 0.9, "ici": 1.0, "compiler": 1.1}


@pytest.mark.parametrize("text", ["gm=0.9", "gmm", "gmm=", "gmm=0", "gmm=1.1", "gmm=nan", "gmm=fast", "=1"])
def test_an_efficiency_that_cant_be_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"--efficiency"):
        given_efficiencies(text)


def test_the_time_of_a_real_compile_is_at_least_its_roofs(report, cost) -> None:  # type: ignore[no-untyped-def]
    found = report.estimate
    assert math.fsum(found.shares.values()) == pytest.approx(found.seconds)
    assert found.seconds >= max(report.roofline.compute, report.roofline.hbm, cost.product_cycles / V5P.clock)
    assert found.mfu == pytest.approx(1e9 / V5P.flops / found.seconds)
    assert found.tokens_per_second == pytest.approx(256 / found.seconds)
