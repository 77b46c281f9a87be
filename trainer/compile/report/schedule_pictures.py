"""A compiled step's pictures: its schedule in lanes with the HBM below, and the roofline of its chip."""

import math
from collections.abc import Sequence
from typing import Any

from shardwright.compile.hlo.timeline import CAUSES, CHIP
from shardwright.compile.report.report import CompileReport
from shardwright.compile.report.timelines import COLUMNS, Timeline
from shardwright.report.html import PARTS
from shardwright.report.units import size
from shardwright.xla.chips import Chip

_LANES = {CHIP: "chip", "ici": "ICI", "dcn": "DCN", "host": "host"}
_TICKS = 5
_MODULES = 8  # named in a roofline
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _BOTTOM, _TOP = 560, 300, 62, 26, 34, 12


def timeline_picture(timeline: Timeline, report: CompileReport, causes: Sequence[str]) -> dict[str, Any]:
    """The parts of a timeline that the page draws, with ``causes`` in the order of their colours.

    A lane is its name and (column, columns, colour, quarters of its height, words) of each part. Heights are parts of
    100, from above; the path ``held``, of what is held beside the arguments, is empty where that is not known.
    """
    title = f"The step: {_seconds(timeline.seconds)}"
    if timeline.loop:
        title = f"One of the {timeline.times:,} runs of {_short(timeline.loop)}: {_seconds(timeline.seconds)}"
    lanes = []
    for lane, segments in timeline.lanes.items():
        rects = []
        for each in segments:
            color = causes.index(each.cause) % PARTS if each.cause in causes else PARTS - 1
            what = CAUSES[each.cause] if lane == CHIP else "sends"
            said = f"{what}, {_seconds(each.seconds)}; most of it {each.name}"
            rects.append((each.first, each.last - each.first + 1, color, each.quarters, said))
        lanes.append((_LANES.get(lane, lane), rects))
    ticks = [_seconds(timeline.seconds * n / (_TICKS - 1)) for n in range(_TICKS)]
    base, limit = report.argument_bytes, report.chip_hbm_bytes
    alive, reserved = base + max(timeline.held, default=0), report.required_bytes
    full = max(alive, reserved)
    top = 1.05 * (full if 0 < full < limit / 2 else max(limit, full))  # far from the limit, the curve alone

    def y(count: float) -> float:
        return round(100 * (1 - count / top), 2)

    steps = [f"H{number}V{y(base + count)}" for number, count in enumerate(timeline.held)]
    path = f"M0 {y(base)}V{y(base + timeline.held[0])}{''.join(steps)}H{COLUMNS}V{y(base)}z" if timeline.held else ""
    most = size(alive)
    said = f"alive at most {most}, of it arguments {size(base)}; "
    if timeline.held:
        gaps = max(report.temp_bytes - max(timeline.held), 0)
        rest = max(reserved - alive - gaps, 0)
        said += f"{size(gaps)} of gaps between temporaries, {size(rest)} of program and outputs; "
    said += f"{size(reserved)} reserved in all, {size(limit)} can be used"
    heights = {"base": y(base), "limit": y(limit), "reserved": y(reserved)}
    return {"title": title, "lanes": lanes, "ticks": ticks, "held": path, "most": f"≤ {most}", "said": said, **heights}


def _seconds(seconds: float) -> str:
    if seconds >= 1 or seconds == 0:
        return f"{seconds:,.2f} s" if seconds else "0"
    return f"{1e3 * seconds:,.1f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:,.0f} µs"


def _short(name: str) -> str:
    """A loop's name without what the tracer puts around it."""
    words = [word for word in name.split("/") if word]
    return "/".join(words[-3:]) if words else name


def roofline_picture(report: CompileReport, chip: Chip) -> dict[str, Any] | None:
    """The parts of a roofline that the page draws; None: no operation is known.

    Over FLOPs a byte of HBM stand the chip's roof, the step below it, and the modules that compute most.
    """
    modules = [m for m in report.modules if m.flops > 0 and m.hbm_bytes > 0 and m.cycles > 0]
    modules = sorted(modules, key=lambda m: -m.flops)[:_MODULES]
    points = [(m.flops / m.hbm_bytes, m.flops / (m.cycles / chip.clock), m.module) for m in modules]
    # beyond the roof: FLOPs of kernels, which have no cycles
    points = [(x, min(y, chip.flops), name) for x, y, name in points if y < 1.05 * chip.flops]
    if report.flops and report.hbm_bytes and report.estimate.seconds:
        points.insert(0, (report.flops / report.hbm_bytes, report.flops / report.estimate.seconds, "the step"))
    if not points:
        return None
    low = math.floor(math.log10(min(1.0, *(x for x, _, _ in points))))
    high = math.ceil(math.log10(max(4 * chip.flops_a_byte, *(x for x, _, _ in points))))
    top = math.ceil(math.log10(chip.flops))
    bottom = math.floor(math.log10(min(chip.hbm_bandwidth * 10**low * 10, *(y for _, y, _ in points))))

    def x(value: float) -> float:
        return _LEFT + (math.log10(value) - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return _TOP + (top - math.log10(value)) / (top - bottom) * (_HEIGHT - _TOP - _BOTTOM)

    start = max(10**low, 10**bottom / chip.hbm_bandwidth)
    roof = [(start, start * chip.hbm_bandwidth), (chip.flops_a_byte, chip.flops), (10**high, chip.flops)]
    return {
        "caption": f"{chip.name}: {_flops(chip.flops)}FLOP/s, {_flops(chip.hbm_bandwidth)}B/s of HBM; kernels left out",
        "edges": (_WIDTH, _HEIGHT, _LEFT, _WIDTH - _RIGHT),
        "rows": [(y(10**power), _flops(10**power)) for power in range(bottom, top + 1)],
        "columns": [(x(10**power), f"{10**power:,g}") for power in range(low, high + 1)],
        "roof": " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in roof),
        "points": [
            (x(intensity), y(reached), name, f"{name}: {_flops(reached)}FLOP/s at {intensity:,.0f} FLOPs a byte")
            for intensity, reached, name in points
        ],
    }


def _flops(value: float) -> str:
    """``459 T``, ``10 G``."""
    for unit, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= scale:
            return f"{value / scale:,.3g} {unit}"
    return f"{value:,.3g} "
