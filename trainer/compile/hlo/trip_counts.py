"""Trip counts of a compiled module's loops, from condition and body."""

import dataclasses

from shardwright.compile.hlo.text import Instruction

_VIEWS = {"bitcast", "copy", "bitcast-convert", "convert", "reshape"}


def trip_count(loop: Instruction) -> int | None:
    """The trip count of a while loop, None if it depends on data.

    The compiler's annotation if there is one; else from the counter's start and step, and the constant that the
    condition compares it with. A 64-bit counter is compared in two halves: the one with a limit above 0 counts.
    """
    if known := loop.attribute(r'"known_trip_count":\{"n":"(\d+)"'):
        return int(known)
    condition = loop.computation.module[loop.attribute(r"condition=%?([^\s,]+)") or ""]
    (body,) = loop.called
    found = []
    for compare in condition.instructions:
        index, bound = _limit(_unfused(compare))
        if bound > 0:
            start = _constant(_element(loop.operands[0], index)) or 0
            found.append(-(-(bound - start) // _step(body.root, index)))
    return max(found, default=None)


def _unfused(instruction: Instruction) -> Instruction:
    """Replaces a fusion of one comparison by that comparison, over the fusion's operands."""
    if instruction.opcode != "fusion":
        return instruction
    (fused,) = instruction.called
    names = {parameter.name: instruction.names[number] for number, parameter in fused.parameters.items()}
    if fused.root.opcode != "compare" or any(name not in names for name in fused.root.names):
        return instruction
    operands = [names[name] for name in fused.root.names]
    return dataclasses.replace(fused.root, computation=instruction.computation, names=operands)


def _limit(compare: Instruction) -> tuple[int, int]:
    """(index, bound) if ``compare`` is ``state[index] < bound`` with a constant bound (≤: one more), else (0, 0)."""
    direction = compare.attribute(r"direction=(\w+)")
    if compare.opcode != "compare" or direction not in ("LT", "LE"):
        return 0, 0
    counter, bound = map(_behind, compare.operands)
    if counter.opcode != "get-tuple-element" or (limit := _constant(bound)) is None:
        return 0, 0
    return int(counter.attribute(r"index=(\d+)") or 0), limit + (direction == "LE")


def _step(state: Instruction, index: int) -> int:
    """The positive constant that a body's result adds to ``state[index]``; 1 if it does anything else with it."""
    value = _element(state, index)
    terms = map(_behind, value.operands) if value is not None and value.opcode == "add" else ()
    steps = [step for term in terms if (step := _constant(term)) is not None]
    return steps[0] if len(steps) == 1 and steps[0] > 0 else 1


def _element(state: Instruction, index: int) -> Instruction | None:
    """The instruction that makes ``state[index]``; None if ``state`` is no tuple of so many."""
    if state.opcode != "tuple" or index >= len(state.operands):
        return None
    return _behind(state.operands[index])


def _constant(instruction: Instruction | None) -> int | None:
    return int(instruction.arguments) if instruction is not None and instruction.opcode == "constant" else None


def _behind(instruction: Instruction) -> Instruction:
    """The instruction, followed through copies and views."""
    while instruction.opcode in _VIEWS and instruction.operands:
        instruction = instruction.operands[0]
    return instruction
