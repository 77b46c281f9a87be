"""How often loops run, in real compiles and in each form that a condition takes."""

from __future__ import annotations

from shardwright.compile.hlo.text import parse
from shardwright.compile.hlo.trip_counts import trip_count
from tests.support.captured import captured, counted


def trips(hlo: str) -> dict[str, int | None]:
    """The trip count of every loop in a module."""
    return {
        loop.name: trip_count(loop)
        for computation in parse(hlo).module.values()
        for loop in computation.instructions
        if loop.opcode == "while"
    }


def loop(condition: str, annotation: str = "") -> str:
    """A module of one loop, whose condition ends in these lines; its counter has two halves, %l and %h."""
    return f"""HloModule loop
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


def test_loops_run_as_often_as_their_counters_say() -> None:
    assert trips(captured("optimised.hlo")) == {"while.6": 3, "while.7": 3}
    # windowed einsums over 4 positions, unrolled by two: the counter goes to 4 in steps of 2
    assert trips(captured("optimised_large.hlo")) == {
        "while.15": 3,
        "while.17": 3,
        "while.18": 2,
        "while.19": 2,
        "while.20": 2,
    }


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


def test_an_annotated_trip_count_wins_and_one_that_depends_on_data_is_said_to_be_assumed() -> None:
    unreadable = "  ROOT %below = pred[] compare(%l, %h), direction=LT"
    assert trips(loop(unreadable)) == {"loop": None}
    assert counted(loop(unreadable), {"data": 1}, layers=7).loops == {"loop": 7}
    annotated = ', backend_config={"known_trip_count":{"n":"5"}}'
    assert trips(loop(unreadable, annotated)) == {"loop": 5}
