"""Trip counts of a compiled module's loops, from condition and body."""

from __future__ import annotations

import dataclasses

from shardwright.compile.hlo.text import Computation, Instruction, Module

_VIEWS = {"bitcast", "copy", "bitcast-convert", "convert", "reshape"}


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """The trip count of a while loop of ``computation``, None if it depends on data.

    The compiler's annotation if there is one; else from the counter's start and step, and the constant that the
    condition compares it with. A 64-bit counter is compared in two halves: the one with a limit above 0 counts.
    """
    known = loop.attribute(r'"known_trip_count":\{"n":"(\d+)"')
    if known:
        return int(known)
    condition = module.computations[loop.attribute(r"condition=%?([^\s,]+)") or ""]
    body = module.computations[loop.attribute(r"body=%?([^\s,]+)") or ""]
    found = []
    for compare in condition.instructions:
        if compare.opcode == "fusion":
            compare = _unfused(module, compare)
        limit = _limit(condition, compare)
        if limit is None or limit[1] <= 0:
            continue
        index, bound = limit
        start = _initial(computation, loop, index)
        step = _step(body, index)
        found.append(-(-(bound - (start or 0)) // (step or 1)))
    return max(found, default=None)


def _unfused(module: Module, fusion: Instruction) -> Instruction:
    """Replaces a fusion of one comparison by that comparison, over the fusion's operands."""
    fused = module.computations[fusion.called or ""]
    root = fused.root
    parameters = {p.name: number for number, p in fused.parameters.items()}
    if root.opcode != "compare" or any(name not in parameters for name in root.operands):
        return fusion
    return dataclasses.replace(root, operands=[fusion.operands[parameters[name]] for name in root.operands])


def _limit(condition: Computation, compare: Instruction) -> tuple[int, int] | None:
    """(index, bound) if ``compare`` is ``state[index] < bound`` with a constant bound (≤: one more), else None."""
    direction = compare.attribute(r"direction=(\w+)")
    if compare.opcode != "compare" or direction not in ("LT", "LE"):
        return None
    counter, bound = (_behind(condition, name) for name in compare.operands)
    if counter is None or bound is None or counter.opcode != "get-tuple-element" or bound.opcode != "constant":
        return None
    return int(counter.attribute(r"index=(\d+)") or 0), int(bound.arguments) + (direction == "LE")


def _initial(computation: Computation, loop: Instruction, index: int) -> int | None:
    """The constant value of ``state[index]`` before the loop, None if it is no constant."""
    state = computation.by_name.get(loop.operands[0])
    if state is None or state.opcode != "tuple" or index >= len(state.operands):
        return None
    value = _behind(computation, state.operands[index])
    return int(value.arguments) if value is not None and value.opcode == "constant" else None


def _step(body: Computation, index: int) -> int | None:
    """The constant that the body adds to ``state[index]``, None if it does anything else with it."""
    if body.root.opcode != "tuple" or index >= len(body.root.operands):
        return None
    value = _behind(body, body.root.operands[index])
    if value is None or value.opcode != "add":
        return None
    terms = [_behind(body, name) for name in value.operands]
    steps = [int(t.arguments) for t in terms if t is not None and t.opcode == "constant"]
    return steps[0] if len(steps) == 1 and steps[0] > 0 else None


def _behind(computation: Computation, name: str) -> Instruction | None:
    """The instruction ``name``, followed through copies and views."""
    instruction = computation.by_name.get(name)
    while instruction is not None and instruction.opcode in _VIEWS and instruction.operands:
        instruction = computation.by_name.get(instruction.operands[0])
    return instruction
