"""HTML pages, from the templates beside this file: each is one file, loads nothing, and suits dark screens."""

import functools
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from shardwright.report.escapes import escaped
from shardwright.report.units import size

# CSS variable → its colour on a light and on a dark screen; c0, c1, … are a chart's parts in order
THEME = {
    "ink": ("#1d2126", "#e6e8ea"),
    "paper": ("#fdfdfc", "#16191d"),
    "line": ("#d5d9de", "#3a4048"),
    "good": ("#1a7f4b", "#5fd38d"),
    "bad": ("#b3261e", "#ff8a80"),
    "flag": ("#8a5a00", "#f2c14e"),
    "c0": ("#3b6fb6", "#6f9fe0"),
    "c1": ("#e08a2e", "#f0a75a"),
    "c2": ("#6aa84f", "#8cc974"),
    "c3": ("#8e8e93", "#a0a0a6"),
    "c4": ("#a05195", "#c382b8"),
    "c5": ("#c9485b", "#e57f8d"),
    "c6": ("#5b8c8c", "#86b8b8"),
    "c7": ("#b59a2d", "#d8c066"),
}
PARTS = 8  # colours of a chart
_HERE = Path(__file__).parent


def render(name: str, folder: Path | None = None, **values: Any) -> Markup:
    """A template of ``folder``, or beside this file, filled with ``values``; plain texts among them are escaped."""
    return Markup(_environment(folder or _HERE).get_template(name).render(theme=THEME, parts=PARTS, **values))


@functools.cache
def _environment(folder: Path) -> Environment:
    made = Environment(
        loader=FileSystemLoader([folder, _HERE]),
        autoescape=True,
        finalize=lambda value: escaped(value) if type(value) is str else value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters["size"] = size
    return made
