"""Pieces of an HTML page that is one file, loads nothing, and suits light and dark screens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from shardwright.report.units import size

# CSS variable → colour; c0, c1, … are a chart's parts in order
LIGHT = {
    "ink": "#1d2126",
    "paper": "#fdfdfc",
    "line": "#d5d9de",
    "good": "#1a7f4b",
    "bad": "#b3261e",
    "flag": "#8a5a00",
}
_DARK = {
    "ink": "#e6e8ea",
    "paper": "#16191d",
    "line": "#3a4048",
    "good": "#5fd38d",
    "bad": "#ff8a80",
    "flag": "#f2c14e",
}
_PARTS = ("#3b6fb6", "#e08a2e", "#6aa84f", "#8e8e93", "#a05195", "#c9485b", "#5b8c8c", "#b59a2d")
_DARK_PARTS = ("#6f9fe0", "#f0a75a", "#8cc974", "#a0a0a6", "#c382b8", "#e57f8d", "#86b8b8", "#d8c066")
COLORS = len(_PARTS)
LIGHT |= {f"c{number}": color for number, color in enumerate(_PARTS)}
_DARK |= {f"c{number}": color for number, color in enumerate(_DARK_PARTS)}
PART_STYLE = "".join(f".c{n} {{ fill: var(--c{n}); }} .k{n} {{ background: var(--c{n}); }}\n" for n in range(COLORS))


def _variables(colors: Mapping[str, str]) -> str:
    return "".join(f"--{name}: {color}; " for name, color in colors.items())


STYLE = (
    """
:root { color-scheme: light dark; LIGHT}
@media (prefers-color-scheme: dark) { :root { DARK} }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.3rem; }
h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
.verdict { font-size: 1.5rem; font-weight: 600; margin: .2rem 0; }
.good { color: var(--good); }
.bad { color: var(--bad); }
.flag { color: var(--flag); margin: .2rem 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: left; font-weight: normal; padding: .2rem .8rem .2rem 0; vertical-align: top;
  border-bottom: 1px solid var(--line); overflow-wrap: anywhere; }
.wide tr:first-child > th { font-weight: 600; }
th.n, td.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
td.bar { width: 55%; }
.legend span { margin-right: 1.2rem; white-space: nowrap; }
.legend i { display: inline-block; width: .8rem; height: .8rem; margin-right: .3rem; }
.limit { fill: var(--ink); }
.frame { fill: none; stroke: var(--line); }
pre { overflow-x: auto; font-size: .85rem; }
""".replace("LIGHT", _variables(LIGHT)).replace("DARK", _variables(_DARK))
    + PART_STYLE
)


def html_page(
    title: str, body: Iterable[str], style: str = "", script: str = "", reload_seconds: int | None = None
) -> str:
    """The whole file.

    Args:
        title: plain text; it is escaped here.
        body: pieces of HTML, in order.
        style, script: further CSS, and JavaScript that runs after the body.
        reload_seconds: interval at which a browser reloads the page.
    """
    reload = "" if reload_seconds is None else f'<meta http-equiv="refresh" content="{reload_seconds}">'
    body = [*body, f"<script>{script}</script>"] if script else body
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"{reload}<title>{escape(title)}</title><style>{STYLE}{style}</style>"
    )
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(body)}</body></html>\n'


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]], numbers: int = 0) -> str:
    """A table of plain texts, the first ``numbers`` columns right-aligned; an all-empty header is left out."""

    def cells(row: Sequence[str], tag: str) -> str:
        kind = (' class="n"' if number < numbers else "" for number in range(len(row)))
        return "".join(f"<{tag}{c}>{escape(cell)}</{tag}>" for cell, c in zip(row, kind, strict=True))

    lines = [f"<tr>{cells(row, 'td')}</tr>" for row in rows]
    if any(header):
        lines.insert(0, f"<tr>{cells(header, 'th')}</tr>")
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'


def html_bars(rows: Sequence[tuple[str, float, str]]) -> str:
    """A chart of horizontal bars (name, value, the value as text), the longest as wide as its column."""
    longest = max((value for _, value, _ in rows), default=0) or 1
    cells = "".join(
        f'<tr><th>{escape(name)}</th><td class="bar"><svg width="100%" height="14">'
        f'<rect class="c0" width="{100 * value / longest:.2f}%" height="14"/></svg></td>'
        f'<td class="n">{escape(text)}</td></tr>'
        for name, value, text in rows
    )
    return f"<table>{cells}</table>" if rows else "<p>None.</p>"


def html_stacked_bar(label: str, parts: Sequence[tuple[str, float, str]]) -> str:
    """One bar of parts that make a whole, which ``label`` names for screen readers, with a legend.

    ``parts``: (name, value, the value as text), from left to right; at most ``COLORS``.
    """
    whole = sum(value for _, value, _ in parts) or 1.0
    left, rects, legend = 0.0, [], []
    for number, (name, value, text) in enumerate(parts):
        width, said = 100 * value / whole, escape(f"{name}: {text}")
        place = f'x="{left:.3f}%" y="0" width="{width:.3f}%" height="32"'
        rects.append(f'<rect class="c{number}" {place}><title>{said}</title></rect>')
        legend.append(f'<span><i class="k{number}"></i>{said}</span>')
        left += width
    svg = f'<svg role="img" aria-label="{escape(label)}" width="100%" height="32">{"".join(rects)}</svg>'
    return f'{svg}<p class="legend">{"".join(legend)}</p>'


def html_memory_bar(parts: Sequence[tuple[str, int]], limit: int) -> str:
    """One bar of a chip's HBM, with a mark at the ``limit`` that a program can use, and a legend.

    ``parts``: (name, bytes), from left to right; at most ``COLORS``.
    """
    whole = max(sum(part for _, part in parts), limit)
    left, rects, legend = 0.0, [], []
    for number, (name, part) in enumerate(parts):
        width = 100 * part / whole
        label = escape(f"{name}: {size(part)}")
        place = f'x="{left:.3f}%" y="6" width="{width:.3f}%" height="32"'
        rects.append(f'<rect class="c{number}" {place}><title>{label}</title></rect>')
        if part:
            legend.append(f'<span><i class="k{number}"></i>{label}</span>')
        left += width
    mark = f'<rect class="limit" x="{min(100 * limit / whole, 99.8):.3f}%" y="0" width="2" height="44"/>'
    frame = '<rect class="frame" x="0" y="6" width="100%" height="32"/>'
    svg = f'<svg role="img" aria-label="HBM" width="100%" height="44">{frame}{"".join(rects)}{mark}</svg>'
    note = f"<span>│ {escape(size(limit))} that a program can use</span>"
    return f'{svg}<p class="legend">{"".join(legend)}{note}</p>'
