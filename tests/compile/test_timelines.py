"""The pictures of a schedule: all of a step's time is in them, where it was spent, and the HBM of each moment."""

from __future__ import annotations

import json
import re

import pytest

from shardwright.compile.hlo.buffers import held_over_time
from shardwright.compile.hlo.timeline import CHIP, Run
from shardwright.compile.report.compile_page import page
from shardwright.compile.report.report import CompileReport, Expected, make_report
from shardwright.compile.report.timelines import COLUMNS, Timeline, timelines_of
from shardwright.xla.chips import find_topology
from tests.support.captured import captured, captured_step
from tests.support.paths import CAPTURED


@pytest.fixture(scope="module")
def drawn() -> CompileReport:
    """The report of the small step, with the HBM over its time."""
    result = {**json.loads((CAPTURED / "result.json").read_text()), "wall_seconds": 8.0}
    buffers = f"{captured('buffers.txt')}\n{captured('over_time.txt')}"
    expected = Expected(tokens=8 * 256)
    return make_report(
        captured_step(), find_topology("v5p:2x2x2"), result, captured("optimised.hlo"), buffers, expected
    )


def columns(timeline: Timeline, lane: str) -> list[str]:
    """The cause in each column, empty where there is none."""
    found = [""] * COLUMNS
    for each in timeline.lanes[lane]:
        assert not any(found[each.first : each.last + 1])
        found[each.first : each.last + 1] = [each.cause] * (each.last - each.first + 1)
    return found


def test_a_chip_always_does_something_and_the_lanes_add_up_to_the_estimate(drawn: CompileReport) -> None:
    whole, *loops = drawn.timelines
    shown = columns(whole, CHIP)
    assert "" not in shown
    assert whole.seconds == pytest.approx(drawn.estimate.seconds)
    for cause, seconds in drawn.estimate.shares.items():
        assert shown.count(cause) / COLUMNS == pytest.approx(seconds / drawn.estimate.seconds, abs=0.05), cause
    assert [loop.times for loop in loops] == [3, 3]  # its layers, forward and backward
    assert ["transpose" in loop.loop for loop in loops] == [False, True]
    assert sum(loop.times * loop.seconds for loop in loops) < whole.seconds


def test_links_send_while_the_chip_waits_for_them(drawn: CompileReport) -> None:
    for timeline in drawn.timelines:
        sent = columns(timeline, "ici")
        waiting = [number for number, cause in enumerate(columns(timeline, CHIP)) if cause == "ici"]
        assert waiting
        # a column in which each takes about half may be another cause's in one of the lanes
        assert sum(not any(sent[max(n - 1, 0) : n + 2]) for n in waiting) <= 0.02 * len(waiting)


def test_the_hbm_over_time_is_fullest_where_the_assignment_says(drawn: CompileReport) -> None:
    held = held_over_time(captured("over_time.txt"))
    assert max(drawn.timelines[0].held) == max(held.values())
    assert len(drawn.timelines[0].held) == COLUMNS
    gaps = drawn.temp_bytes - max(held.values())
    assert 0 <= gaps < 128 * 2**14, "of this small step most: tables of pointers, each at a multiple of 16 KiB"
    assert all(max(loop.held) <= max(held.values()) for loop in drawn.timelines[1:])


def test_a_loop_shorter_than_a_column_is_its_causes_alone_and_no_time_is_lost() -> None:
    inner, run = Run(), Run()
    inner.add("products", 3e-6, "small")
    inner.add("rest", 1e-6, "smaller")
    run.add("products", 1.0, "large")
    run.add_all(inner, 250_000, "many")
    (whole, loop) = timelines_of(run, {})
    assert columns(whole, CHIP).count("rest") == pytest.approx(COLUMNS / 8, abs=1)
    assert (loop.times, loop.seconds) == (250_000, pytest.approx(4e-6))
    assert columns(loop, CHIP).count("rest") == COLUMNS / 4
    assert timelines_of(Run(), {}) == ()


def test_the_page_draws_them_and_the_json_has_none(drawn: CompileReport, report: CompileReport) -> None:
    text = page(drawn)
    assert text.count('<figure class="timeline">') == 3
    assert len(re.findall('<path class="held"', text)) == 3
    assert "One of the 3 runs of" in text
    assert 'aria-label="roofline"' in text
    assert "timelines" not in drawn.as_json()
    assert "of gaps between temporaries" in text
    assert '<path class="held"' not in page(report)  # of a compile that told nothing of it
