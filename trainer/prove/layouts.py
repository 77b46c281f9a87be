"""Static checks of a layout: what each device holds whole though it could be cut; what the step gathers and sums.

The first reads the run's own plan, at full size. The second reads the program that XLA made of the small step.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from shardwright.compile.hlo.communication import collective, replica_groups
from shardwright.compile.hlo.text import Computation, Instruction, parse
from shardwright.layout.plan import ParameterPlan, ShardingPlan
from shardwright.layout.plan_warnings import plan_warnings
from shardwright.report.units import size

_SHARE = 0.01  # of what a device holds, below which a replicated weight is nothing to speak of
_SUMS = ("all-reduce", "reduce-scatter")
# a value passes through these unchanged, element by element
_PASSING = {"bitcast", "copy", "convert", "reshape", "transpose", "get-tuple-element", "bitcast-convert"}


def plan_findings(plan: ShardingPlan) -> Iterator[str]:
    """A text for each thing that a device holds whole and need not, the largest first."""
    yield from plan_warnings(plan)
    held = sum(entry.bytes_per_device for entry in plan.parameters)
    wasted: Counter[str] = Counter()
    largest: dict[str, tuple[int, str]] = {}  # pattern → (bytes, text) of its largest parameter
    for entry in plan.parameters:
        axes = [axis for axis, count in plan.mesh.items() if count > 1 and axis not in entry.layout]
        cut = _could_be_cut(entry, plan, axes)
        if cut is not None and entry.layout:  # what is wholly replicated is among the warnings
            axis, dim, shape = cut
            wasted[entry.pattern] += entry.bytes_per_device
            text = f"each device along {axis} holds the same; dimension {dim} of {shape} could be cut"
            largest[entry.pattern] = max(largest.get(entry.pattern, (0, "")), (entry.bytes_per_device, text))
    for pattern, count in wasted.most_common():
        if count > _SHARE * held:
            yield f"{pattern}: {largest[pattern][1]} ({size(count)} of {size(held)} a device)"


def _could_be_cut(entry: ParameterPlan, plan: ShardingPlan, axes: list[str]) -> tuple[str, int, list[int]] | None:
    """The first axis that could cut a dimension of the parameter, the dimension, and the shape."""
    for axis in axes:
        for dim, local in enumerate(entry.local_shape):
            if local % plan.mesh[axis] == 0 and local > plan.mesh[axis]:
                return axis, dim, list(entry.shape)
    return None


def step_program(folder: Path) -> Computation | None:
    """The largest program that XLA has dumped to ``folder``: the step's. None: there is none."""
    found = max(folder.glob("*after_optimizations.txt"), key=lambda path: path.stat().st_size, default=None)
    return None if found is None else parse(found.read_text())


def collectives(program: Computation, mesh: dict[str, int]) -> list[tuple[str, str, str, int, int]]:
    """(kind, axes, module, how many, bytes of all) of the collectives in the program's text, the largest first."""
    counts: Counter[tuple[str, str, str]] = Counter()
    moved: Counter[tuple[str, str, str]] = Counter()
    for instruction in _instructions(program):
        if (found := collective(instruction, mesh)) is not None:
            key = found[0].kind, found[0].axis, found[0].module
            counts[key] += 1
            moved[key] += int(found[1].bytes)
    return [(*key, counts[key], total) for key, total in moved.most_common()]


def summed_twice(program: Computation, mesh: Mapping[str, int]) -> Iterator[str]:
    """A text for each sum over devices of what is already summed over some of them."""
    devices = math.prod(mesh.values())
    for instruction in filter(_is_sum, _instructions(program)):
        own = {frozenset(group) for group in replica_groups(instruction.attributes, devices)}
        for before in _behind(instruction):
            if not _is_sum(before) or before.opcode.startswith("reduce-scatter"):
                continue
            theirs = [frozenset(group) for group in replica_groups(before.attributes, devices)]
            if any(len(a & b) > 1 for a in own for b in theirs):
                yield f"{instruction.name} ({instruction.op_name or instruction.shape}) sums {before.name} again"


def _instructions(program: Computation) -> Iterator[Instruction]:
    return itertools.chain.from_iterable(computation.instructions for computation in program.module.values())


def _is_sum(instruction: Instruction) -> bool:
    if instruction.opcode.removesuffix("-start") not in _SUMS:
        return False
    called = instruction.computation.module.get(instruction.attribute(r"to_apply=%?([\w.\-]+)") or "")
    return called is not None and called.root.opcode == "add"


def _behind(instruction: Instruction) -> Iterator[Instruction]:
    """The instructions whose very values are an operand of ``instruction``."""
    left = instruction.operands
    while left:
        found = left.pop()
        if found.opcode in _PASSING:
            left += found.operands
        else:
            yield found
