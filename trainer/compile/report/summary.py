"""A compile report in words and rows of text, for terminal and page."""

from shardwright.compile.hlo.timeline import CAUSES
from shardwright.compile.report.attribution import CollectiveLine
from shardwright.compile.report.estimate import ranged
from shardwright.compile.report.report import CompileReport
from shardwright.report.units import mesh_text, size
from shardwright.xla.chips import find_topology

ESTIMATE = "An estimate from the compiled program and the chip's peaks: nothing ran."
ROOFS = {  # how each of `Roofline.times` is made
    "compute": "FLOPs ÷ peak bf16 FLOP/s",
    "hbm": "HBM bytes ÷ HBM bandwidth",
    "ici": "bytes sent ÷ bandwidth of all ICI links",
    "dcn": "bytes sent between slices ÷ DCN bandwidth",
    "cycles": "compiler's cycles of matrix products ÷ clock, kernels' FLOPs ÷ peak, and what is sent alone",
}
SHARES_HEADER = ("estimated step", "seconds", "share", "")
EFFICIENCY_HEADER = ("kind", "at", "reached", "of", "source")
HOW_ESTIMATED = (
    "Operations one after another, as scheduled: each takes the compiler's cycles, or its bytes over the HBM's "
    "bandwidth if that is longer; a kernel its FLOPs over the peak. Collectives go by the ring model beside them. "
    "Each at a part of its peak, a range from published measurements; the step's range is the root of the sum of what "
    "the causes' ranges add, squared. --efficiency sets a part:"
)
MODULE_HEADER = ("FLOPs", "HBM bytes", "cycles", "time goes to (estimate)")
GRAPH_HEADER = ("graph of the run", "fits", "HBM a chip", "of it state beside", "compile, CPU")
TRIED_HEADER = ("tried", "fits", "HBM a chip", "tokens/s a chip", "MFU", "compile")
ROWS = 40  # collectives shown, and half as many modules; the JSON has all


def verdict(report: CompileReport) -> str:
    word, largest = "Fits" if report.fits else "Does not fit", report.largest_graph
    share = largest.needed_bytes / report.chip_hbm_bytes
    used = f"{size(largest.needed_bytes)} of {size(report.chip_hbm_bytes)} HBM a chip ({share:.0%})"
    return f"{word}: {used}" + ("" if largest is report.graphs[0] else f", for the {largest.graph}")


def digits(seconds: float) -> str:
    """The form of a step's seconds; a small model's steps take less than a thousandth."""
    return ",.3f" if seconds >= 0.1 else ".6f"


def estimate_line(report: CompileReport) -> str:
    """The step's estimated time; empty if it was not compiled."""
    found = report.estimate
    if not found.seconds:
        return ""
    ends = (found.fastest, found.slowest)
    parts = [f"Estimated: {ranged(found.seconds, ends, digits(found.seconds))} s a step"]
    if found.tokens_per_second is not None:
        parts.append(f"{ranged(found.tokens_per_second, found.rates())} tokens/s a chip")
    if found.mfu is not None:
        parts.append(f"{ranged(found.mfu, found.mfus(), '.1%')} MFU")
    changed = ", ".join(f"{kind}={value:g}" for kind, value in found.efficiency.items())
    return ", ".join(parts) + (f" (with --efficiency {changed})" if changed else "")


def share_rows(report: CompileReport) -> list[tuple[str, float]]:
    """(cause, seconds) of the estimated step."""
    return [(CAUSES[cause], seconds) for cause, seconds in report.estimate.shares.items() if seconds]


def graph_rows(report: CompileReport) -> list[tuple[str, ...]]:
    """Cells under :data:`GRAPH_HEADER`."""
    rows: list[tuple[str, ...]] = []
    for graph in report.graphs:
        fits, held = "yes" if graph.fits else "no", size(graph.held_bytes) if graph.held_bytes else ""
        rows.append((graph.graph, fits, size(graph.needed_bytes), held, f"{graph.compile_seconds:,.0f} s"))
    if not report.graphs[0].fits:
        return [*rows, ("the others", "not asked", "", "", "")]
    return rows + [(name, "as the train step", "", "", "") for name in report.uncompiled]


def where_it_runs(report: CompileReport) -> str:
    slices = f"{report.slices} slices of " if report.slices > 1 else ""
    shared = find_topology(report.topology).chip.devices > 1
    devices = "devices, two a chip (a chip, below, is such a half)" if shared else "chips"
    return f"{slices}{report.topology}, {report.devices} {devices}, mesh {mesh_text(report.mesh)}"


def memory_parts(report: CompileReport) -> list[tuple[str, int]]:
    """(name, bytes) of the HBM's contents; together the step's required bytes."""
    parts = [
        ("weights", report.weights_bytes),
        ("optimizer state", report.optimizer_bytes),
        ("batch", report.batch_bytes),
        ("other arguments", report.other_bytes),
        ("temporaries", report.temp_bytes),
        ("outputs of their own", max(report.output_bytes - report.alias_bytes, 0)),
    ]
    rest = report.required_bytes - sum(part for _, part in parts)
    return [*parts, ("code and constants", max(rest, 0))]


def fact_rows(report: CompileReport) -> list[tuple[str, str]]:
    """(name, value) of all numbers that are neither in :func:`memory_parts` nor in a table of their own."""
    roof = report.roofline
    exposed = f"{size(report.exposed_bytes)} of it with nothing computed beside"
    by = f", by libtpu {report.libtpu}" if report.libtpu else ""
    facts = [
        ("peak alive at once", size(report.peak_bytes)),
        ("arguments", f"{size(report.argument_bytes)}, of which {size(report.alias_bytes)} are replaced in place"),
        ("on the host", size(report.host_temp_bytes + report.host_argument_bytes)),
        ("compiled in", f"{report.compile_seconds:,.0f} s of CPU, {report.wall_seconds:,.0f} s on the clock{by}"),
        ("FLOPs", f"{report.flops:.3e}"),
        ("sent by a chip", f"{size(report.wire_bytes)}, {exposed}"),
        ("step takes at least", f"{roof.seconds:{digits(roof.seconds)}} s, bound by {roof.bound} (estimate)"),
    ]
    if report.kernels:
        names = ", ".join(f"{name} × {runs:,.0f}" for name, runs in report.kernels.items())
        facts.append(("not in FLOPs and cycles", f"kernels that tell no FLOPs: {names}"))
    if report.values:
        kept, known = sum(v.bytes for v in report.values if v.kept), sum(v.bytes for v in report.values)
        facts.append(("kept for the backward", f"{size(kept)} of {size(known)} that it would compute again"))
    for name, trips in report.loops.items():
        times = "once" if trips == 1 else f"{trips} times"
        facts.append(("depends on data", f"a loop taken to run {times}: {name}"))
    return facts


def module_rows(report: CompileReport) -> list[tuple[str, ...]]:
    """Cells under :data:`MODULE_HEADER`."""
    return [
        (f"{x.flops:.2e}", size(x.hbm_bytes), f"{x.cycles / max(report.estimated_cycles, 1):.1%}", x.module)
        for x in report.modules[: ROWS // 2]
    ]


def buffer_rows(report: CompileReport) -> list[tuple[str, ...]]:
    """Bytes, part of the HBM, shape, module and name of the largest graph's largest buffers."""
    hbm, buffers = report.chip_hbm_bytes, report.largest_graph.largest_buffers
    return [(size(b.bytes), f"{b.bytes / hbm:.1%}", b.shape, b.module, b.name) for b in buffers]


def sent_cells(line: CollectiveLine) -> tuple[str, ...]:
    """A collective's runs, bytes, wire bytes and exposed bytes in a step."""
    return (f"{line.count:,.0f}", *map(size, (line.bytes, line.wire_bytes, line.exposed_bytes)))


def what_for(line: CollectiveLine) -> str:
    """A collective's module and purpose: ``model.layers.*.mlp.experts (gradients)``."""
    purpose = {"stack": "all layers' weights"}.get(line.purpose, line.purpose)
    return f"{line.module} ({purpose})" if purpose and line.module else line.module or purpose or "(not told)"


def flag(line: CollectiveLine) -> str:
    """A collective that should not be there, and why."""
    shape = line.shape if len(line.shape) < 60 else f"{line.shape[:60]} …"
    return f"{line.kind} of {shape} over {line.axis}, {size(line.bytes)} a step: {line.unplanned}"
