"""A chart of lines over a run's steps, as SVG in an HTML page; a script shows the values under the pointer.

Lines are thinned to what a person can see, by keeping the lowest and the highest value of each stretch of steps: all
points are real ones, and a spike is never lost.
"""

import itertools
import json
import math
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from markupsafe import Markup

from shardwright.report.html import PARTS, render

Point = tuple[float, float]  # (step, value)

# the drawing and its margins: narrow enough that a telephone shows its letters at nearly their size
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 440, 190, 54, 14, 10, 26
_FEW = PARTS  # most lines with a colour each; more of them share one, and the pointer finds the nearest
_POINTS = 6_000  # of all lines of a chart together


@dataclass(frozen=True)
class Style:
    """The look of a chart.

    Args:
        floor: the vertical axis reaches down to it.
        dots: names of lines that are drawn as their points alone, for between them nothing is known.
        dashed: names of lines that are levels to compare with.
        span: (first, last) step of the horizontal axis, so that charts side by side agree; None: those of the points.
    """

    floor: float | None = None
    dots: Collection[str] = ()
    dashed: Collection[str] = ()
    span: tuple[float, float] | None = None


PLAIN = Style()


def html_chart(title: str, lines: Mapping[str, Sequence[Point]], style: Style = PLAIN) -> str:
    """A chart of ``lines``, name → (step, value) by ascending step; empty if none has a finite value.

    A pointer shows their values.
    """
    if not (drawn := _thin_lines(lines)):
        return ""
    frame, drawing = _plot(drawn, style)
    return figure(title, drawing, {**frame, "many": len(drawn) > _FEW, "lines": [*drawn.items()]}, dots=style.dots)


def figure(
    title: str,
    drawing: str,
    frame: Mapping[str, Any],
    dots: Collection[str] = (),
    scale: tuple[str, str] | None = None,
) -> str:
    """A ``drawing`` under whose pointer a script shows the values of ``frame``; the legend's ``dots``, or ``scale``."""
    data = json.dumps(frame, separators=(",", ":"))
    shown: dict[str, Any] = {"title": title, "drawing": Markup(drawing), "data": data, "width": WIDTH, "height": HEIGHT}
    return render("chart.html.j2", dots=dots, scale=scale, **shown, **frame)


def svg_chart(title: str, lines: Mapping[str, Sequence[Point]], style: Style = PLAIN) -> str:
    """The same chart as SVG for a picture, with its title and legend above y = 0; empty if no value is finite."""
    if not (drawn := _thin_lines(lines)):
        return ""
    many = len(drawn) > _FEW
    parts, x = [f'<text class="title" x="{LEFT}" y="-28">{escape(title)}, by step</text>'], float(LEFT)
    for number, name in enumerate([f"{len(drawn)} lines"] if many else drawn):
        parts.append(f'<rect class="c{number}" x="{x:.0f}" y="-18" width="10" height="10"/>')
        parts.append(f'<text x="{x + 14:.0f}" y="-9">{escape(name)}</text>')
        x += 32 + 6.5 * len(name)
    return "".join(parts) + _plot(drawn, style)[1]


def _thin_lines(lines: Mapping[str, Sequence[Point]]) -> dict[str, list[Point]]:
    """The finite points of each line that has any, thinned."""
    finite = {name: [p for p in points if all(map(math.isfinite, p))] for name, points in lines.items()}
    return {name: thinned(points, max(_POINTS // len(lines), 20)) for name, points in finite.items() if points}


def _plot(drawn: Mapping[str, Sequence[Point]], style: Style) -> tuple[dict[str, Any], str]:
    """The ends of both axes and the plot's edges, by name; and the drawing as SVG."""
    steps, values = zip(*itertools.chain(*drawn.values()), strict=True)
    x0, x1 = style.span or (min(steps), max(steps))
    x1 = max(x1, x0 + 1)
    floor = style.floor
    ticks = round_ticks(min(values) if floor is None else min(floor, *values), max(values))
    y0, y1 = ticks[0], ticks[-1]
    plot = (LEFT, TOP, WIDTH - RIGHT, HEIGHT - BOTTOM)
    left, top, right, bottom = plot

    def x(step: float) -> float:
        return left + (step - x0) / (x1 - x0) * (right - left)

    def y(value: float) -> float:
        return bottom - (value - y0) / (y1 - y0) * (bottom - top)

    parts = []
    for tick in ticks:
        parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        parts.append(f'<text x="{left - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{_number(tick)}</text>')
    parts.append(step_axis(x0, x1))
    many = len(drawn) > _FEW
    for number, (name, points) in enumerate(drawn.items()):
        color = "c0" if many else f"c{number}"
        places = [(f"{x(step):.1f}", f"{y(value):.1f}") for step, value in points]
        alone = name in style.dots or len(points) == 1
        if name not in style.dashed and (alone or (len(places) < 40 and not many)):  # few enough to see each
            radius = 3.5 if alone else 2
            parts += [f'<circle class="{color}" cx="{c}" cy="{d}" r="{radius}"/>' for c, d in places]
        if not alone:
            kind = "many line" if many else "level line" if name in style.dashed else "line"
            text = " ".join(map(",".join, places))
            parts.append(f'<polyline class="{kind}" stroke="var(--{color})" points="{text}"/>')
    return {"x0": x0, "x1": x1, "y0": y0, "y1": y1, "plot": plot}, "".join(parts)


def step_axis(x0: float, x1: float) -> str:
    """The numbers below a plot whose horizontal axis goes from ``x0`` to ``x1``, as SVG."""
    parts = []
    for tick in round_ticks(x0, x1):
        if x0 <= tick <= x1 and tick == int(tick):
            across = LEFT + (tick - x0) / (x1 - x0) * (WIDTH - RIGHT - LEFT)
            parts.append(f'<text x="{across:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{_number(tick)}</text>')
    return "".join(parts)


def thinned(points: Sequence[Point], most: int) -> list[Point]:
    """At most ``most`` of the points, by ascending step: the lowest and highest of each stretch, and both ends."""
    if len(points) <= most:
        return list(points)
    first, last = points[0][0], points[-1][0]
    stretches = max(most // 2 - 2, 1)
    kept = [points[0]]
    value = operator.itemgetter(1)
    for _, some in itertools.groupby(points[1:-1], lambda p: int((p[0] - first) / max(last - first, 1) * stretches)):
        stretch = list(some)
        kept += sorted({min(stretch, key=value), max(stretch, key=value)})
    return [*kept, points[-1]]


def round_ticks(low: float, high: float) -> list[float]:
    """Three to eight equidistant round numbers, the first at most ``low`` and the last at least ``high``."""
    span = high - low or abs(high) or 1.0
    unit = 10.0 ** math.floor(math.log10(span / 4))
    step = unit * next(factor for factor in (1, 2, 5, 10) if span / 4 <= factor * unit)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [number * step for number in range(first, max(last, first + 1) + 1)]


def _number(value: float) -> str:
    if value and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.2g}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:.6g}"
