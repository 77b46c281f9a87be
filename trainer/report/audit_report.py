"""An audit of data: on the terminal, and as one HTML page that loads nothing."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Column
from rich.text import Text

from shardwright.report.html import render
from shardwright.report.lines import say, say_table

PLACES = 5  # named on the terminal for each finding
BAR = 30  # characters of the longest bar


@dataclass(frozen=True)
class Finding:
    """One kind of thing that was found.

    Attributes:
        wrong: it makes the audit fail.
        places: (where, details) of the first of ``count``.
        decide: the reader's choice, with the options for it; empty: there is none.
    """

    name: str
    meaning: str
    wrong: bool
    count: int
    places: Sequence[tuple[str, str]]
    decide: str = ""


@dataclass(frozen=True)
class AuditView:
    """The content of an audit's report."""

    title: str
    facts: Sequence[tuple[str, str]]  # (name, value)
    header: Sequence[str]  # of the table of sources
    sources: Sequence[Sequence[str]]
    lengths: Sequence[tuple[str, int]]  # (range of tokens, samples)
    findings: Sequence[Finding]  # the gravest first
    samples: Sequence[tuple[str, Sequence[tuple[str, bool]]]]  # (where, [(text, whether the loss is on it)])

    @property
    def wrong(self) -> bool:
        return any(finding.wrong for finding in self.findings)

    @property
    def verdict(self) -> str:
        wrong = sum(finding.count for finding in self.findings if finding.wrong)
        if wrong:
            return f"{wrong:,} {'place' if wrong == 1 else 'places'} would train wrongly"
        return "Nothing would train wrongly" + (", but look at what is for you to decide" if self.decisions else "")

    @property
    def decisions(self) -> list[str]:
        """A line for each finding that leaves a choice to the reader."""
        return [f"{each.name} ({each.count:,}): {each.decide}" for each in self.findings if each.decide]


def print_audit(console: Console, view: AuditView) -> None:
    colored = console.color_system is not None
    for where, pieces in view.samples:
        say(console, f"── {where}")
        text = Text()
        for piece, scored in pieces:
            text.append(piece if colored or not scored else f"⟦{piece}⟧", style="bold green" if scored else "dim")
        console.print(text, soft_wrap=True)
    if view.samples:
        console.print(Text(f"the loss is on what {'is green' if colored else 'stands in ⟦…⟧'}\n", style="green"))
    header = [Column(title, justify="right" if number > 1 else "left") for number, title in enumerate(view.header)]
    say_table(console, header, view.sources, padding=(0, 2, 0, 0), header_style="bold")
    say(console, "\ntokens of a sample")
    most = max((count for _, count in view.lengths), default=1)
    wide = max((len(name) for name, _ in view.lengths), default=0)
    for name, count in view.lengths:
        say(console, f"  {name:>{wide}}  {'█' * max(round(BAR * count / most), count > 0):<{BAR}}  {count:,}")
    for finding in view.findings:
        style = "bold red" if finding.wrong else "yellow"
        console.print(Text(f"\n{finding.name}: {finding.count:,}  ({finding.meaning})", style=style), soft_wrap=True)
        for where, found in finding.places[:PLACES]:
            say(console, f"  {where}{': ' if found else ''}{found}")
        if finding.count > PLACES:
            say(console, f"  and {finding.count - PLACES:,} more")
    style = "bold red" if view.wrong else "bold yellow" if view.decisions else "bold green"
    console.print(Text(f"\n{view.verdict}", style=style))
    for line in view.decisions:
        say(console, f"  {line}")


def audit_page(view: AuditView) -> str:
    lengths = [(name, count, f"{count:,}") for name, count in view.lengths]
    return render("audit.html.j2", view=view, title=view.title, lengths=lengths)
