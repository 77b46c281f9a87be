"""The numbers of a compiled step: whether it fits, what fills the HBM and the links, what bounds it.

Everything is per chip and step. Sizes are the compiler's. FLOPs, bytes and cycles are counted from its optimised HLO
(shardwright.compile.hlo.cost). Times are estimates from these and the chip's peaks (shardwright.xla.chips).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwright.compile.hlo.buffers import held_over_time
from shardwright.compile.hlo.cost import Cost, Counter
from shardwright.compile.hlo.efficiency import Reached, Which
from shardwright.compile.hlo.links import Links
from shardwright.compile.hlo.text import Computation, parse
from shardwright.compile.hlo.timeline import Run, Schedule
from shardwright.compile.lowered_graph import LoweredGraph
from shardwright.compile.report.attribution import CollectiveLine, Parameters, collective_lines
from shardwright.compile.report.estimate import Estimate, estimate, given_efficiencies
from shardwright.compile.report.memory import Buffer, MemorySizes, largest_buffers, memory_of
from shardwright.compile.report.timelines import Timeline, timelines_of
from shardwright.step.auto_remat import LayerValue
from shardwright.xla.chips import Chip, Topology


@dataclass(frozen=True)
class Expected:
    """Facts known before the compile, beside which the report sets the compiler's numbers."""

    model_flops: float | None = None  # of one step on all chips, as MFU counts them (no recomputation)
    exchange: str | None = None  # axis over which tokens are to be exchanged: an all-to-all over another is flagged
    tokens: int | None = None  # of one step on all chips
    efficiency: str = ""  # overrides, as `report.estimate.given_efficiencies` reads them
    traced_layers: int = 0  # that the host traces by themselves in each step


@dataclass(frozen=True)
class ModuleLine:
    """The part of a step in one module's operations; kernels have no cycles."""

    module: str
    flops: float
    hbm_bytes: float
    cycles: float


@dataclass(frozen=True)
class Roofline:
    """Lower bounds of a step's seconds, one for each of the chip's peaks; estimates."""

    compute: float  # FLOPs over the chip's peak
    hbm: float  # bytes over the bandwidth, as those of the links
    ici: float
    dcn: float
    # the compiler's cycles of matrix products, divided by the clock. Kernels and collectives have none, so kernels'
    # FLOPs over the peak and exposed bytes over the bandwidth of all links are added. Cycles of other operations are
    # left out: they say several times the time (docs/estimate.md).
    cycles: float
    bound: str  # name of the longest

    @property
    def seconds(self) -> float:
        return max(self.times.values())

    @property
    def times(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in ("compute", "hbm", "ici", "dcn", "cycles")}


@dataclass(frozen=True)
class GraphMemory:
    """The HBM of a chip that one of a run's graphs takes; sizes are as in `MemorySizes`."""

    graph: str
    fits: bool  # the chip has `needed_bytes`, and the compiler did not refuse it
    required_bytes: int
    held_bytes: int  # of the run's state in HBM that is no argument: optimizer state during an evaluation
    temp_bytes: int
    compile_seconds: float
    wall_seconds: float
    largest_buffers: tuple[Buffer, ...]
    error: str  # why the compiler refused it, or empty

    @property
    def needed_bytes(self) -> int:
        return self.required_bytes + self.held_bytes


@dataclass(frozen=True)
class CompileReport(MemorySizes):
    """All numbers of a compiled train step, and the memory of the run's other graphs."""

    fits: bool  # every compiled graph does
    topology: str
    slices: int
    devices: int  # of all slices
    mesh: dict[str, int]
    chip_hbm_bytes: int  # usable by a program
    flops: float
    model_flops: float | None  # a chip's part of `Expected.model_flops`
    hbm_bytes: float  # read and written there, as on the host
    host_traffic_bytes: float
    estimated_cycles: float  # the compiler's, loops multiplied out, without custom kernels
    compile_seconds: float  # CPU time of the compiling process
    wall_seconds: float
    kernel_flops: float  # as in `Cost`, with kernels and loops
    modules: tuple[ModuleLine, ...]  # by cycles, most first
    kernels: dict[str, float]
    loops: dict[str, int]
    collectives: tuple[CollectiveLine, ...]
    largest_buffers: tuple[Buffer, ...]
    roofline: Roofline
    error: str  # why the compiler refused the step; empty if it fits
    graphs: tuple[GraphMemory, ...]  # the train step, then those of `beside`
    estimate: Estimate  # of the train step; 0 seconds if it was not compiled
    uncompiled: tuple[str, ...] = ()  # names of the run's graphs that are the train step with fewer tokens
    values: tuple[LayerValue, ...] = ()  # as in `LoweredGraph`
    libtpu: str = ""  # version of the compiler
    timelines: tuple[Timeline, ...] = ()  # of the train step, then of one run of its longest loops

    def beside(self, graph: str, other: CompileReport, alone: bool = False) -> CompileReport:
        """Merges the memory of another graph of the same run into the verdict of this step, which fits.

        ``alone``: it runs before the model of this step is on the devices, as a teacher does.
        """
        # frozen weights are part of the state too, though no output takes their place
        state = max(self.alias_bytes, self.weights_bytes + self.optimizer_bytes)
        held = 0 if alone else max(state - other.weights_bytes, 0)
        (memory,) = other.graphs
        fits = other.fits and other.required_bytes + held <= self.chip_hbm_bytes
        memory = dataclasses.replace(memory, graph=graph, held_bytes=held, fits=fits)
        return dataclasses.replace(self, graphs=(*self.graphs, memory), fits=self.fits and fits)

    @property
    def largest_graph(self) -> GraphMemory:
        """The graph that decides whether the run fits."""
        return max(self.graphs, key=lambda graph: (not graph.fits, graph.needed_bytes))

    def as_json(self) -> dict[str, Any]:
        """All but the timelines, which are pictures."""
        plain = dataclasses.asdict(self)
        del plain["timelines"]
        return plain

    @property
    def unplanned(self) -> list[CollectiveLine]:
        return [line for line in self.collectives if line.unplanned]

    @property
    def wire_bytes(self) -> float:
        return _sum(self.collectives, "wire_bytes", "ici")

    @property
    def exposed_bytes(self) -> float:
        return _sum(self.collectives, "exposed_bytes", "ici")


def _sum(lines: Sequence[CollectiveLine], field: str, network: str) -> float:
    return sum(getattr(line, field) for line in lines if line.network == network)


def make_report(
    lowered: LoweredGraph,
    where: Topology,
    result: dict[str, Any],
    hlo: str,
    buffers: str,
    expected: Expected,
    dcn: Mapping[str, int] | None = None,
) -> CompileReport:
    """Makes the report from the files of the compiling process (shardwright.compile.libtpu_process).

    Args:
        result: ``result.json``.
        hlo: the optimised module's text; empty if the compiler ran out of memory before it had one.
        buffers: the allocations, and the buffers alive at the peak.
        dcn: mesh axis → number of slices that it spans; None: one each.
    """
    entry, chip = parse(hlo) if hlo else None, where.chip
    given = given_efficiencies(expected.efficiency)
    cost, runs = _measure(entry, lowered, where, dcn or {}, given) if entry else (Cost(), {})
    run = runs.get("middle", Run())
    sizes, refusal = memory_of(result, buffers, lowered)
    largest = refusal.buffers if refusal and refusal.buffers else largest_buffers(lowered, entry, buffers)
    limit = (refusal.limit if refusal else 0) or chip.hbm_bytes
    collectives = collective_lines(cost.collectives, lowered, expected.exchange)
    modules = [ModuleLine(name, part.flops, part.hbm_bytes, part.cycles) for name, part in cost.modules.items()]
    model_flops = None if expected.model_flops is None else expected.model_flops / where.devices
    tokens = None if expected.tokens is None else expected.tokens / where.devices
    graph = GraphMemory(
        graph=lowered.graph,
        fits="error" not in result,
        required_bytes=sizes.required_bytes,
        held_bytes=0,
        temp_bytes=sizes.temp_bytes,
        compile_seconds=result["cpu_seconds"],
        wall_seconds=result["wall_seconds"],
        largest_buffers=_name_by_shape(largest, lowered),
        error=result.get("error", ""),
    )
    repeated = ("fits", "compile_seconds", "wall_seconds", "largest_buffers", "error")
    return CompileReport(
        **vars(sizes),
        **{name: getattr(graph, name) for name in repeated},
        topology=where.name,
        slices=where.slices,
        devices=where.devices,
        mesh=dict(lowered.mesh),
        # the compiler's limit, if it told one; the chip's own number where both agree, since messages round
        chip_hbm_bytes=chip.hbm_bytes if abs(limit - chip.hbm_bytes) < 2**24 else limit,
        flops=cost.flops,
        model_flops=model_flops,
        hbm_bytes=cost.hbm_bytes,
        host_traffic_bytes=cost.host_bytes,
        estimated_cycles=cost.cycles,
        kernel_flops=cost.kernel_flops,
        modules=tuple(sorted(modules, key=lambda line: (-line.cycles, -line.hbm_bytes))),
        kernels=cost.kernels,
        loops=cost.loops,
        collectives=tuple(collectives),
        roofline=_roofline(cost, collectives, chip, model_flops),
        graphs=(graph,),
        estimate=estimate(
            {end: each.seconds for end, each in runs.items()}, chip, tokens, model_flops, given, expected.traced_layers
        ),
        values=lowered.values,
        libtpu=result.get("libtpu", ""),
        timelines=timelines_of(run, held_over_time(buffers)),
    )


def _measure(
    entry: Computation, lowered: LoweredGraph, where: Topology, dcn: Mapping[str, int], given: Mapping[str, float]
) -> tuple[Cost, dict[str, Run]]:
    """The cost of one execution for a chip; its schedule with all efficiencies low, in the middle and high."""
    over = [dcn.get(axis, 1) for axis in lowered.mesh]
    inside = [size // factor for size, factor in zip(lowered.mesh.values(), over, strict=True)]
    counter = Counter(lowered.mesh, lowered.layers, Links(where, inside, over))
    ends: tuple[Which, ...] = ("low", "middle", "high")
    reached = {end: Reached(where.chip.name, end, given) for end in ends}
    runs: dict[str, Run] = {end: Schedule(counter, parts).computation(entry) for end, parts in reached.items()}
    return counter.computation(entry), runs


def _name_by_shape(buffers: Sequence[Buffer], lowered: LoweredGraph) -> tuple[Buffer, ...]:
    """Names buffers that no module made (a sum of gradients, a cast) after the weight of their shape."""
    parameters, found = Parameters(lowered), []
    for buffer in buffers:
        like = "" if "." in re.sub(r"\.\d+$", "", buffer.module) else parameters.shaped_like(buffer.shape)
        found.append(dataclasses.replace(buffer, module=f"{like} (by its shape)") if like else buffer)
    return tuple(found)


def _roofline(cost: Cost, lines: Sequence[CollectiveLine], chip: Chip, model_flops: float | None) -> Roofline:
    bandwidths = {"ici": chip.ici_bandwidth, "dcn": chip.dcn_bandwidth}
    exposed = [_sum(lines, "exposed_bytes", network) / bandwidth for network, bandwidth in bandwidths.items()]
    times = {
        # some kernels don't tell their FLOPs, but the model's have to be done
        "compute": max(cost.flops, model_flops or 0) / chip.flops,
        "hbm": cost.hbm_bytes / chip.hbm_bandwidth,
        **{network: _sum(lines, "wire_bytes", network) / bandwidth for network, bandwidth in bandwidths.items()},
        "cycles": sum(exposed, cost.product_cycles / chip.clock + cost.kernel_flops / chip.flops),
    }
    bound = max(times, key=lambda name: times[name])
    return Roofline(**times, bound=bound)
