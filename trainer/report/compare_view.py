"""Several runs over one another, as one HTML page that loads nothing."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from shardwright.report.chart import Style, html_chart
from shardwright.report.expert_load import BUSIEST
from shardwright.report.html import render
from shardwright.report.pictures import heldout_keys, points_of

LAST_HEADER = ("run", "step", "training loss", "held-out loss", "lowest held-out", "tokens/s", "MFU", "goodput")
UNTOLD = "–"
# title → log key; each is a chart with a line for each run
_CHARTS = {
    "Learning rate": "learning_rate",
    "Gradient norm": "grad_norm",
    "Tokens a second": "tokens_per_second",
    "MFU": "mfu",
    "Busiest expert of all layers (load over the mean)": BUSIEST,
}
_FROM_ZERO = ("learning_rate", "grad_norm", "tokens_per_second", "mfu")


@dataclass(frozen=True)
class ComparedRun:
    """One of the runs.

    Args:
        name: of its own among them.
        log: lines, each with its `step`.
        options: name → value.
        link: of its own page; empty: there is none.
    """

    name: str
    log: Sequence[Mapping[str, Any]]
    options: Mapping[str, Any]
    link: str = ""

    def last(self, key: str, form: str) -> str:
        points = points_of(self.log, key)
        return form.format(points[-1][1]) if points else UNTOLD


def last_rows(runs: Sequence[ComparedRun]) -> list[tuple[str, ...]]:
    """Cells under :data:`LAST_HEADER`; speeds are medians without the first, which has the compile."""
    rows: list[tuple[str, ...]] = []
    for run in runs:
        held = points_of(run.log, next(iter(heldout_keys(run.log, "loss")), ""))
        best = min((point for point in held if not math.isnan(point[1])), key=lambda point: point[1], default=None)
        rates = [value for _, value in points_of(run.log, "tokens_per_second")][1:]
        rows.append(
            (
                run.name,
                f"{max((line['step'] for line in run.log), default=0):,}",
                run.last("loss", "{:.4f}"),
                f"{held[-1][1]:.4f}" if held else UNTOLD,
                UNTOLD if best is None else f"{best[1]:.4f} at step {best[0]:,}",
                f"{median(rates):,.0f}" if rates else UNTOLD,
                run.last("mfu", "{:.1%}"),
                run.last("goodput", "{:.1%}"),
            )
        )
    return rows


def differences(runs: Sequence[ComparedRun]) -> list[tuple[str, ...]]:
    """(option, its value in each run) where they differ; what a run does not tell is :data:`UNTOLD`."""
    names = dict.fromkeys(name for run in runs for name in run.options)
    rows = []
    for name in names:
        values = [run.options.get(name, UNTOLD) for run in runs]
        if any(value != values[0] for value in values):
            rows.append((name, *("none" if value is None else str(value) for value in values)))
    return rows


def compare_page(runs: Sequence[ComparedRun]) -> str:
    return render(
        "compare.html.j2",
        title=f"{len(runs)} runs, one over the other",
        runs=runs,
        charts=[*_charts(runs)],
        header=LAST_HEADER,
        last=last_rows(runs),
        options=differences(runs),
    )


def _charts(runs: Sequence[ComparedRun]) -> Iterator[str]:
    steps = [line["step"] for run in runs for line in run.log]
    span, names = (min(steps, default=0), max(steps, default=1)), tuple(run.name for run in runs)
    held = {key: what for run in runs for key, what in heldout_keys(run.log, "loss").items()}
    titles = {"Training loss (nats a token)": "loss"}
    titles |= {f"Held-out loss{what.removeprefix('held out')} (nats a token)": key for key, what in held.items()}
    for title, key in (titles | _CHARTS).items():
        floor = 0.0 if key in _FROM_ZERO else None
        style = Style(floor=floor, dots=names if key in held else (), span=span)
        yield html_chart(title, {run.name: points_of(run.log, key) for run in runs}, style)
