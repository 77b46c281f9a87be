"""A certificate: on the terminal, and as one HTML page that loads nothing."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwright.report.html import render
from shardwright.report.lines import say

_NAMED = 8  # on the terminal, of what is off


@dataclass(frozen=True)
class ProofView:
    """The content of a certificate's report. Differences are texts."""

    title: str
    proved: bool
    verdict: str
    facts: Sequence[tuple[str, str]]
    quantities: Sequence[tuple[str, str, str, str, str]]  # what, compared, worst, allowed, where
    wrong: Sequence[tuple[str, str, str, str]]  # what, difference, allowed, where
    parameters: Sequence[tuple[str, ...]]  # name, and the worst of each quantity
    header: Sequence[str]  # of that table
    notes: Sequence[str]  # of the layout
    collectives: Sequence[tuple[str, str, str, str, str]]  # kind, axes, count, bytes, module
    smaller: Sequence[tuple[str, str, str]]  # what, the run's, the proof's


def print_proof(console: Console, view: ProofView) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("compared", "how many", "worst", "allowed", "where"):
        table.add_column(title, overflow="fold")
    for row in view.quantities:
        table.add_row(*map(Text, row))
    console.print(table)
    for what, off, allowed, name in view.wrong[:_NAMED]:
        console.print(
            Text(f"off: {what} of {name}: {off}, where rounding explains {allowed}", style="red"), soft_wrap=True
        )
    if len(view.wrong) > _NAMED:
        say(console, f"     and {len(view.wrong) - _NAMED} more, on the page")
    for text in view.notes:
        say(console, f"layout:  {text}")
    console.print(Text(view.verdict, style="bold green" if view.proved else "bold red"), soft_wrap=True)


def proof_page(view: ProofView) -> str:
    return render("proof.html.j2", view=view, title=view.title)
