"""A map of a value over layers and a run's steps, as SVG in an HTML page; a script shows what the pointer is on."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from shardwright.report.chart import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Point, figure, step_axis

SHADES = 16
ROWS = 12  # most rows of a map that are named
_COLUMNS = 120  # most columns of a map: of several steps it shows the highest value


def html_map(title: str, rows: Mapping[str, Sequence[Point]], span: tuple[float, float], low: float = 0.0) -> str:
    """A map of ``rows``, name → (step, value), over the steps of ``span``; ``low`` is white. Empty without a value.

    A value is taken to be that of the steps since the one before, as a log line's is.
    """
    x0, x1 = span[0], max(span[1], span[0] + 1)
    cells = {name: row for name, points in rows.items() if (row := _cells(points, x0, x1))}
    if not cells:  # as after the first log line, which has no steps before it
        return ""
    most = max(low + 1.0, *(value for row in cells.values() for _, _, value in row))
    shades = {
        name: [
            ((first - x0) / (x1 - x0), (last - x0) / (x1 - x0), (value - low) / (most - low))
            for first, last, value in row
        ]
        for name, row in cells.items()
    }
    lines = [(name, [(last, value) for _, last, value in row]) for name, row in cells.items()]
    plot = (LEFT, TOP, WIDTH - RIGHT, HEIGHT - BOTTOM)
    frame = {"x0": x0, "x1": x1, "y0": 0, "y1": 1, "plot": plot, "many": False, "map": True, "lines": lines}
    return figure(title, step_axis(x0, x1) + shaded(shades), frame, scale=(f"{low:.3g}", f"{most:.3g}"))


def shaded(rows: Mapping[str, Iterable[tuple[float, float, float]]]) -> str:
    """A map as SVG, its first row on top: (left edge, right edge, darkness) of each cell, as shares of the most."""
    width, height = WIDTH - RIGHT - LEFT, (HEIGHT - TOP - BOTTOM) / len(rows)
    parts, cells = list[str](), defaultdict(list)
    for number, (name, row) in enumerate(rows.items()):
        y = TOP + number * height
        for left, right, darkness in row:
            wide = (right - left) * width
            cell = f"M{LEFT + left * width:.1f} {y:.1f}h{wide:.1f}v{height:.1f}h-{wide:.1f}z"
            cells[round(SHADES * min(max(darkness, 0.0), 1.0))].append(cell)
        if number % -(-len(rows) // ROWS) == 0:
            label = escape(name.removeprefix("layer_"))
            parts.append(f'<text x="{LEFT - 6}" y="{y + height / 2 + 4:.1f}" text-anchor="end">{label}</text>')
    parts += [f'<path class="c0" opacity="{n / SHADES:.2f}" d="{"".join(of)}"/>' for n, of in sorted(cells.items())]
    return "".join(parts)


def _cells(points: Sequence[Point], x0: float, x1: float) -> list[tuple[float, float, float]]:
    """(step before, last step, value) of each cell of a row, by ascending step."""
    found: list[tuple[float, float, float]] = []
    least = (x1 - x0) / _COLUMNS
    before = x0
    for step, value in points:
        if found and found[-1][1] - found[-1][0] < least:
            found[-1] = (found[-1][0], step, max(found[-1][2], value))
        elif step > before:
            found.append((before, step, value))
        before = max(before, step)
    return found
