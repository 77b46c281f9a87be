"""The collectives that a device waits in at once, counted in programs."""

from __future__ import annotations

import pytest

from shardwright.compile.hlo.text import parse
from shardwright.xla.virtual_devices import AT_ONCE
from tests.support.waiting import width

# a loop with two collectives, of which neither needs the other, and one around it
LOOPS = """HloModule step, is_scheduled=true

%condition (p: (f32[8])) -> pred[] {
  %p = (f32[8]) parameter(0)
  ROOT %true = pred[] constant(true)
}

%inner (p.1: (f32[8])) -> (f32[8]) {
  %p.1 = (f32[8]) parameter(0)
  %x = f32[8] get-tuple-element(%p.1), index=0
  %first = f32[8] all-reduce(%x), to_apply=%sum
  %second = f32[8] all-gather(%x), dimensions={0}
  ROOT %out = (f32[8]) tuple(%first)
}

%outer (p.2: (f32[8])) -> (f32[8]) {
  %p.2 = (f32[8]) parameter(0)
  ROOT %within = (f32[8]) while(%p.2), condition=%condition, body=%inner
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8] parameter(0)
  %packed = (f32[8]) tuple(%a)
"""
LOOP = "  %loop.{n} = (f32[8]) while(%packed), condition=%condition, body=%{body}\n"
ALONE = "  %alone.{n} = f32[8] all-reduce(%a), to_apply=%sum\n"


def program(*lines: str) -> str:
    return LOOPS + "".join(line.format(n=n, body="inner") for n, line in enumerate(lines)) + "}\n"


@pytest.mark.parametrize(
    ("lines", "at_once"),
    [
        ((), 0),
        ((ALONE,) * 5, 1),  # each is started when the one before it has ended
        ((LOOP,), 1),
        ((LOOP.replace("{body}", "outer"),), 1),
        ((LOOP, ALONE), 2),  # the loop goes on beside what follows it
        ((ALONE, LOOP), 1),
        ((LOOP, ALONE, ALONE), 2),
        ((LOOP, ALONE, LOOP), 2),  # the second loop begins when the collective has ended
        ((LOOP, LOOP, ALONE), 3),
    ],
)
def test_collectives_wait_at_once_where_loops_go_on_beside_them(lines: tuple[str, ...], at_once: int) -> None:
    assert width(parse(program(*lines))) == at_once


def test_a_collective_that_needs_a_loops_result_does_not_wait_beside_it() -> None:
    result = "  %result = f32[8] get-tuple-element(%loop.0), index=0\n"
    assert width(parse(program(LOOP, result, ALONE.replace("%a)", "%result)")))) == 1


def test_a_program_of_more_loops_than_devices_have_threads_for_is_told() -> None:
    assert width(parse(program(*[LOOP] * AT_ONCE))) == AT_ONCE
    assert width(parse(program(*[LOOP] * AT_ONCE, ALONE))) > AT_ONCE
