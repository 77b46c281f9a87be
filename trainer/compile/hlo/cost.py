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
import functools
import itertools
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from shardwright.compile.hlo.communication import Collective, Traffic, collective, module_of
from shardwright.compile.hlo.flops import convolution_flops, dot_flops
from shardwright.compile.hlo.kernels import is_kernel, told_of
from shardwright.compile.hlo.links import Links
from shardwright.compile.hlo.text import HBM, HOST, Computation, Instruction, Leaf
from shardwright.compile.hlo.trip_counts import trip_count

_FREE = {  # opcodes that move no bytes of their own
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"),
    *("send", "recv", "opt-barrier", "optimization-barrier", "while", "call", "conditional"),
    *("domain", "add-dependency"),
}
_SLICES, _VIEWS = ("dynamic-slice", "slice", "gather"), ("bitcast", "reshape")
_NO_CYCLES = 2**62  # the compiler writes at least this where it has no estimate


@dataclass
class Cost:
    """The cost of one run of a computation."""

    flops: float = 0.0
    hbm_bytes: float = 0.0
    host_bytes: float = 0.0
    cycles: float = 0.0
    product_cycles: float = 0.0  # of `cycles`, those in operations that multiply matrices
    kernels: dict[str, float] = field(default_factory=dict)  # without a cost estimate: module → runs
    kernel_flops: float = 0.0  # of `flops`, those in custom kernels' cost estimates; kernels have no cycles
    modules: dict[str, Cost] = field(default_factory=dict)  # module → its part of FLOPs, HBM bytes and cycles
    loops: dict[str, int] = field(default_factory=dict)  # whose length depends on data: op_name → runs assumed
    collectives: dict[Collective, Traffic] = field(default_factory=dict)

    def add(self, other: Cost, times: float = 1) -> None:
        """Adds ``times`` the other in place; at 0 nothing, no key either."""
        if times == 0:
            return
        for name in ("flops", "kernel_flops", "hbm_bytes", "host_bytes", "cycles", "product_cycles"):
            setattr(self, name, getattr(self, name) + times * getattr(other, name))
        for name, runs in other.kernels.items():
            self.kernels[name] = self.kernels.get(name, 0) + times * runs
        for name, part in other.modules.items():
            self.modules.setdefault(name, Cost()).add(part, times)
        self.loops.update(other.loops)
        for key, traffic in other.collectives.items():
            self.collectives[key] = self.collectives.get(key, Traffic()).plus(traffic, times)


def count(entry: Computation, mesh: dict[str, int], layers: int, links: Links) -> Cost:
    """The cost of one execution, per chip; arguments as of :class:`Counter`."""
    return Counter(mesh, layers, links).computation(entry)


class Counter:
    """Counts each computation's cost once, however often it is called.

    An outermost loop of unknown length is assumed to run ``layers`` times. Inner ones are assumed to run once: their
    length depends on data, as in an exchange that is repeated until every token is served. The clock of the chip and
    the bandwidths of its ``links`` decide how much of a collective is hidden by computation.
    """

    def __init__(self, mesh: dict[str, int], layers: int, links: Links) -> None:
        self.mesh, self.layers, self.links, self.chip = mesh, layers, links, links.topology.chip
        bandwidths = {"ici": self.chip.ici_bandwidth, "dcn": self.chip.dcn_bandwidth}
        self.bytes_a_cycle = {network: bandwidth / self.chip.clock for network, bandwidth in bandwidths.items()}
        self.computation = functools.cache(self._computation)
        self.own = functools.cache(self._own)

    def _computation(self, computation: Computation) -> Cost:
        """The cost of one run."""
        cost = Cost()
        for instruction in computation.instructions:
            cost.add(self._overlapped(instruction, self._instruction(instruction)))
        return cost

    def _instruction(self, instruction: Instruction) -> Cost:
        """The cost of an instruction with the computations that it runs; of a conditional's branches, the dearest."""
        if instruction.opcode == "while":
            trips, assumed = self.trips(instruction)
            cost = Cost(loops={instruction.op_name or instruction.name: trips} if assumed else {})
            cost.add(self.computation(*instruction.called), trips)
            return cost
        # a newer libtpu wraps what it gives to the sparse cores in a custom call
        wraps = instruction.opcode == "custom-call" and ", called_computations={" in instruction.attributes
        if wraps or instruction.opcode in ("conditional", "call", "call-start", "async-start"):
            return max(map(self.computation, instruction.called), key=lambda c: (c.cycles, c.flops))
        return self.own(instruction)

    def trips(self, loop: Instruction) -> tuple[int, bool]:
        """(trip count of a loop, whether it is assumed)."""
        if (known := trip_count(loop)) is not None:
            return known, False
        return self.layers if loop.computation.entry else 1, True

    def _own(self, instruction: Instruction) -> Cost:
        """The cost of an instruction that is one scheduled operation; all of its collectives' bytes are exposed."""
        cost = Cost(cycles=_cycles(instruction))
        module = module_of(instruction.op_name)
        if instruction.opcode == "fusion":
            self._fused(cost, instruction, module, scatters=False)
            _fusion_bytes(cost, instruction)
        else:
            self._plain(cost, instruction)
        cost.product_cycles = cost.cycles if cost.flops else 0.0
        if cost.flops or cost.hbm_bytes or cost.cycles:
            cost.modules[module or instruction.opcode] = Cost(cost.flops, cost.hbm_bytes, cycles=cost.cycles)
        return cost

    def _plain(self, cost: Cost, instruction: Instruction) -> None:
        _work(cost, instruction)
        if found := collective(instruction, self.mesh, self.links):
            cost.collectives.update([found])
        opcode = instruction.opcode
        if opcode in _FREE or opcode.endswith(("-done", "-update")) or '"AllocateBuffer"' in instruction.attributes:
            return
        operands, outputs = instruction.inputs, list(instruction.leaves)
        if opcode == "copy-start":  # destination, source, context
            outputs = outputs[:1]
        elif opcode.endswith("-start"):  # operands, results, context
            outputs = outputs[len(operands) :]
        base = opcode.removesuffix("-start")
        if base in _SLICES:  # reads as much as it writes
            operands[0] = dataclasses.replace(outputs[0], space=operands[0].space)
        elif base == "dynamic-update-slice":
            outputs = [dataclasses.replace(operands[1], space=operands[0].space)]
            operands = operands[1:]
        _move(cost, [*operands, *outputs])

    def _overlapped(self, start: Instruction, cost: Cost) -> Cost:
        """``cost`` with the exposed bytes that the work between ``start`` and its end leaves of its collectives."""
        end = awaiting(start) if cost.collectives else None
        if end is None:
            return cost
        between = list(itertools.takewhile(lambda instruction: instruction is not end, start.later))
        # loops, calls and kernels have no cycles in the text, but take long enough to hide a collective
        unknown = any(i.opcode in ("while", "call", "conditional") or is_kernel(i) for i in between)
        beside = math.inf if unknown else sum(map(_cycles, between))
        collectives = {}
        for key, traffic in cost.collectives.items():
            left = max(0.0, traffic.exposed_bytes - beside * self.bytes_a_cycle[key.network])
            collectives[key] = dataclasses.replace(traffic, exposed_bytes=left)
        return dataclasses.replace(cost, collectives=collectives)

    def _fused(self, cost: Cost, fusion: Instruction, owner: str, *, scatters: bool) -> None:
        """Adds the FLOPs and collectives inside a fusion; of the module ``owner`` if their own metadata name none.

        An asynchronous collective (it has a chain_id) appears in the fusion that starts it, in the one that ends it,
        and in every fusion that it overlaps, those of inner loops too; it counts in the first alone. The compiler
        writes a reduce-scatter as an all-reduce in a computation called all-reduce-scatter: here or outside, it
        ``scatters``.
        """
        (fused,) = fusion.called
        scatters = scatters or fused.name.startswith("all-reduce-scatter")
        starts = _chain(fusion, "AsyncCollectiveStart") is not None
        for instruction in fused.instructions:
            _work(cost, instruction)
            if instruction.opcode in ("fusion", "call"):
                self._fused(cost, instruction, owner, scatters=scatters)
            elif found := collective(instruction, self.mesh, self.links):
                if "chain_id=" in instruction.attributes and not starts:
                    continue
                key, traffic = found
                key = dataclasses.replace(key, module=key.module or owner)
                if scatters and key.kind == "all-reduce":
                    key = dataclasses.replace(key, kind="reduce-scatter")
                    half = traffic.wire_bytes / 2
                    traffic = Traffic(traffic.count, traffic.bytes, half, half, traffic.seconds / 2)
                cost.collectives[key] = cost.collectives.get(key, Traffic()).plus(traffic, 1)


def awaiting(start: Instruction) -> Instruction | None:
    """The instruction that awaits ``start``, None if it isn't asynchronous."""
    if start.opcode != "fusion":
        updates = (awaiting(user) for user in start.users if user.opcode.endswith("-update"))
        return next((user for user in start.users if user.opcode.endswith("-done")), None) or next(updates, None)
    chain = _chain(start, "AsyncCollectiveStart")
    later = start.later if chain else []
    return next((i for i in later if i.opcode == "fusion" and _chain(i, "AsyncCollectiveDone") == chain), None)


def _chain(fusion: Instruction, target: str) -> str | None:
    """The chain_id of the collective that a fusion starts or ends, if any (AsyncCollectiveStart or -Done)."""
    (fused,) = fusion.called
    if not any(i.opcode == "custom-call" and f'"{target}"' in i.attributes for i in fused.instructions):
        return None
    return next((chain for i in fused.instructions if (chain := i.attribute(r'chain_id="(\d+)"'))), "")


def _work(cost: Cost, instruction: Instruction) -> None:
    """Adds the FLOPs of a product, or of a kernel that tells them."""
    if instruction.opcode == "dot":
        cost.flops += dot_flops(instruction)
    elif instruction.opcode == "convolution":
        cost.flops += convolution_flops(instruction)
    elif is_kernel(instruction):
        estimate = instruction.attribute(r'"cost_estimate":\s*\{[^}]*?"flops":\s*"?(\d+)')
        if flops := int(estimate or 0) * told_of(instruction):
            cost.flops += flops
            cost.kernel_flops += flops
        else:
            name = module_of(instruction.op_name) or re.sub(r"[.\d]+$", "", instruction.name)
            cost.kernels[name] = cost.kernels.get(name, 0) + 1


def _fusion_bytes(cost: Cost, fusion: Instruction) -> None:
    """Adds a fusion's reads and writes, without an asynchronous collective's buffers, which only pass through."""
    (fused,) = fusion.called
    passing_outputs, passing_operands = _passing(fused, fusion)
    moved: list[tuple[tuple[Leaf, ...], float | None]] = []  # (arrays, bytes of them that are moved; None: all)
    for number, operand in enumerate(fusion.operands):
        if number not in passing_operands:
            moved.append((operand.leaves, _read(fused.parameters[number])))
    parts = fused.root.operands if fused.root.opcode == "tuple" else [fused.root]
    for number, (leaf, part) in enumerate(zip(fusion.leaves, parts, strict=False)):
        if number not in passing_outputs:
            moved.append(((leaf,), _written(part)))
    for arrays, part_bytes in moved:
        if part_bytes is None or len(arrays) != 1:
            _move(cost, arrays)
        elif arrays[0].space == HBM:
            cost.hbm_bytes += min(part_bytes, arrays[0].bytes)


def _read(value: Instruction) -> float | None:
    """Bytes that a fusion reads of its parameter, or of a view of it; None: all."""
    total = 0.0
    for user in value.users:
        first = user.names[0] == value.name
        part: float | None = None
        if user.opcode in _SLICES and first:
            part = sum(leaf.bytes for leaf in user.leaves)
        elif user.opcode == "dynamic-update-slice" and first:
            part = 0  # updated in place: nothing is read
        elif user.opcode in _VIEWS:
            part = _read(user)
        elif user.opcode == "fusion":
            (inner,) = user.called
            part = _read(inner.parameters[user.names.index(value.name)])
        if part is None:
            return None
        total += part
    return total


def _written(part: Instruction) -> float | None:
    """Bytes that a fusion writes of its output ``part``; None: all."""
    if part.opcode == "dynamic-update-slice":
        return sum(leaf.bytes for leaf in part.operands[1].leaves)
    if part.opcode in _VIEWS and part.operands:
        return _written(part.operands[0])
    if part.opcode == "fusion":
        (inner,) = part.called
        return _written(inner.root)
    return None


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
    for leaf in moved:
        if leaf.space == HBM:
            cost.hbm_bytes += leaf.bytes
        elif leaf.space == HOST:
            cost.host_bytes += leaf.bytes
