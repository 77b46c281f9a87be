"""A CompileReport for people: one HTML file that needs nothing else, or tables on a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trainer.compile_report import CollectiveLine, CompileReport

_ESTIMATE = "An estimate from the compiled program and the chip's peaks: nothing ran."
_ROOFS = {
    "compute": "FLOPs ÷ peak bf16 FLOP/s",
    "hbm": "HBM bytes ÷ HBM bandwidth",
    "ici": "bytes sent ÷ bandwidth of all ICI links",
    "dcn": "bytes sent between slices ÷ DCN bandwidth",
    "cycles": "compiler's estimated cycles ÷ clock, kernels' FLOPs ÷ peak, and what is sent with nothing beside it",
}
TRIED_HEADER = ("tried", "fits", "HBM a chip", "cycles a token", "compile")
_ROWS = 40  # collectives shown, and half as many modules; the JSON has all


# ---- what both show ----


def size(count: float) -> str:
    """Bytes as a person reads them: ``53.8 GiB``, ``640 KiB``."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:,.1f} {unit}"
    return f"{count:,.0f} B"


def verdict(report: CompileReport) -> str:
    """One sentence: does it fit, and how much of a chip it takes."""
    word = "Fits" if report.fits else "Does not fit"
    share = report.required_bytes / report.chip_hbm_bytes
    used = f"{size(report.required_bytes)} of {size(report.chip_hbm_bytes)} HBM a chip ({share:.0%})"
    return f"{word}: {used}"


def _place(report: CompileReport) -> str:
    slices = f"{report.slices} slices of " if report.slices > 1 else ""
    mesh = " × ".join(f"{axis}={n}" for axis, n in report.mesh.items())
    return f"{slices}{report.topology}, {report.devices} chips, mesh {mesh}"


def _parts(report: CompileReport) -> list[tuple[str, int]]:
    """What fills the HBM; adds up to what is required, or a little less."""
    parts = [
        ("weights", report.weights_bytes),
        ("optimizer state", report.optimizer_bytes),
        ("batch", report.batch_bytes),
        ("other arguments", report.other_bytes),
        ("temporaries", report.temp_bytes),
        ("outputs of their own", max(report.output_bytes - report.alias_bytes, 0)),
    ]
    rest = report.required_bytes - sum(n for _, n in parts)
    return [*parts, ("code and constants", max(rest, 0))]


def _facts(report: CompileReport) -> list[tuple[str, str]]:
    roof = report.roofline
    facts = [
        ("peak alive at once", size(report.peak_bytes)),
        ("arguments", f"{size(report.argument_bytes)}, of which {size(report.alias_bytes)} are replaced in place"),
        ("on the host", size(report.host_temp_bytes + report.host_argument_bytes)),
        ("compiled in", f"{report.compile_seconds:,.0f} s of CPU, {report.wall_seconds:,.0f} s on the clock"),
        ("FLOPs", f"{report.flops:.3e}"),
        (
            "sent by a chip",
            f"{size(report.wire_bytes)}, {size(report.exposed_bytes)} of it with nothing computed beside",
        ),
        ("step takes at least", f"{roof.seconds:,.3f} s, bound by {roof.bound} (estimate)"),
    ]
    if roof.mfu_bound is not None:
        facts.append(("MFU at most", f"{roof.mfu_bound:.1%} (estimate)"))
    if report.kernels:
        names = ", ".join(f"{name} × {runs:,.0f}" for name, runs in report.kernels.items())
        facts.append(("not in FLOPs and cycles", f"kernels that tell no FLOPs: {names}"))
    for name, trips in report.loops.items():
        facts.append(
            (
                "depends on data",
                f"a loop taken to run {trips} times: {name}" if trips != 1 else f"a loop taken to run once: {name}",
            )
        )
    return facts


_MODULE_HEADER = ("FLOPs", "HBM bytes", "cycles", "time goes to (estimate)")


def _module_rows(report: CompileReport) -> list[tuple[str, ...]]:
    return [
        (f"{x.flops:.2e}", size(x.hbm_bytes), f"{x.cycles / max(report.estimated_cycles, 1):.1%}", x.module)
        for x in report.modules[: _ROWS // 2]
    ]


def _what(line: CollectiveLine) -> str:
    purpose = {"stack": "all layers' weights"}.get(line.purpose, line.purpose)
    return f"{line.module} ({purpose})" if purpose and line.module else line.module or purpose or "(not told)"


def _flag(line: CollectiveLine) -> str:
    shape = line.shape if len(line.shape) < 60 else f"{line.shape[:60]} …"
    return f"{line.kind} of {shape} over {line.axis}, {size(line.bytes)} a step: {line.unplanned}"


def _by_axis(report: CompileReport) -> list[tuple[str, float]]:
    total: dict[str, float] = {}
    for line in report.collectives:
        total[line.axis] = total.get(line.axis, 0.0) + line.wire_bytes
    return sorted(total.items(), key=lambda item: -item[1])


# ---- terminal ----


def print_report(report: CompileReport, console: Console) -> None:
    """The report on a terminal: the verdict, what fills the HBM, the roofline, collectives, buffers."""
    console.print(Text(verdict(report), style="bold green" if report.fits else "bold red"))
    console.print(Text(_place(report)))
    facts = Table(show_header=False, box=None, pad_edge=False)
    for what, number in [*((n, size(b)) for n, b in _parts(report) if b), *_facts(report)]:
        facts.add_row(Text(what), Text(number))
    console.print(facts)
    roofs = Table("roofline (estimate)", "seconds", "", box=None, pad_edge=False)
    for name, seconds in report.roofline.times.items():
        roofs.add_row(
            Text(_ROOFS[name]), f"{seconds:,.4f}", "█" * round(30 * seconds / max(report.roofline.seconds, 1e-12))
        )
    console.print(roofs)
    _print_table(
        console,
        ("collective", "axis", "a step", "bytes", "sent", "exposed", "for"),
        [
            (x.kind, x.axis, f"{x.count:,.0f}", size(x.bytes), size(x.wire_bytes), size(x.exposed_bytes), _what(x))
            for x in report.collectives[:_ROWS]
        ],
    )
    _print_table(console, _MODULE_HEADER, _module_rows(report))
    for line in report.unplanned:
        console.print(Text(f"unplanned: {_flag(line)}", style="yellow"))
    _print_table(
        console,
        ("largest buffers", "of HBM", "shape", "whose"),
        [(size(b.bytes), f"{b.bytes / report.chip_hbm_bytes:.1%}", b.shape, b.module) for b in report.largest_buffers],
    )


def _print_table(console: Console, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    table = Table(*header, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)


# ---- page ----


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
    unplanned = [_flag(line) for line in report.unplanned]
    body = [
        f"<h1>{name}</h1>",
        f'<p class="verdict {"good" if report.fits else "bad"}">{escape(verdict(report))}</p>',
        f"<p>{escape(_place(report))}. {escape(_ESTIMATE)}</p>",
        "<h2>HBM of a chip</h2>",
        _stack(report),
        _table(("", ""), _facts(report)),
        *(["<h2>What else was tried</h2>", _table(TRIED_HEADER, tried)] if tried else []),
        "<h2>Roofline (estimate)</h2>",
        _bars([(f"{_ROOFS[n]}", s, f"{s:,.4f} s") for n, s in report.roofline.times.items()]),
        f"<p>At least {report.roofline.seconds:,.3f} s a step, bound by {report.roofline.bound}.</p>",
        "<h2>Where the time goes (estimate; kernels have no cycles)</h2>",
        _table(_MODULE_HEADER, _module_rows(report), numbers=3),
        "<h2>Sent by a chip in a step, by mesh axis</h2>",
        _bars([(axis, n, size(n)) for axis, n in _by_axis(report)]),
        "<h2>Collectives</h2>",
        *(f'<p class="flag">unplanned: {escape(text)}</p>' for text in unplanned),
        _collectives(report),
        "<h2>Largest buffers</h2>",
        _table(
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
    head = _HEAD.format(title=name, style=_STYLE)
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(body)}</body></html>\n'


def _stack(report: CompileReport) -> str:
    """A bar of what is required, with a mark at the chip's HBM."""
    whole = max(report.required_bytes, report.chip_hbm_bytes)
    left, rects, legend = 0.0, [], []
    for number, (name, part) in enumerate(_parts(report)):
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


def _bars(rows: Sequence[tuple[str, float, str]]) -> str:
    longest = max((value for _, value, _ in rows), default=0) or 1
    cells = "".join(
        f'<tr><th>{escape(name)}</th><td class="bar"><svg width="100%" height="14">'
        f'<rect class="c0" width="{100 * value / longest:.2f}%" height="14"/></svg></td>'
        f'<td class="n">{escape(text)}</td></tr>'
        for name, value, text in rows
    )
    return f"<table>{cells}</table>" if rows else "<p>None.</p>"


def _collectives(report: CompileReport) -> str:
    rows = [
        (
            f"{x.count:,.0f}",
            *(size(n) for n in (x.bytes, x.wire_bytes, x.exposed_bytes)),
            *(x.kind, x.axis, _what(x), x.shape),
        )
        for x in report.collectives[:_ROWS]
    ]
    rest = len(report.collectives) - len(rows)
    more = f"<p>{rest} smaller ones are in the JSON.</p>" if rest > 0 else ""
    return _table(("a step", "bytes", "sent", "exposed", "kind", "axis", "for", "shape"), rows, numbers=4) + more


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], numbers: int = 0) -> str:
    """``numbers``: so many leading columns are right-aligned."""

    def cells(row: Sequence[str], tag: str) -> str:
        kind = (' class="n"' if number < numbers else "" for number in range(len(row)))
        return "".join(f"<{tag}{c}>{escape(cell)}</{tag}>" for cell, c in zip(row, kind, strict=True))

    lines = [f"<tr>{cells(row, 'td')}</tr>" for row in rows]
    if any(header):
        lines.insert(0, f"<tr>{cells(header, 'th')}</tr>")
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'


_LIGHT = ("#3b6fb6", "#e08a2e", "#6aa84f", "#8e8e93", "#a05195", "#c9485b", "#5b8c8c")
_DARK = ("#6f9fe0", "#f0a75a", "#8cc974", "#a0a0a6", "#c382b8", "#e57f8d", "#86b8b8")


def _variables(colors: Sequence[str]) -> str:
    return "".join(f"--c{number}: {color}; " for number, color in enumerate(colors))


_STYLE = (
    """
:root { color-scheme: light dark; --ink: #1d2126; --paper: #fdfdfc; --line: #d5d9de;
  --good: #1a7f4b; --bad: #b3261e; --flag: #8a5a00; LIGHT}
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8ea; --paper: #16191d; --line: #3a4048;
  --good: #5fd38d; --bad: #ff8a80; --flag: #f2c14e; DARK} }
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
""".replace("LIGHT", _variables(_LIGHT)).replace("DARK", _variables(_DARK))
    + "".join(f".c{n} {{ fill: var(--c{n}); }} .k{n} {{ background: var(--c{n}); }}\n" for n in range(len(_LIGHT)))
)
_HEAD = (
    '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    "<title>{title}</title><style>{style}</style>"
)
