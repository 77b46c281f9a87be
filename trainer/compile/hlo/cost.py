"""What one execution of a compiled module costs a chip: FLOPs, bytes, cycles, collectives, loops multiplied out.

The compiler's own totals count a loop's body once; here it counts as often as it runs. How each is counted:

- *FLOPs*: 2 × multiply-adds of dots and convolutions (the TPU compiler turns dots into those), from shapes; positions
  that only meet padding or dilation do no work and count nothing. A kernel (custom call) counts what its own cost
  estimate says, if it has one.
- *HBM bytes*: operands read and outputs written by each scheduled operation, unpadded, those in VMEM not counted.
  What happens inside a fusion stays on the chip. An operand that is only sliced counts its slices, an output that is
  updated in place its update.
- *Cycles*: the compiler's ``estimated_cycles``, where it is a number.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from trainer.compile.hlo.collectives import Collective, Traffic, collective, module_of
from trainer.compile.hlo.loops import trip_count
from trainer.compile.hlo.text import Computation, Instruction, Leaf, Module
from trainer.xla.chips import Chip

_FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"),
    *(
        "send",
        "recv",
        "opt-barrier",
        "optimization-barrier",
        "while",
        "call",
        "conditional",
        "domain",
        "add-dependency",
    ),
}


_NO_CYCLES = 2**62  # what the compiler writes where it has no estimate


@dataclass(frozen=True)
class Share:
    """What one module's operations take of a step."""

    flops: float = 0.0
    hbm_bytes: float = 0.0
    cycles: float = 0.0

    def plus(self, other: Share, times: float) -> Share:
        return Share(
            self.flops + times * other.flops,
            self.hbm_bytes + times * other.hbm_bytes,
            self.cycles + times * other.cycles,
        )


@dataclass
class Cost:
    """Of one computation, once."""

    flops: float = 0.0
    hbm_bytes: float = 0.0
    host_bytes: float = 0.0
    cycles: float = 0.0
    kernels: dict[str, float] = field(default_factory=dict)  # custom kernels without a cost estimate: whose → runs
    kernel_flops: float = 0.0  # of flops, what custom kernels said of themselves; they have no cycles
    modules: dict[str, Share] = field(default_factory=dict)
    loops: dict[str, int] = field(default_factory=dict)  # whose length depends on data: whose → trips assumed
    collectives: dict[Collective, Traffic] = field(default_factory=dict)

    def add(self, other: Cost, times: float = 1) -> None:
        self.flops += times * other.flops
        self.kernel_flops += times * other.kernel_flops
        self.hbm_bytes += times * other.hbm_bytes
        self.host_bytes += times * other.host_bytes
        self.cycles += times * other.cycles
        for name, runs in other.kernels.items():
            self.kernels[name] = self.kernels.get(name, 0) + times * runs
        for name, share in other.modules.items():
            self.modules[name] = self.modules.get(name, Share()).plus(share, times)
        self.loops.update(other.loops)
        for key, traffic in other.collectives.items():
            self.collectives[key] = self.collectives.get(key, Traffic()).plus(traffic, times)


def count(module: Module, mesh: dict[str, int], layers: int, chip: Chip) -> Cost:
    """Cost of one execution, per chip.

    Args:
        chip: its clock and links tell how much of a collective passes while something is computed.
        mesh: axis → size; collectives are attributed to axes.
        layers: trip count of an outermost loop whose own can't be read off its condition. Inner ones are taken to run
            once: their length depends on data, as that of a bounded exchange repeated until every token is served.
    """
    return _Counter(module, mesh, layers, chip).computation(module.entry)


class _Counter:
    """A computation's cost is worked out once, however often it is called."""

    def __init__(self, module: Module, mesh: dict[str, int], layers: int, chip: Chip) -> None:
        self.module, self.mesh, self.layers = module, mesh, layers
        self.bytes_a_cycle = {"ici": chip.ici_bandwidth / chip.clock, "dcn": chip.dcn_bandwidth / chip.clock}
        self.known: dict[str, Cost] = {}

    def computation(self, computation: Computation) -> Cost:
        if computation.name not in self.known:
            cost = Cost()
            for instruction in computation.instructions:
                self._instruction(cost, computation, instruction)
            self.known[computation.name] = cost
        return self.known[computation.name]

    def _instruction(self, cost: Cost, computation: Computation, instruction: Instruction) -> None:
        opcode = instruction.opcode
        if opcode == "while":
            body = self._named(instruction.attribute(r"body=%?([^\s,]+)"))
            trips = trip_count(self.module, computation, instruction)
            if trips is None:
                trips = self.layers if computation is self.module.entry else 1
                cost.loops[instruction.op_name or instruction.name] = trips
            cost.add(self.computation(body), trips)
        elif opcode == "conditional":
            cost.add(max((self.computation(b) for b in self._branches(instruction)), key=lambda c: (c.cycles, c.flops)))
        elif opcode in ("call", "call-start", "async-start"):
            cost.add(self._overlapped(computation, instruction, self.computation(self._named(instruction.called))))
        else:
            self._own(cost, computation, instruction)

    def _own(self, cost: Cost, computation: Computation, instruction: Instruction) -> None:
        """An operation that runs no other computation on its own; on its module's account."""
        before = Share(cost.flops, cost.hbm_bytes, cost.cycles)
        cost.cycles += _cycles(instruction)
        module = module_of(instruction.op_name)
        if instruction.opcode == "fusion":
            fused = Cost()
            self._fused(fused, self._named(instruction.called), module, scatters=False)
            cost.add(self._overlapped(computation, instruction, fused))
            self._fusion_bytes(cost, computation, instruction)
        else:
            self._plain(cost, computation, instruction)
        share = Share(cost.flops, cost.hbm_bytes, cost.cycles).plus(before, -1)
        if share != Share():
            name = module or instruction.opcode
            cost.modules[name] = cost.modules.get(name, Share()).plus(share, 1)

    def _plain(self, cost: Cost, computation: Computation, instruction: Instruction) -> None:
        self._work(cost, computation, instruction)
        if found := collective(computation, instruction, self.mesh):
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
        if base in ("dynamic-slice", "slice", "gather"):  # as much as comes out is read, from where the whole is
            operands[0] = dataclasses.replace(outputs[0], space=operands[0].space)
        elif base == "dynamic-update-slice":
            outputs = [dataclasses.replace(operands[1], space=operands[0].space)]
            operands = operands[1:]
        _move(cost, [*operands, *outputs])

    def _overlapped(self, computation: Computation, start: Instruction, cost: Cost) -> Cost:
        """``cost`` of ``start``, its collectives exposed by what passes after all that is scheduled beside them."""
        end = self._end(computation, start) if cost.collectives else None
        if end is None:
            return cost
        between = computation.instructions[computation.order[start.name] + 1 : computation.order[end.name]]
        unknown = any(i.opcode in ("while", "call", "conditional") or _is_kernel(i) for i in between)
        beside = math.inf if unknown else sum(map(_cycles, between))
        exposed = {
            key: dataclasses.replace(
                traffic, exposed_bytes=max(0.0, traffic.exposed_bytes - beside * self.bytes_a_cycle[key.network])
            )
            for key, traffic in cost.collectives.items()
        }
        return dataclasses.replace(cost, collectives=exposed)

    def _end(self, computation: Computation, start: Instruction) -> Instruction | None:
        """Where what ``start`` began ends, None if it is over at once."""
        if start.opcode != "fusion":
            return next((user for user in computation.users.get(start.name, []) if user.opcode.endswith("-done")), None)
        chain = _chain(self._named(start.called), "AsyncCollectiveStart")
        later = computation.instructions[computation.order[start.name] + 1 :] if chain else []
        fusions = (i for i in later if i.opcode == "fusion")
        return next((i for i in fusions if _chain(self._named(i.called), "AsyncCollectiveDone") == chain), None)

    def _work(self, cost: Cost, computation: Computation, instruction: Instruction) -> None:
        """FLOPs of the instruction itself."""
        operands = computation.operands(instruction)
        if instruction.opcode == "dot":
            cost.flops += _dot_flops(instruction, operands)
        elif instruction.opcode == "convolution":
            cost.flops += _convolution_flops(instruction, operands)
        elif _is_kernel(instruction):
            estimate = instruction.attribute(r'"cost_estimate":\s*\{[^}]*?"flops":\s*"?(\d+)')
            if estimate and int(estimate):
                cost.flops += int(estimate)
                cost.kernel_flops += int(estimate)
            else:
                name = module_of(instruction.op_name) or re.sub(r"[.\d]+$", "", instruction.name)
                cost.kernels[name] = cost.kernels.get(name, 0) + 1

    def _fused(self, cost: Cost, fused: Computation, owner: str, *, scatters: bool) -> None:
        """FLOPs and collectives inside a fusion.

        An asynchronous collective (it has a chain_id) shows in the fusion that starts it, in all that it overlaps,
        inner loops' too, and in the one that ends it: only the start counts. An all-reduce in a computation called
        all-reduce-scatter is the compiler's reduce-scatter.
        """
        scatters = scatters or fused.name.startswith("all-reduce-scatter")
        starts = _chain(fused, "AsyncCollectiveStart") is not None
        for instruction in fused.instructions:
            self._work(cost, fused, instruction)
            if instruction.opcode == "fusion" or (instruction.opcode == "call" and instruction.called):
                self._fused(cost, self._named(instruction.called), owner, scatters=scatters)
            elif found := collective(fused, instruction, self.mesh):
                if "chain_id=" in instruction.attributes and not starts:
                    continue
                key, traffic = found
                key = dataclasses.replace(key, module=key.module or owner)
                if scatters and key.kind == "all-reduce":
                    key = dataclasses.replace(key, kind="reduce-scatter")
                    half = traffic.wire_bytes / 2
                    traffic = dataclasses.replace(traffic, wire_bytes=half, exposed_bytes=half)
                cost.collectives[key] = cost.collectives.get(key, Traffic()).plus(traffic, 1)

    def _fusion_bytes(self, cost: Cost, computation: Computation, instruction: Instruction) -> None:
        fused = self._named(instruction.called)
        for number, operand in enumerate(computation.operands(instruction)):
            whole = operand.leaves
            read = self._read(fused, fused.parameters[number].name) if number in fused.parameters else None
            if read is None or len(whole) != 1:
                _move(cost, whole)
            elif whole[0].space == 0:
                cost.hbm_bytes += min(read, whole[0].bytes)
        for leaf, part in zip(instruction.leaves, _outputs(fused), strict=False):
            written = self._written(fused, part)
            if written is None:
                _move(cost, [leaf])
            elif leaf.space == 0:
                cost.hbm_bytes += min(written, leaf.bytes)

    def _read(self, fused: Computation, name: str) -> float | None:
        """Bytes read of a fused parameter, None: all of it."""
        total = 0.0
        for user in fused.users.get(name, []):
            first = user.operands[0] == name
            if user.opcode in ("dynamic-slice", "slice", "gather") and first:
                total += sum(leaf.bytes for leaf in user.leaves)
            elif user.opcode == "dynamic-update-slice" and first:
                pass  # stays where it is
            elif user.opcode in ("bitcast", "reshape"):
                part = self._read(fused, user.name)
                if part is None:
                    return None
                total += part
            elif user.opcode == "fusion" and user.called:
                inner = self._named(user.called)
                part = self._read(inner, inner.parameters[user.operands.index(name)].name)
                if part is None:
                    return None
                total += part
            else:
                return None
        return total

    def _written(self, fused: Computation, part: Instruction) -> float | None:
        """Bytes written of a fusion's output, None: all of it."""
        if part.opcode == "dynamic-update-slice":
            update = fused.by_name.get(part.operands[1])
            return sum(leaf.bytes for leaf in update.leaves) if update else None
        if part.opcode in ("bitcast", "reshape") and part.operands[0] in fused.by_name:
            return self._written(fused, fused.by_name[part.operands[0]])
        if part.opcode == "fusion" and part.called:
            inner = self._named(part.called)
            return self._written(inner, inner.root)
        return None

    def _branches(self, instruction: Instruction) -> list[Computation]:
        several = instruction.attribute(r"branch_computations=\{([^}]*)\}")
        names = (
            several.split(",")
            if several
            else re.findall(r"(?:true|false)_computation=%?([^\s,]+)", instruction.attributes)
        )
        return [self._named(name.strip().lstrip("%")) for name in names]

    def _named(self, name: str | None) -> Computation:
        return self.module.computations[name or ""]


def _chain(fused: Computation, target: str) -> str | None:
    """The chain_id of the asynchronous collective that a fusion starts or ends, None if it holds no such call."""
    if not any(i.opcode == "custom-call" and f'"{target}"' in i.attributes for i in fused.instructions):
        return None
    return next((chain for i in fused.instructions if (chain := i.attribute(r'chain_id="(\d+)"'))), "")


def _cycles(instruction: Instruction) -> int:
    cycles = int(instruction.attribute(r'"estimated_cycles":"?(\d+)') or 0)
    return cycles if cycles < _NO_CYCLES else 0


def _is_kernel(instruction: Instruction) -> bool:
    return instruction.opcode == "custom-call" and "tpu_custom_call" in instruction.attributes


def _move(cost: Cost, moved: Iterable[Leaf]) -> None:
    for leaf in moved:
        cost.hbm_bytes += leaf.hbm_bytes
        cost.host_bytes += leaf.host_bytes


def _outputs(fused: Computation) -> list[Instruction]:
    return fused.operands(fused.root) if fused.root.opcode == "tuple" else [fused.root]


def _dot_flops(dot: Instruction, operands: list[Instruction]) -> float:
    contracted = dot.attribute(r"lhs_contracting_dims=\{([\d,]*)\}") or ""
    left = operands[0].leaves[0].dims
    return 2.0 * dot.leaves[0].elements * math.prod(left[int(d)] for d in contracted.split(",") if d)


def _convolution_flops(convolution: Instruction, operands: list[Instruction]) -> float:
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", convolution.attributes)
    if labels is None or len(operands) < 2:
        return 0.0
    left, right, out = (
        dict(zip(text, leaf.dims, strict=False))
        for text, leaf in zip(
            labels.groups(), (operands[0].leaves[0], operands[1].leaves[0], convolution.leaves[0]), strict=True
        )
    )
    window = convolution.attribute(r"window=\{([^}]*)\}") or ""
    batch_groups = int(convolution.attribute(r"batch_group_count=(\d+)") or 1)
    work = left["b"] / batch_groups * right["i"] * right["o"]
    for number, dimension in enumerate(sorted(key for key in right if key.isdigit())):
        stride, left_dilation, right_dilation = (
            int(_window(window, key, number, "1")) for key in ("stride", "lhs_dilate", "rhs_dilate")
        )
        low = int(_window(window, "pad", number, "0_0").split("_")[0])
        work *= _valid(left[dimension], out[dimension], right[dimension], stride, low, left_dilation, right_dilation)
    return 2.0 * work


def _window(window: str, key: str, number: int, default: str) -> str:
    match = re.search(rf"(?:^|\s){key}=(\S+)", window)
    return match[1].split("x")[number] if match else default


@lru_cache(maxsize=4096)
def _valid(size: int, out: int, kernel: int, stride: int, low: int, left_dilation: int, right_dilation: int) -> int:
    """Pairs of output and kernel positions that meet an element of the input, not padding, not dilation's holes."""
    position = np.arange(out)[:, None] * stride + np.arange(kernel)[None, :] * right_dilation - low
    inside = (position >= 0) & (position <= (size - 1) * left_dilation) & (position % left_dilation == 0)
    return int(inside.sum())
