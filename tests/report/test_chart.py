"""Charts: what is drawn is what was logged, however much that is."""

from __future__ import annotations

import json
import math
from html import unescape

from hypothesis import given
from hypothesis import strategies as st

from shardwright.report.chart import html_chart, round_ticks, thinned


def data_of(chart: str) -> dict:
    return json.loads(unescape(chart.split('data-chart="')[1].split('"')[0]))


def test_a_hundred_thousand_points_keep_their_spikes_and_their_ends_and_all_are_real():
    points = [(step, 2 + math.sin(step)) for step in range(100_000)]
    points[61_803] = (61_803, 50.0)
    kept = thinned(points, 1000)
    assert len(kept) <= 1000
    assert set(kept) <= set(points)
    assert kept == sorted(kept)
    assert {points[0], points[61_803], points[-1]} <= set(kept)


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_are_few_and_enclose_the_values(low, span):
    ticks = round_ticks(low, low + span)
    assert 2 <= len(ticks) <= 8
    assert ticks[0] <= low + 1e-9 * (abs(low) + span)
    assert ticks[-1] >= low + span - 1e-9 * (abs(low) + span)


def test_values_that_are_not_finite_are_left_out_and_a_chart_of_nothing_is_empty():
    chart = html_chart("Loss", {"a": [(1, 2.0), (2, math.nan), (3, math.inf), (4, 3.0)], "b": []})
    assert data_of(chart)["lines"] == [["a", [[1, 2.0], [4, 3.0]]]]
    assert html_chart("Loss", {"a": [(1, math.nan)]}) == html_chart("Loss", {}) == ""


def test_names_are_escaped_and_many_lines_share_a_colour():
    chart = html_chart("<b>", {f"<i>{n}": [(1, n), (2, n)] for n in range(40)})
    assert "<b>" not in chart
    assert "<i>" not in chart
    assert data_of(chart)["many"]
    assert "40 lines" in chart
