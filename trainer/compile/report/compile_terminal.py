"""A compile report as tables on a terminal."""

from rich.console import Console
from rich.text import Text

from shardwright.compile.report import summary
from shardwright.compile.report.report import CompileReport
from shardwright.report.lines import say_table
from shardwright.report.units import size
from shardwright.step.auto_remat import VALUES_HEADER, value_rows


def print_report(report: CompileReport, console: Console) -> None:
    """Prints a report: the graphs' memory, then the train step's numbers, and the largest graph's buffers."""
    largest, lines = report.largest_graph, report.collectives[: summary.ROWS]
    console.print(Text(summary.verdict(report), style="bold green" if report.fits else "bold red"))
    console.print(Text(summary.where_it_runs(report)))
    say_table(console, summary.GRAPH_HEADER, summary.graph_rows(report))
    parts = [(name, size(part)) for name, part in summary.memory_parts(report) if part]
    say_table(console, ("", ""), [*parts, *summary.fact_rows(report)])
    if report.values:
        say_table(console, VALUES_HEADER, value_rows(report.values[: summary.ROWS]))
    if said := summary.estimate_line(report):
        console.print(Text(said, style="bold"))
        whole = report.estimate.seconds
        shares = [(cause, f"{s:,.4f}", f"{s / whole:.1%}", _bar(s, whole)) for cause, s in summary.share_rows(report)]
        say_table(console, summary.SHARES_HEADER, shares)
    roof = report.roofline
    roofs = [(summary.ROOFS[name], f"{s:,.4f}", _bar(s, max(roof.seconds, 1e-12))) for name, s in roof.times.items()]
    say_table(console, ("roofline (estimate)", "seconds", ""), roofs)
    collectives = [(x.kind, x.axis, *summary.sent_cells(x), summary.what_for(x)) for x in lines]
    say_table(console, ("collective", "axis", "a step", "bytes", "sent", "exposed", "for"), collectives)
    say_table(console, summary.MODULE_HEADER, summary.module_rows(report))
    for line in report.unplanned:
        console.print(Text(f"unplanned: {summary.flag(line)}", style="yellow"))
    header = (f"largest buffers ({largest.graph})", "of HBM", "shape", "whose")
    say_table(console, header, [cells[:4] for cells in summary.buffer_rows(report)])


def _bar(part: float, whole: float) -> str:
    return "█" * round(30 * part / whole)
