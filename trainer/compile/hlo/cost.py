"""Cost of one execution of a compiled module for a chip: FLOPs, bytes, cycles and collectives.

The compiler's own totals count a loop's body once; here it counts as often as it runs.

- *FLOPs* of dots and convolutions (shardwright.compile.hlo.flops), and those of custom kernels' cost estimates.
- *HBM bytes* that scheduled operations read and write, without padding. VMEM doesn't count, nor the inside of a
  fusion, which stays on the chip. Of an operand that is only sliced, the slices count; of an output that is updated in
  place, the update.
- *Cycles* are the compiler's ``estimated_cycles``, where it has any.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from shardwright.compile.hlo.communication import Collective, Traffic, collective, module_of
from shardwright.compile.hlo.flops import convolution_flops, dot_flops
from shardwright.compile.hlo.kernels import is_kernel
from shardwright.compile.hlo.links import Links
from shardwright.compile.hlo.text import Computation, Instruction, Leaf, Module
from shardwright.compile.hlo.trip_counts import trip_count
from shardwright.xla.chips import Chip

_FREE = {  # opcodes that move no bytes of their own
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"),
    *("send", "recv", "opt-barrier", "optimization-barrier", "while", "call", "conditional"),
    *("domain", "add-dependency"),
}
_NO_CYCLES = 2**62  # the compiler writes at least this where it has no estimate


@dataclass(frozen=True)
class Share:
    """The cost of one module's operations."""

    flops: float = 0.0
    hbm_bytes: float = 0.0
    cycles: float = 0.0

    def plus(self, other: Share, times: float) -> Share:
        """Adds ``times`` the other."""
        return Share(**{name: value + times * getattr(other, name) for name, value in vars(self).items()})


@dataclass
class Cost:
    """The cost of one run of a computation.

    Args:
        product_cycles: the part of ``cycles`` in operations that multiply matrices.
        kernels: custom kernels without a cost estimate: module → runs.
        kernel_flops: the part of ``flops`` from custom kernels' cost estimates; kernels have no cycles.
        loops: loops whose length depends on data: op_name → runs that were assumed.
    """

    flops: float = 0.0
    hbm_bytes: float = 0.0
    host_bytes: float = 0.0
    cycles: float = 0.0
    product_cycles: float = 0.0
    kernels: dict[str, float] = field(default_factory=dict)
    kernel_flops: float = 0.0
    modules: dict[str, Share] = field(default_factory=dict)
    loops: dict[str, int] = field(default_factory=dict)
    collectives: dict[Collective, Traffic] = field(default_factory=dict)

    def add(self, other: Cost, times: float = 1) -> None:
        """Adds ``times`` the other in place; at 0 nothing, no key either."""
        if times == 0:
            return
        for name in ("flops", "kernel_flops", "hbm_bytes", "host_bytes", "cycles", "product_cycles"):
            setattr(self, name, getattr(self, name) + times * getattr(other, name))
        for name, runs in other.kernels.items():
            self.kernels[name] = self.kernels.get(name, 0) + times * runs
        for name, share in other.modules.items():
            self.modules[name] = self.modules.get(name, Share()).plus(share, times)
        self.loops.update(other.loops)
        for key, traffic in other.collectives.items():
            self.collectives[key] = self.collectives.get(key, Traffic()).plus(traffic, times)


def count(module: Module, mesh: dict[str, int], layers: int, chip: Chip) -> Cost:
    """The cost of one execution, per chip; arguments as of :class:`Counter`."""
    return Counter(module, mesh, layers, chip).computation(module.entry)


class Counter:
    """Counts each computation's cost once, however often it is called.

    Args:
        mesh: axis → size.
        layers: trip count assumed for an outermost loop of unknown length. Inner ones are assumed to run once: their
            length depends on data, as in an exchange that is repeated until every token is served.
        chip: its clock and links decide how much of a collective is hidden by computation.
        links: for collectives' times; None: they take none.
    """

    def __init__(
        self, module: Module, mesh: dict[str, int], layers: int, chip: Chip, links: Links | None = None
    ) -> None:
        self.module, self.mesh, self.layers, self.links = module, mesh, layers, links
        self.bytes_a_cycle = {"ici": chip.ici_bandwidth / chip.clock, "dcn": chip.dcn_bandwidth / chip.clock}
        self.known: dict[str, Cost] = {}

    def computation(self, computation: Computation) -> Cost:
        """The cost of one run."""
        if computation.name not in self.known:
            cost = Cost()
            for instruction in computation.instructions:
                self._instruction(cost, computation, instruction)
            self.known[computation.name] = cost
        return self.known[computation.name]

    def _instruction(self, cost: Cost, computation: Computation, instruction: Instruction) -> None:
        """Adds an instruction with the computations that it runs; of a conditional's branches, the dearest."""
        opcode = instruction.opcode
        if opcode == "while":
            trips, known = self.trips(computation, instruction)
            if not known:
                cost.loops[instruction.op_name or instruction.name] = trips
            cost.add(self.computation(self.body(instruction)), trips)
        elif opcode == "conditional":
            cost.add(max(map(self.computation, self.branches(instruction)), key=lambda c: (c.cycles, c.flops)))
        elif opcode in ("call", "call-start", "async-start"):
            cost.add(self._overlapped(computation, instruction, self.computation(self.named(instruction.called))))
        else:
            cost.add(self.own(computation, instruction))

    def trips(self, computation: Computation, loop: Instruction) -> tuple[int, bool]:
        """(trip count of a loop, whether it is known rather than assumed)."""
        trips = trip_count(self.module, computation, loop)
        return (trips, True) if trips is not None else (self.layers if computation is self.module.entry else 1, False)

    def own(self, computation: Computation, instruction: Instruction) -> Cost:
        """The cost of an instruction that is one scheduled operation."""
        cost = Cost(cycles=_cycles(instruction))
        module = module_of(instruction.op_name)
        if instruction.opcode == "fusion":
            fused = Cost()
            self._fused(fused, self.named(instruction.called), module, scatters=False)
            cost.add(self._overlapped(computation, instruction, fused))
            self._fusion_bytes(cost, computation, instruction)
        else:
            self._plain(cost, computation, instruction)
        share = Share(cost.flops, cost.hbm_bytes, cost.cycles)
        cost.product_cycles = share.cycles if share.flops else 0.0
        if share != Share():
            cost.modules[module or instruction.opcode] = share
        return cost

    def _plain(self, cost: Cost, computation: Computation, instruction: Instruction) -> None:
        """Adds an operation that is no fusion."""
        self._work(cost, computation, instruction)
        if found := collective(computation, instruction, self.mesh, self.links):
            cost.add(self._overlapped(computation, instruction, Cost(collectives=dict([found]))))
        opcode = instruction.opcode
        if opcode in _FREE or opcode.endswith(("-done", "-update")) or '"AllocateBuffer"' in instruction.attributes:
            return
        operands = [leaf for operand in computation.operands(instruction) for leaf in operand.leaves]
        outputs = list(instruction.leaves)
        if opcode == "copy-start":  # destination, source, context
            outputs = outputs[:1]
        elif opcode.endswith("-start"):  # operands, results, context
            outputs = outputs[len(operands) :]
        base = opcode.removesuffix("-start")
        if base in ("dynamic-slice", "slice", "gather"):  # reads as much as it writes
            operands[0] = dataclasses.replace(outputs[0], space=operands[0].space)
        elif base == "dynamic-update-slice":
            outputs = [dataclasses.replace(operands[1], space=operands[0].space)]
            operands = operands[1:]
        _move(cost, [*operands, *outputs])

    def _overlapped(self, computation: Computation, start: Instruction, cost: Cost) -> Cost:
        """``cost`` with the exposed bytes that the work between ``start`` and its end leaves of its collectives."""
        end = self.end(computation, start) if cost.collectives else None
        if end is None:
            return cost
        between = computation.instructions[computation.order[start.name] + 1 : computation.order[end.name]]
        # loops, calls and kernels have no cycles in the text, but take long enough to hide a collective
        unknown = any(i.opcode in ("while", "call", "conditional") or is_kernel(i) for i in between)
        beside = math.inf if unknown else sum(map(_cycles, between))
        exposed = {
            key: dataclasses.replace(
                traffic, exposed_bytes=max(0.0, traffic.exposed_bytes - beside * self.bytes_a_cycle[key.network])
            )
            for key, traffic in cost.collectives.items()
        }
        return dataclasses.replace(cost, collectives=exposed)

    def end(self, computation: Computation, start: Instruction) -> Instruction | None:
        """The instruction that awaits ``start``, None if it isn't asynchronous."""
        if start.opcode != "fusion":
            return next((user for user in computation.users.get(start.name, []) if user.opcode.endswith("-done")), None)
        chain = _chain(self.named(start.called), "AsyncCollectiveStart")
        later = computation.instructions[computation.order[start.name] + 1 :] if chain else []
        fusions = (i for i in later if i.opcode == "fusion")
        return next((i for i in fusions if _chain(self.named(i.called), "AsyncCollectiveDone") == chain), None)

    def _work(self, cost: Cost, computation: Computation, instruction: Instruction) -> None:
        """Adds the FLOPs of the instruction itself."""
        operands = computation.operands(instruction)
        if instruction.opcode == "dot":
            cost.flops += dot_flops(instruction, operands)
        elif instruction.opcode == "convolution":
            cost.flops += convolution_flops(instruction, operands)
        elif is_kernel(instruction):
            estimate = instruction.attribute(r'"cost_estimate":\s*\{[^}]*?"flops":\s*"?(\d+)')
            if estimate and int(estimate):
                cost.flops += int(estimate)
                cost.kernel_flops += int(estimate)
            else:
                name = module_of(instruction.op_name) or re.sub(r"[.\d]+$", "", instruction.name)
                cost.kernels[name] = cost.kernels.get(name, 0) + 1

    def _fused(self, cost: Cost, fused: Computation, owner: str, *, scatters: bool) -> None:
        """Adds the FLOPs and collectives inside a fusion.

        An asynchronous collective (it has a chain_id) appears in the fusion that starts it, in the one that ends it,
        and in every fusion that it overlaps, those of inner loops too; it counts in the first alone. The compiler
        writes a reduce-scatter as an all-reduce in a computation called all-reduce-scatter.

        Args:
            owner: module of collectives whose own metadata names none.
            scatters: an outer computation is called all-reduce-scatter.
        """
        scatters = scatters or fused.name.startswith("all-reduce-scatter")
        starts = _chain(fused, "AsyncCollectiveStart") is not None
        for instruction in fused.instructions:
            self._work(cost, fused, instruction)
            if instruction.opcode == "fusion" or (instruction.opcode == "call" and instruction.called):
                self._fused(cost, self.named(instruction.called), owner, scatters=scatters)
            elif found := collective(fused, instruction, self.mesh, self.links):
                if "chain_id=" in instruction.attributes and not starts:
                    continue
                key, traffic = found
                key = dataclasses.replace(key, module=key.module or owner)
                if scatters and key.kind == "all-reduce":
                    key = dataclasses.replace(key, kind="reduce-scatter")
                    half, seconds = traffic.wire_bytes / 2, traffic.seconds / 2
                    traffic = dataclasses.replace(traffic, wire_bytes=half, exposed_bytes=half, seconds=seconds)
                cost.collectives[key] = cost.collectives.get(key, Traffic()).plus(traffic, 1)

    def _fusion_bytes(self, cost: Cost, computation: Computation, instruction: Instruction) -> None:
        """Adds a fusion's reads and writes, without an asynchronous collective's buffers, which only pass through."""
        fused = self.named(instruction.called)
        outputs, operands = _passing(fused, instruction)
        for number, operand in enumerate(computation.operands(instruction)):
            if number in operands:
                continue
            whole = operand.leaves
            read = self._read(fused, fused.parameters[number].name) if number in fused.parameters else None
            if read is None or len(whole) != 1:
                _move(cost, whole)
            elif whole[0].space == 0:
                cost.hbm_bytes += min(read, whole[0].bytes)
        for number, (leaf, part) in enumerate(zip(instruction.leaves, _outputs(fused), strict=False)):
            if number in outputs:
                continue
            written = self._written(fused, part)
            if written is None:
                _move(cost, [leaf])
            elif leaf.space == 0:
                cost.hbm_bytes += min(written, leaf.bytes)

    def _read(self, fused: Computation, name: str) -> float | None:
        """Bytes that a fusion reads of its parameter ``name``; None: all."""
        total = 0.0
        for user in fused.users.get(name, []):
            first = user.operands[0] == name
            if user.opcode in ("dynamic-slice", "slice", "gather") and first:
                total += sum(leaf.bytes for leaf in user.leaves)
            elif user.opcode == "dynamic-update-slice" and first:
                pass  # updated in place: nothing is read
            else:
                part = None
                if user.opcode in ("bitcast", "reshape"):
                    part = self._read(fused, user.name)
                elif user.opcode == "fusion" and user.called:
                    inner = self.named(user.called)
                    part = self._read(inner, inner.parameters[user.operands.index(name)].name)
                if part is None:
                    return None
                total += part
        return total

    def _written(self, fused: Computation, part: Instruction) -> float | None:
        """Bytes that a fusion writes of its output ``part``; None: all."""
        if part.opcode == "dynamic-update-slice":
            update = fused.by_name.get(part.operands[1])
            return sum(leaf.bytes for leaf in update.leaves) if update else None
        if part.opcode in ("bitcast", "reshape") and part.operands[0] in fused.by_name:
            return self._written(fused, fused.by_name[part.operands[0]])
        if part.opcode == "fusion" and part.called:
            inner = self.named(part.called)
            return self._written(inner, inner.root)
        return None

    def body(self, loop: Instruction) -> Computation:
        return self.named(loop.attribute(r"body=%?([^\s,]+)"))

    def branches(self, instruction: Instruction) -> list[Computation]:
        """The computations among which a conditional chooses."""
        several = instruction.attribute(r"branch_computations=\{([^}]*)\}")
        pair = r"(?:true|false)_computation=%?([^\s,]+)"
        names = several.split(",") if several else re.findall(pair, instruction.attributes)
        return [self.named(name.strip().lstrip("%")) for name in names]

    def named(self, name: str | None) -> Computation:
        return self.module.computations[name or ""]


def _chain(fused: Computation, target: str) -> str | None:
    """The chain_id of the asynchronous collective that a fusion starts or ends, None if it doesn't.

    Args:
        target: ``AsyncCollectiveStart`` or ``AsyncCollectiveDone``.
    """
    if not any(i.opcode == "custom-call" and f'"{target}"' in i.attributes for i in fused.instructions):
        return None
    return next((chain for i in fused.instructions if (chain := i.attribute(r'chain_id="(\d+)"'))), "")


def _passing(fused: Computation, instruction: Instruction) -> tuple[set[int], set[int]]:
    """Numbers of a fusion's outputs, and of its operands, that are the buffers of a collective under way."""
    if not any("chain_id=" in i.attributes for i in fused.instructions):
        return set(), set()
    aliasing = instruction.attribute(r"output_to_operand_aliasing=(\{.*?\)\})") or ""
    pairs = re.findall(r"\{(\d*)\}: \((\d+),", aliasing)
    return {int(output or 0) for output, _ in pairs}, {int(operand) for _, operand in pairs}


def _cycles(instruction: Instruction) -> int:
    """The compiler's estimate, 0 if it has none."""
    cycles = int(instruction.attribute(r'"estimated_cycles":"?(\d+)') or 0)
    return cycles if cycles < _NO_CYCLES else 0


def _move(cost: Cost, moved: Iterable[Leaf]) -> None:
    """Adds the bytes of arrays that are read or written."""
    for leaf in moved:
        cost.hbm_bytes += leaf.hbm_bytes
        cost.host_bytes += leaf.host_bytes


def _outputs(fused: Computation) -> list[Instruction]:
    """The instructions that make a fusion's outputs."""
    return fused.operands(fused.root) if fused.root.opcode == "tuple" else [fused.root]
