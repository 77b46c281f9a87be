"""Pictures of a run as SVG files: its loss, and the load of its experts."""

import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from markupsafe import Markup

from shardwright.report.chart import HEIGHT, LEFT, WIDTH, Point, Style, svg_chart
from shardwright.report.expert_load import BUSIEST, ExpertLoad, labelled
from shardwright.report.heat_map import shaded
from shardwright.report.html import THEME, render
from shardwright.report.set_names import set_names

LOSS, BUSIEST_TITLE = "Loss (nats a token)", "Busiest expert of each layer (load over the mean)"
UNIGRAM = "unigram model"


def heldout_keys(log_history: Sequence[Mapping[str, Any]], what: str) -> dict[str, str]:
    """Log key of ``what`` (loss, accuracy) → words for a person, for each held-out set, in order."""
    names = {f"eval_{name}{what}": name.strip("_") for entry in log_history for name in set_names(entry)}
    given = {key for entry in log_history for key in entry}
    return {key: f"held out: {name}" if name else "held out" for key, name in names.items() if key in given}


def points_of(log: Sequence[Mapping[str, Any]], key: str) -> list[Point]:
    """(step, value) of the log lines that have a number under ``key``."""
    return [(line["step"], line[key]) for line in log if type(line.get(key)) in (int, float)]


def loss_lines(log: Sequence[Mapping[str, Any]], unigram: float | None) -> tuple[dict[str, list[Point]], Style]:
    """Name → points of the training and held-out losses, and how they are drawn.

    The loss of a unigram model on the same held-out tokens is a level among them while they are near it: far above
    all of them, as in fine-tuning, it would only press them together.
    """
    held = heldout_keys(log, "loss")
    lines = {name: points_of(log, key) for key, name in {"loss": "training", **held}.items()}
    found = [(step, value) for points in lines.values() for step, value in points if math.isfinite(value)]
    if unigram is not None and found:
        (first, *_, last), values = sorted(step for step, _ in [*found, *found]), [value for _, value in found]
        near = (max(values) - min(values)) / 2
        if min(values) - near <= unigram <= max(values) + near:
            lines[UNIGRAM] = [(first, unigram), (last, unigram)]
    return lines, Style(dots=tuple(held.values()), dashed=(UNIGRAM,))


def loss_curve(log: Sequence[Mapping[str, Any]], unigram: float | None) -> bytes:
    return svg_file([svg_chart(LOSS, *loss_lines(log, unigram))])


def load_picture(loads: Sequence[ExpertLoad], log: Sequence[Mapping[str, Any]]) -> bytes:
    """A map of the loads, layers × experts, above a chart of each layer's busiest expert."""
    by_label = labelled(loads)
    lines = {label: points_of(log, f"{BUSIEST}/{label}") for label in by_label}
    return svg_file([_map(by_label), svg_chart(BUSIEST_TITLE, lines, Style(floor=1.0))])


def _map(loads: Mapping[str, ExpertLoad]) -> str:
    """A map of each expert's load, the darker the higher."""
    most = max(2.0, *(max(load.over_mean) for load in loads.values()))
    count = max(len(load.shares) for load in loads.values())
    rows = {
        label: [(n / count, (n + 1) / count, value / most) for n, value in enumerate(load.over_mean)]
        for label, load in loads.items()
    }
    title = f"Load over the mean: layers down, experts across; darkest: {most:.3g}"
    return f'<text class="title" x="{LEFT}" y="-28">{escape(title)}</text>{shaded(rows)}'


def svg_file(panels: Sequence[str]) -> bytes:
    """An SVG file of panels of a chart's size, one below the other."""
    shown = [Markup(panel) for panel in panels if panel]
    text = render("picture.svg.j2", panels=shown, width=WIDTH, height=HEIGHT + 50)
    # picture viewers don't know CSS variables
    return re.sub(r"var\(--(\w+)\)", lambda name: THEME[name[1]][0], text).encode()
