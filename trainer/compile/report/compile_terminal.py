"""A compile report as tables on a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwright.compile.report import summary
from shardwright.compile.report.report import CompileReport
from shardwright.report.units import size
from shardwright.step.auto_remat import VALUES_HEADER, value_rows


def print_report(report: CompileReport, console: Console) -> None:
    """Prints a report: the graphs' memory, then the train step's numbers, and the largest graph's buffers."""
    largest = report.largest_graph
    console.print(Text(summary.verdict(report), style="bold green" if report.fits else "bold red"))
    console.print(Text(summary.where_it_runs(report)))
    _print_table(console, summary.GRAPH_HEADER, summary.graph_rows(report))
    facts = Table(show_header=False, box=None, pad_edge=False)
    parts = [(name, size(part)) for name, part in summary.memory_parts(report) if part]
    for name, text in [*parts, *summary.fact_rows(report)]:
        facts.add_row(Text(name), Text(text))
    console.print(facts)
    if report.values:
        _print_table(console, VALUES_HEADER, value_rows(report.values[: summary.ROWS]))
    if said := summary.estimate_line(report):
        console.print(Text(said, style="bold"))
        whole = report.estimate.seconds
        _print_table(
            console,
            summary.SHARES_HEADER,
            [(c, f"{s:,.4f}", f"{s / whole:.1%}", "█" * round(30 * s / whole)) for c, s in summary.share_rows(report)],
        )
    roofs = Table("roofline (estimate)", "seconds", "", box=None, pad_edge=False)
    for name, seconds in report.roofline.times.items():
        bar = "█" * round(30 * seconds / max(report.roofline.seconds, 1e-12))
        roofs.add_row(Text(summary.ROOFS[name]), f"{seconds:,.4f}", bar)
    console.print(roofs)
    collectives = [
        (x.kind, x.axis, *summary.sent_cells(x), summary.what_for(x)) for x in report.collectives[: summary.ROWS]
    ]
    _print_table(console, ("collective", "axis", "a step", "bytes", "sent", "exposed", "for"), collectives)
    _print_table(console, summary.MODULE_HEADER, summary.module_rows(report))
    for line in report.unplanned:
        console.print(Text(f"unplanned: {summary.flag(line)}", style="yellow"))
    _print_table(
        console,
        (f"largest buffers ({largest.graph})", "of HBM", "shape", "whose"),
        [(size(b.bytes), f"{b.bytes / report.chip_hbm_bytes:.1%}", b.shape, b.module) for b in largest.largest_buffers],
    )


def _print_table(console: Console, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    table = Table(*header, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)
