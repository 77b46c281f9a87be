"""Time of one execution of a compiled module on a chip: operations one after another, collectives beside them.

- An operation with products takes the longest of the compiler's cycles, its bytes over the HBM's bandwidth, and its
  FLOPs over the peak.
- Any other takes its bytes over the bandwidth, or the compiler's cycles if it moves nothing in the HBM. The cycles of
  operations that only move or map elements say several times as much; published step times agree with the bytes
  (docs/estimate.md).
- A kernel of ours takes its FLOPs over the peak or its bytes over the bandwidth, at the efficiency of its kind.
- Each of these at a part of the peak that :mod:`shardwright.compile.hlo.efficiency` has for its kind and size.
- Asynchronous collectives use their network one after another, as scheduled; one that the compiler runs alone shares
  it with the one under way. Whatever is unsent when the schedule awaits it is time in which nothing is computed.
- Copies to and from the host's memory use the link to the host in the same way. Asynchronous copies between HBM and
  VMEM take no time.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import NamedTuple

from shardwright.compile.hlo.communication import module_of
from shardwright.compile.hlo.cost import Cost, Counter, awaiting
from shardwright.compile.hlo.efficiency import Reached
from shardwright.compile.hlo.kernels import is_kernel, kernel_work
from shardwright.compile.hlo.text import Computation, Instruction

# a network's name stands for waiting: something is sent while nothing is computed
CAUSES = {
    "products": "matrix products",
    "attention_forward": "attention, forward",
    "attention_backward": "attention, backward",
    "grouped": "grouped products of experts",
    "rest": "element by element, and copies",
    "ici": "waiting for chips of the slice",
    "dcn": "waiting for other slices",
    "host": "waiting for the host's memory",
    "trace": "waiting for the host's program",
}


# lanes beside the networks: of operations and of waiting, and of the moment at which each instruction begins
CHIP, BEGUN = "chip", "begun"


class Mark(NamedTuple):
    """A stretch of a run, in seconds from its beginning: of one operation or transfer, or of ``times`` runs inside.

    A transfer's is as it was queued: what shares its link with it later may make it longer.
    """

    lane: str
    cause: str
    start: float
    seconds: float  # of one of `times`
    name: str
    inside: Run | None = None
    times: int = 1


@dataclass
class Run:
    """One run of a computation so far: its seconds by cause, its transfers, and the order in which all that ran."""

    seconds: dict[str, float] = field(default_factory=dict)
    until: dict[str, float] = field(default_factory=dict)  # network → when all that was started is sent
    # name of the awaiting instruction → (network, when its transfer is done)
    awaited: dict[str, list[tuple[str, float]]] = field(default_factory=dict)
    marks: list[Mark] = field(default_factory=list)

    @property
    def now(self) -> float:
        return sum(self.seconds.values())

    def add(self, cause: str, seconds: float, name: str = "") -> None:
        if seconds > 0:
            self.marks.append(Mark(CHIP, cause, self.now, seconds, name))
            self.seconds[cause] = self.seconds.get(cause, 0.0) + seconds

    def add_all(self, other: Run, times: int = 1, name: str = "") -> None:
        self.marks.append(Mark(CHIP, "", self.now, other.now, name, other, times))
        for cause, seconds in other.seconds.items():
            self.seconds[cause] = self.seconds.get(cause, 0.0) + times * seconds

    def sends(self, network: str, start: float, seconds: float, name: str) -> None:
        """Marks a transfer."""
        self.marks.append(Mark(network, network, start, seconds, name))

    def delay(self, network: str, seconds: float) -> None:
        """Makes the network's pending transfers end later."""
        now = self.now
        if self.until.get(network, 0.0) > now:
            self.until[network] += seconds
        for ends in self.awaited.values():
            ends[:] = [(each, end + seconds if each == network and end > now else end) for each, end in ends]


class Schedule:
    """The runs of a module's computations, each timed once, however often it is called."""

    def __init__(self, counter: Counter, reached: Reached) -> None:
        self.counter, self.chip, self.reached = counter, counter.chip, reached
        self.bandwidth = self.chip.hbm_bandwidth * reached("hbm")
        self.computation = functools.cache(self._computation)

    def _computation(self, computation: Computation) -> Run:
        run = Run()
        for instruction in computation.instructions:
            run.marks.append(Mark(BEGUN, "", run.now, 0.0, instruction.name))
            for network, end in run.awaited.pop(instruction.name, ()):
                run.add(network, end - run.now, instruction.name)
            self._instruction(run, instruction)
        return run

    def _instruction(self, run: Run, instruction: Instruction) -> None:
        opcode = instruction.opcode
        if opcode == "while":
            trips, _ = self.counter.trips(instruction)
            name = instruction.op_name or instruction.name
            run.add_all(self.computation(*instruction.called), trips, name)
        elif opcode in ("conditional", "call"):
            run.add_all(max(map(self.computation, instruction.called), key=lambda branch: branch.now))
        elif opcode in ("call-start", "async-start"):
            self._send(run, instruction, self.counter.computation(*instruction.called))
        else:
            own = self.counter.own(instruction)
            self._send(run, instruction, own)
            if not opcode.endswith(("-start", "-done")):
                name = module_of(instruction.op_name) or instruction.name
                run.add(*self._operation(instruction, own), name)

    def _operation(self, instruction: Instruction, own: Cost) -> tuple[str, float]:
        """(cause, seconds) of an operation."""
        chip, moved = self.chip, own.hbm_bytes / self.bandwidth
        if is_kernel(instruction) and (work := kernel_work(instruction, chip.flops_a_byte)):
            if not work.flops:
                return "rest", work.hbm_bytes / self.bandwidth
            reached = self.reached(work.kind, work.size) * work.filled(chip.mxu)
            seconds = max(work.flops / (chip.flops * reached), work.hbm_bytes / self.bandwidth)
            return ("grouped" if work.kind.endswith("gmm") else work.kind), seconds
        if own.kernel_flops:  # another's kernel, with a cost estimate
            return "grouped", own.kernel_flops / (chip.flops * self.reached("gmm"))
        if own.collectives and not own.cycles:  # it moves the collective's bytes alone
            return "rest", 0.0
        cycles = own.cycles / (chip.clock * self.reached("compiler"))
        if own.flops:
            return "products", max(cycles, moved, own.flops / chip.flops)
        return "rest", moved or cycles

    def _send(self, run: Run, instruction: Instruction, own: Cost) -> None:
        """Queues an instruction's transfers; without a later instruction that awaits them, the schedule does."""
        sent = [
            (
                key.network,
                traffic.seconds / self.reached(key.network, traffic.wire_bytes / max(traffic.count, 1)),
                f"{key.kind} over {key.axis}: {key.module or instruction.name}",
            )
            for key, traffic in own.collectives.items()
        ]
        if own.host_bytes:
            seconds = own.host_bytes / (self.chip.host_bandwidth * self.reached("host"))
            sent.append(("host", seconds, f"to or from the host: {instruction.name}"))
        end = awaiting(instruction) if sent else None
        for network, seconds, name in sent:
            left = max(run.until.get(network, 0.0) - run.now, 0.0)
            if end is None:  # shares the links with earlier transfers, which end so much later
                run.delay(network, seconds)
                run.sends(network, run.now, seconds + min(seconds, left), name)
                run.add(network, seconds + min(seconds, left), name)
            else:
                run.sends(network, run.now + left, seconds, name)
                run.until[network] = run.now + left + seconds
                run.awaited.setdefault(end.name, []).append((network, run.until[network]))
