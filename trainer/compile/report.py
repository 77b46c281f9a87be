"""What the TPU compiler said of a step, as numbers: does it fit, what fills the HBM and the links, what bounds it.

Everything is per chip and step. Sizes are the compiler's; FLOPs, bytes and cycles are counted from its optimised HLO
(trainer.compile.hlo.cost); times are those divided by the chip's peaks (trainer.xla.chips): an estimate, of a machine that nothing
ran on.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

from trainer.compile.attribution import Parameters
from trainer.compile.hlo.collectives import Collective, Traffic
from trainer.compile.hlo.cost import Cost, count
from trainer.compile.hlo.text import Module, parse
from trainer.compile.lowering import Lowered
from trainer.compile.memory import Buffer, Memory, Sizes, largest_buffers, memory_of
from trainer.xla.chips import Chip, Topology

_NOTABLE_BYTES = 64 * 2**20  # a step; what moves less is not flagged


@dataclass(frozen=True)
class CollectiveLine:
    """All collectives of one kind, over one axis, on behalf of one module.

    Args:
        axis: mesh axes, ``fsdp×expert``; ``slices`` for what goes over DCN between slices.
        count: a step.
        bytes: outputs of all-gather and all-to-all, operands of the others (trainer.compile.hlo.collectives).
        wire_bytes: sent by a chip, for a ring.
        exposed_bytes: of those, what is left to send, over all links at once, after what is computed meanwhile.
        module: the module, or where the compiler's metadata names none, the parameter that it fits or the operation.
        purpose: ``weights`` (a gather of parameters), ``gradients``, or empty: activations and the rest.
        shape: of the largest.
        unplanned: why it should not be there, empty if nothing is known against it.
    """

    kind: str
    axis: str
    count: float
    bytes: float
    wire_bytes: float
    exposed_bytes: float
    module: str
    purpose: str
    network: str
    shape: str
    unplanned: str


@dataclass(frozen=True)
class ModuleLine:
    """What one module's operations take of a step; kernels have no cycles."""

    module: str
    flops: float
    hbm_bytes: float
    cycles: float


@dataclass(frozen=True)
class Roofline:
    """Seconds a step would take at least, by each of the chip's peaks; estimates.

    Args:
        compute, hbm, ici, dcn: FLOPs, HBM bytes and wire bytes over the chip's peak of each.
        cycles: the compiler's estimated cycles over the clock and, since neither has any, the FLOPs that custom kernels
            tell over the peak, and the collectives that run with nothing beside them over all links' bandwidth.
        bound: which of them is the longest.
        mfu_bound: model FLOPs over what the chip could do in that time, None without model FLOPs.
    """

    compute: float
    hbm: float
    ici: float
    dcn: float
    cycles: float
    bound: str
    mfu_bound: float | None

    @property
    def seconds(self) -> float:
        return max(self.times.values())

    @property
    def times(self) -> dict[str, float]:
        return {"compute": self.compute, "hbm": self.hbm, "ici": self.ici, "dcn": self.dcn, "cycles": self.cycles}


@dataclass(frozen=True)
class CompileReport(Sizes):
    """Per chip and step throughout.

    Args:
        chip_hbm_bytes: what a program can use.
        compile_seconds: CPU seconds of the compiling process.
        kernel_flops: of flops, what custom kernels told; estimated_cycles knows nothing of kernels.
        modules: by cycles.
        kernels: custom kernels that tell no FLOPs: whose → runs a step; they are not in `flops`.
        loops: loops whose length depends on data: whose → how often they were taken to run.
    """

    fits: bool
    topology: str
    slices: int
    devices: int
    mesh: dict[str, int]
    chip_hbm_bytes: int
    flops: float
    model_flops: float | None
    hbm_bytes: float
    host_traffic_bytes: float
    estimated_cycles: float
    compile_seconds: float
    wall_seconds: float
    kernel_flops: float
    modules: tuple[ModuleLine, ...]
    kernels: dict[str, float]
    loops: dict[str, int]
    collectives: tuple[CollectiveLine, ...]
    largest_buffers: tuple[Buffer, ...]
    roofline: Roofline
    error: str

    def as_json(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``, everything by the names above."""
        return dataclasses.asdict(self)

    @property
    def unplanned(self) -> list[CollectiveLine]:
        return [line for line in self.collectives if line.unplanned]

    @property
    def wire_bytes(self) -> float:
        """Sent by a chip over ICI."""
        return sum(line.wire_bytes for line in self.collectives if line.network == "ici")

    @property
    def exposed_bytes(self) -> float:
        """Of :attr:`wire_bytes`, what is sent while nothing is computed."""
        return sum(line.exposed_bytes for line in self.collectives if line.network == "ici")

    @property
    def collective_bytes(self) -> dict[str, float]:
        """Bytes by kind."""
        total: dict[str, float] = {}
        for line in self.collectives:
            total[line.kind] = total.get(line.kind, 0.0) + line.bytes
        return total


def make_report(
    lowered: Lowered,
    where: Topology,
    result: dict[str, Any],
    hlo: str,
    buffers: str,
    *,
    model_flops: float | None = None,
    exchange: str | None = None,
) -> CompileReport:
    """Put the report together from what the compiling process left (trainer.compile.libtpu_process).

    Args:
        hlo: the optimised module's text; empty if the compiler ran out of memory before it had one.
        buffers: its allocations, and the buffers alive at the peak.
        model_flops: of one step on all chips, without recomputation.
        exchange: the axis over which tokens are meant to be exchanged.
    """
    module = parse(hlo) if hlo else None
    cost = count(module, lowered.mesh, lowered.layers, where.chip) if module else Cost()
    memory = memory_of(result, buffers, lowered)
    lines = _lines(cost, lowered, exchange)
    model_flops_chip = None if model_flops is None else model_flops / where.devices
    return CompileReport(
        fits="error" not in result,
        topology=where.name,
        slices=where.slices,
        devices=where.devices,
        mesh=dict(lowered.mesh),
        chip_hbm_bytes=_hbm(memory.limit, where.chip),
        **{size.name: getattr(memory, size.name) for size in dataclasses.fields(Sizes)},
        flops=cost.flops,
        model_flops=model_flops_chip,
        hbm_bytes=cost.hbm_bytes,
        host_traffic_bytes=cost.host_bytes,
        estimated_cycles=cost.cycles,
        compile_seconds=result["cpu_seconds"],
        wall_seconds=result["wall_seconds"],
        kernel_flops=cost.kernel_flops,
        modules=_modules(cost),
        kernels=cost.kernels,
        loops=cost.loops,
        collectives=tuple(lines),
        largest_buffers=_largest(lowered, memory, module, buffers),
        roofline=_roofline(cost, lines, where.chip, model_flops_chip),
        error=result.get("error", ""),
    )


def _hbm(said: int, chip: Chip) -> int:
    """What the compiler said a program can use; its messages round, so the table's number where they agree."""
    return chip.hbm_bytes if abs(said - chip.hbm_bytes) < 2**24 or not said else said


def _largest(lowered: Lowered, memory: Memory, module: Module | None, buffers: str) -> tuple[Buffer, ...]:
    parameters = Parameters(lowered)

    def named(buffer: Buffer) -> Buffer:
        """A gradient or a copy that no module made (a sum, a cast) is told by the weight that it looks like."""
        like = "" if "." in re.sub(r"\.\d+$", "", buffer.module) else parameters.shaped_like(buffer.shape)
        return dataclasses.replace(buffer, module=f"{like} (by its shape)") if like else buffer

    return tuple(map(named, memory.refused or largest_buffers(lowered, module, buffers)))


def _modules(cost: Cost) -> tuple[ModuleLine, ...]:
    lines = [ModuleLine(name, share.flops, share.hbm_bytes, share.cycles) for name, share in cost.modules.items()]
    return tuple(sorted(lines, key=lambda line: (-line.cycles, -line.hbm_bytes)))


def _roofline(cost: Cost, lines: list[CollectiveLine], chip: Chip, model_flops: float | None) -> Roofline:
    wire = {network: sum(x.wire_bytes for x in lines if x.network == network) for network in ("ici", "dcn")}
    exposed = {network: sum(x.exposed_bytes for x in lines if x.network == network) for network in wire}
    times = {
        # kernels may keep their FLOPs to themselves, but the model's have to be done
        "compute": max(cost.flops, model_flops or 0) / chip.flops,
        "hbm": cost.hbm_bytes / chip.hbm_bandwidth,
        "ici": wire["ici"] / chip.ici_bandwidth,
        "dcn": wire["dcn"] / chip.dcn_bandwidth,
        "cycles": cost.cycles / chip.clock
        + cost.kernel_flops / chip.flops
        + exposed["ici"] / chip.ici_bandwidth
        + exposed["dcn"] / chip.dcn_bandwidth,
    }
    bound = max(times, key=lambda name: times[name])
    known = model_flops is not None and times[bound] > 0
    mfu = model_flops / chip.flops / times[bound] if known else None  # type: ignore[operator]
    return Roofline(**times, bound=bound, mfu_bound=mfu)


def _lines(cost: Cost, lowered: Lowered, exchange: str | None) -> list[CollectiveLine]:
    """One line for each kind × axis × module × purpose, those that send most first."""
    parameters = Parameters(lowered)
    grouped: dict[tuple[str, ...], list[tuple[Collective, Traffic]]] = {}
    for key, traffic in cost.collectives.items():
        purpose, names = parameters.behind(key)
        module = key.module if "." in key.module or not names else " or ".join(names[:2])
        why = _unplanned(key, traffic, purpose, names, parameters, exchange)
        group = (key.kind, key.axis, module, purpose, key.network, why)
        grouped.setdefault(group, []).append((key, traffic))
    lines = []
    for (kind, axis, module, purpose, network, why), members in grouped.items():
        total = Traffic()
        for _, traffic in members:
            total = total.plus(traffic, 1)
        shape = max(members, key=lambda member: member[1].bytes / member[1].count)[0].shape
        line = CollectiveLine(
            kind=kind,
            axis=axis,
            count=total.count,
            bytes=total.bytes,
            wire_bytes=total.wire_bytes,
            exposed_bytes=total.exposed_bytes,
            module=module,
            purpose=purpose,
            network=network,
            shape=shape,
            unplanned=why,
        )
        lines.append(line)
    return sorted(lines, key=lambda line: -line.wire_bytes)


def _unplanned(
    key: Collective,
    traffic: Traffic,
    purpose: str,
    names: list[str],
    parameters: Parameters,
    exchange: str | None,
) -> str:
    """Why a collective should not be there, empty if nothing is known against it."""
    if traffic.bytes < _NOTABLE_BYTES or key.network == "dcn":
        return ""
    if purpose == "stack":
        return f"{names[0]} is gathered whole, all layers at once"
    if purpose == "gradients" and key.kind == "all-reduce":
        return f"the gradient of {names[0]} is all-reduced over an axis that shards it: a reduce-scatter moves half"
    if purpose:
        return ""
    axes = set(key.axis.removeprefix("within ").split("×"))
    if key.kind == "all-to-all" and exchange is not None and key.axis != exchange:
        return f"an all-to-all over {key.axis}; tokens are exchanged over {exchange}"
    gathers = key.kind in ("all-gather", "all-reduce") and axes & parameters.batch_axes
    if gathers and key.axis != exchange and parameters.holds_batch(key):
        return f"activations of the whole batch over {key.axis}, which splits it: the layout was lost there"
    return ""
