"""An audit of data: on the terminal, and as one HTML page that loads nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwright.report.html import html_bars, html_page, html_table
from shardwright.report.lines import say

PLACES = 5  # named on the terminal for each finding
BAR = 30  # characters of the longest bar
_STYLE = """
.sample { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid var(--line); padding: .6rem;
  font: .85rem/1.5 ui-monospace, monospace; max-height: 24rem; overflow-y: auto; }
.sample mark { background: color-mix(in srgb, var(--good) 25%, transparent); color: inherit; }
"""


@dataclass(frozen=True)
class Finding:
    """``wrong``: it makes the audit fail. ``places``: (where, details) of the first of ``count``."""

    name: str
    meaning: str
    wrong: bool
    count: int
    places: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class AuditView:
    """The content of an audit's report.

    Args:
        facts: (name, value).
        header, sources: a table, one line a source.
        lengths: (range of tokens, samples).
        findings: the gravest first.
        samples: (where, pieces of its text: (text, whether the loss is on it)).
    """

    title: str
    facts: Sequence[tuple[str, str]]
    header: Sequence[str]
    sources: Sequence[Sequence[str]]
    lengths: Sequence[tuple[str, int]]
    findings: Sequence[Finding]
    samples: Sequence[tuple[str, Sequence[tuple[str, bool]]]]

    @property
    def verdict(self) -> str:
        wrong = sum(finding.count for finding in self.findings if finding.wrong)
        return f"{wrong:,} {'place' if wrong == 1 else 'places'} would train wrongly" if wrong else "All is fine"


def print_audit(console: Console, view: AuditView) -> None:
    for where, pieces in view.samples:
        say(console, f"── {where}")
        text = Text()
        for piece, scored in pieces:
            text.append(piece, style="bold green" if scored else "dim")
        console.print(text, soft_wrap=True)
    if view.samples:
        console.print(Text("the loss is on what is green\n", style="green"))
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for number, title in enumerate(view.header):
        table.add_column(title, justify="right" if number > 1 else "left", overflow="fold")
    for row in view.sources:
        table.add_row(*map(Text, row))
    console.print(table)
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
    wrong = any(finding.wrong for finding in view.findings)
    console.print(Text(f"\n{view.verdict}", style="bold red" if wrong else "bold green"))


def audit_page(view: AuditView) -> str:
    wrong = any(finding.wrong for finding in view.findings)
    body = [
        f"<h1>{escape(view.title)}</h1>",
        f'<p class="verdict {"bad" if wrong else "good"}">{escape(view.verdict)}</p>',
        html_table(("", ""), view.facts),
        "<h2>Sources</h2>",
        html_table(view.header, view.sources),
        "<h2>Tokens of a sample</h2>",
        html_bars([(name, count, f"{count:,}") for name, count in view.lengths]),
        "<h2>Findings</h2>",
        *(_findings(view) if view.findings else ["<p>None.</p>"]),
        "<h2>Samples</h2><p>The loss is on what is <mark>marked</mark>.</p>" if view.samples else "",
        *(_sample(where, pieces) for where, pieces in view.samples),
    ]
    return html_page(view.title, body, style=_STYLE + "mark { background: #1a7f4b40; color: inherit; }")


def _findings(view: AuditView) -> Iterator[str]:
    for finding in view.findings:
        kind = "bad" if finding.wrong else "flag"
        words = escape(f"{finding.name}: {finding.count:,}")
        yield (
            f'<details{" open" if finding.wrong else ""}><summary class="{kind}">{words}</summary>'
            f"<p>{escape(finding.meaning)}</p>{html_table(('where', 'found'), finding.places)}</details>"
        )


def _sample(where: str, pieces: Sequence[tuple[str, bool]]) -> str:
    inner = "".join(f"<mark>{escape(text)}</mark>" if scored else escape(text) for text, scored in pieces)
    return f'<h3>{escape(where)}</h3><div class="sample">{inner}</div>'
