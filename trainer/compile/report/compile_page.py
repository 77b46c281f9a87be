"""A compile report as one HTML file."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from shardwright.compile.hlo.efficiency import KINDS, rows_of
from shardwright.compile.report import summary
from shardwright.compile.report.report import CompileReport
from shardwright.compile.report.schedule_pictures import roofline_picture, timeline_picture
from shardwright.compile.report.timelines import COLUMNS
from shardwright.report.html import render
from shardwright.report.units import size
from shardwright.step.auto_remat import VALUES_HEADER, value_rows
from shardwright.xla.chips import CHIPS


def page(report: CompileReport, title: str = "", tried: Sequence[Sequence[str]] = ()) -> str:
    """The report of the job ``title`` as HTML; ``tried``: rows under `summary.TRIED_HEADER`, one a neighbour."""
    whole, set_by_user = report.estimate.seconds, report.estimate.efficiency
    causes = [cause for cause, seconds in report.estimate.shares.items() if seconds]
    axes: dict[str, float] = defaultdict(float)
    for line in report.collectives:
        axes[line.axis] += line.wire_bytes
    return render(
        "compile.html.j2",
        Path(__file__).parent,
        report=report,
        summary=summary,
        title=title or "Compile report",
        tried=tried,
        columns=COLUMNS,
        timelines=[timeline_picture(each, report, causes) for each in report.timelines],
        roofline=roofline_picture(report, CHIPS[report.topology.partition(":")[0]]),
        memory=[(name, part, size(part)) for name, part in summary.memory_parts(report)],
        values_header=VALUES_HEADER,
        values=value_rows(report.values),
        shares=[
            (cause, s, f"{s:{summary.digits(whole)}} s ({s / whole:.1%})") for cause, s in summary.share_rows(report)
        ],
        roofs=[(summary.ROOFS[name], s, f"{s:,.4f} s") for name, s in report.roofline.times.items()],
        axes=[(axis, sent, size(sent)) for axis, sent in sorted(axes.items(), key=lambda item: -item[1])],
        efficiencies=_efficiencies(report.topology.partition(":")[0], set_by_user),
        collectives=[
            (*summary.sent_cells(x), x.kind, x.axis, summary.what_for(x), x.shape)
            for x in report.collectives[: summary.ROWS]
        ],
    )


def _efficiencies(chip: str, given: Mapping[str, float]) -> list[tuple[str, ...]]:
    """Rows under `summary.EFFICIENCY_HEADER`: what is taken for ``chip``, and of the kinds ``given`` by the user."""
    found: list[tuple[str, ...]] = []
    for kind, (of, size_of) in KINDS.items():
        if kind in given:
            found.append((kind, "", f"{given[kind]:.1%}", of, "--efficiency"))
            continue
        for row in rows_of(kind, chip):
            at = f"{row.size:,.0f} {size_of}" if row.size else ""
            found.append((kind, at, f"{row.middle:.1%} ({row.low:.1%} to {row.high:.1%})", of, row.source))
    return found
