"""Charts: what is drawn is what was logged, however much that is."""

from __future__ import annotations

import json
import math
from html import unescape

from hypothesis import given
from hypothesis import strategies as st

from shardwright.report.chart import Style, html_chart, round_ticks, thinned
from shardwright.report.heat_map import html_map
from shardwright.report.pictures import UNIGRAM, loss_lines


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


def test_between_points_of_which_nothing_is_known_no_line_is_drawn():
    lines = {"training": [(1, 2.0), (2, 1.0)], "held out": [(0, 3.0), (2, 1.5)]}
    chart = html_chart("Loss", lines, Style(dots=("held out",)))
    assert chart.count("<polyline") == 1
    assert chart.count('<circle class="c1"') == 2


def test_charts_of_one_span_have_the_same_horizontal_axis():
    charts = [html_chart("", {"a": points}, Style(span=(0, 10))) for points in ([(2, 1.0), (4, 2.0)], [(0, 5.0)])]
    assert [(data_of(chart)["x0"], data_of(chart)["x1"]) for chart in charts] == [(0, 10), (0, 10)]


def test_a_baseline_is_shown_while_the_losses_are_near_it():
    far, near = (
        [{"step": step, "loss": 1.5 - step / 10, "eval_loss": 1.4} for step in (1, 2)],
        [{"step": 1, "loss": 7.0}],
    )
    assert UNIGRAM not in loss_lines(far, 6.3)[0]
    lines, style = loss_lines([*near, {"step": 9, "eval_loss": 6.0}], 6.3)
    assert lines[UNIGRAM] == [(1, 6.3), (9, 6.3)]
    assert (style.dots, style.dashed) == (("held out",), (UNIGRAM,))


def test_a_map_has_a_cell_up_to_each_step_and_keeps_the_highest_of_many():
    shown = data_of(html_map("Load", {"layer_0": [(2, 1.0), (4, 3.0)], "layer_1": []}, span=(0, 4), low=1.0))
    assert shown["lines"] == [["layer_0", [[2, 1.0], [4, 3.0]]]]
    many = [(step, 9.0 if step == 61_803 else 1.0) for step in range(1, 100_001)]
    ((_, cells),) = data_of(html_map("Load", {"layer_0": many}, span=(0, 100_000)))["lines"]
    assert len(cells) <= 121
    assert max(value for _, value in cells) == 9.0
    assert cells[-1][0] == 100_000
    assert html_map("Load", {}, span=(0, 4)) == html_map("Load", {"layer_0": [(1, 2.0)]}, span=(1, 1)) == ""
