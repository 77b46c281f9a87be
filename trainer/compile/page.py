"""A CompileReport for people: one HTML file that needs nothing else, or tables on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from trainer.compile.report import CompileReport
from trainer.compile.summary import (
    ESTIMATE,
    MODULE_HEADER,
    ROOFS,
    ROWS,
    TRIED_HEADER,
    by_axis,
    fact_rows,
    flag,
    memory_parts,
    module_rows,
    verdict,
    what_for,
    where_it_runs,
)
from trainer.report.html import HEAD, STYLE, html_bars, html_table
from trainer.report.units import size


def write_page(report: CompileReport, path: Path, title: str = "", tried: Sequence[Sequence[str]] = ()) -> None:
    """The report as one HTML file without external resources, for light and dark screens."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(report, title, tried), encoding="utf-8")


def page(report: CompileReport, title: str = "", tried: Sequence[Sequence[str]] = ()) -> str:
    """The report as HTML text.

    Args:
        title: what was compiled, ``mixtral_ep, Mixtral-8x7B, 4 × 4096 tokens a chip``.
        tried: what a search compiled beside it, rows of :data:`TRIED_HEADER`.
    """
    name = escape(title or "Compile report")
    unplanned = [flag(line) for line in report.unplanned]
    body = [
        f"<h1>{name}</h1>",
        f'<p class="verdict {"good" if report.fits else "bad"}">{escape(verdict(report))}</p>',
        f"<p>{escape(where_it_runs(report))}. {escape(ESTIMATE)}</p>",
        "<h2>HBM of a chip</h2>",
        _stack(report),
        html_table(("", ""), fact_rows(report)),
        *(["<h2>What else was tried</h2>", html_table(TRIED_HEADER, tried)] if tried else []),
        "<h2>Roofline (estimate)</h2>",
        html_bars([(f"{ROOFS[n]}", s, f"{s:,.4f} s") for n, s in report.roofline.times.items()]),
        f"<p>At least {report.roofline.seconds:,.3f} s a step, bound by {report.roofline.bound}.</p>",
        "<h2>Where the time goes (estimate; kernels have no cycles)</h2>",
        html_table(MODULE_HEADER, module_rows(report), numbers=3),
        "<h2>Sent by a chip in a step, by mesh axis</h2>",
        html_bars([(axis, n, size(n)) for axis, n in by_axis(report)]),
        "<h2>Collectives</h2>",
        *(f'<p class="flag">unplanned: {escape(text)}</p>' for text in unplanned),
        _collectives(report),
        "<h2>Largest buffers</h2>",
        html_table(
            ("bytes", "of HBM", "shape", "whose", "compiler's name"),
            [
                (size(b.bytes), f"{b.bytes / report.chip_hbm_bytes:.1%}", b.shape, b.module, b.name)
                for b in report.largest_buffers
            ],
            numbers=2,
        ),
    ]
    if report.error:
        body += [
            "<h2>What the compiler said</h2>",
            f"<pre>{escape(report.error.split('  Largest program')[0].strip())}</pre>",
        ]
    head = HEAD.format(title=name, style=STYLE)
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(body)}</body></html>\n'


def _stack(report: CompileReport) -> str:
    """A bar of what is required, with a mark at the chip's HBM."""
    whole = max(report.required_bytes, report.chip_hbm_bytes)
    left, rects, legend = 0.0, [], []
    for number, (name, part) in enumerate(memory_parts(report)):
        width = 100 * part / whole
        label = escape(f"{name}: {size(part)}")
        place = f'x="{left:.3f}%" y="6" width="{width:.3f}%" height="32"'
        rects.append(f'<rect class="c{number}" {place}><title>{label}</title></rect>')
        if part:
            legend.append(f'<span><i class="k{number}"></i>{label}</span>')
        left += width
    limit = 100 * report.chip_hbm_bytes / whole
    mark = f'<rect class="limit" x="{min(limit, 99.8):.3f}%" y="0" width="2" height="44"/>'
    frame = '<rect class="frame" x="0" y="6" width="100%" height="32"/>'
    svg = f'<svg role="img" aria-label="HBM" width="100%" height="44">{frame}{"".join(rects)}{mark}</svg>'
    note = f"<span>│ {escape(size(report.chip_hbm_bytes))} that a program can use</span>"
    return f'{svg}<p class="legend">{"".join(legend)}{note}</p>'


def _collectives(report: CompileReport) -> str:
    rows = [
        (
            f"{x.count:,.0f}",
            *(size(n) for n in (x.bytes, x.wire_bytes, x.exposed_bytes)),
            *(x.kind, x.axis, what_for(x), x.shape),
        )
        for x in report.collectives[:ROWS]
    ]
    rest = len(report.collectives) - len(rows)
    more = f"<p>{rest} smaller ones are in the JSON.</p>" if rest > 0 else ""
    return html_table(("a step", "bytes", "sent", "exposed", "kind", "axis", "for", "shape"), rows, numbers=4) + more
