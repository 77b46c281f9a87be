"""A compile report as one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from shardwright.compile.report import summary
from shardwright.compile.report.report import CompileReport, GraphMemory
from shardwright.report.html import html_bars, html_memory_bar, html_page, html_stacked_bar, html_table
from shardwright.report.units import size
from shardwright.step.auto_remat import VALUES_HEADER, value_rows


def write_page(report: CompileReport, path: Path, title: str = "", tried: Sequence[Sequence[str]] = ()) -> None:
    """Writes :func:`page` to a file; makes its folder if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(report, title, tried), encoding="utf-8")


def page(report: CompileReport, title: str = "", tried: Sequence[Sequence[str]] = ()) -> str:
    """The report as HTML.

    Args:
        title: names the job, ``mixtral_ep, Mixtral-8x7B, 4 × 4096 tokens a chip``.
        tried: rows under `summary.TRIED_HEADER`, one for each neighbour that a search compiled.
    """
    title = title or "Compile report"
    roof, largest = report.roofline, report.largest_graph
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="verdict {"good" if report.fits else "bad"}">{escape(summary.verdict(report))}</p>',
        f"<p>{escape(summary.where_it_runs(report))}. {escape(summary.ESTIMATE)}</p>",
        "<h2>The graphs of a run</h2>",
        html_table(summary.GRAPH_HEADER, summary.graph_rows(report)),
        "<h2>HBM of a chip: the train step</h2>",
        html_memory_bar(summary.memory_parts(report), report.chip_hbm_bytes),
        html_table(("", ""), summary.fact_rows(report)),
        *([html_table(VALUES_HEADER, value_rows(report.values))] if report.values else []),
        *(["<h2>What else was tried</h2>", html_table(summary.TRIED_HEADER, tried)] if tried else []),
        *_estimate(report),
        "<h2>Roofline (estimate)</h2>",
        html_bars([(summary.ROOFS[name], seconds, f"{seconds:,.4f} s") for name, seconds in roof.times.items()]),
        f"<p>At least {roof.seconds:,.3f} s a step, bound by {roof.bound}.</p>",
        "<h2>Where the time goes (estimate; kernels have no cycles)</h2>",
        html_table(summary.MODULE_HEADER, summary.module_rows(report), numbers=3),
        "<h2>Sent by a chip in a step, by mesh axis</h2>",
        html_bars([(axis, sent, size(sent)) for axis, sent in summary.by_axis(report)]),
        "<h2>Collectives</h2>",
        *(f'<p class="flag">unplanned: {escape(summary.flag(line))}</p>' for line in report.unplanned),
        _collectives(report),
        f"<h2>Largest buffers: the {escape(largest.graph)}</h2>",
        _largest_buffers(largest, report.chip_hbm_bytes),
    ]
    if largest.error:
        # the buffers that the rest of the message lists are in the table above
        said = largest.error.split("  Largest program")[0].strip()
        body += ["<h2>What the compiler said</h2>", f"<pre>{escape(said)}</pre>"]
    return html_page(title, body)


def _estimate(report: CompileReport) -> list[str]:
    """The estimated step as one bar of its causes, and the efficiencies behind it."""
    line = summary.estimate_line(report)
    if not line:
        return []
    whole = report.estimate.seconds
    parts = [(cause, s, f"{s:,.3f} s ({s / whole:.1%})") for cause, s in summary.share_rows(report)]
    return [
        "<h2>The step's time (estimate)</h2>",
        f"<p><b>{escape(line)}.</b> {escape(summary.HOW_ESTIMATED)}</p>",
        html_stacked_bar("the step's time", parts),
        html_table(summary.EFFICIENCY_HEADER, summary.efficiency_rows(report), numbers=2),
    ]


def _collectives(report: CompileReport) -> str:
    rows = [
        (
            f"{line.count:,.0f}",
            *(size(count) for count in (line.bytes, line.wire_bytes, line.exposed_bytes)),
            *(line.kind, line.axis, summary.what_for(line), line.shape),
        )
        for line in report.collectives[: summary.ROWS]
    ]
    rest = len(report.collectives) - len(rows)
    more = f"<p>{rest} smaller ones are in the JSON.</p>" if rest > 0 else ""
    return html_table(("a step", "bytes", "sent", "exposed", "kind", "axis", "for", "shape"), rows, numbers=4) + more


def _largest_buffers(graph: GraphMemory, hbm: int) -> str:
    rows = [
        (size(buffer.bytes), f"{buffer.bytes / hbm:.1%}", buffer.shape, buffer.module, buffer.name)
        for buffer in graph.largest_buffers
    ]
    return html_table(("bytes", "of HBM", "shape", "whose", "compiler's name"), rows, numbers=2)
