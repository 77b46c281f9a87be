"""Trip counts of a compiled module's loops, from condition and body."""

import dataclasses

from shardwright.compile.hlo.text import Computation, Instruction, Module

_VIEWS = {"bitcast", "copy", "bitcast-convert", "convert", "reshape"}


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """The trip count of a while loop of ``computation``, None if it depends on data.

    The compiler's annotation if there is one; else from the counter's start and step, and the constant that the
    condition compares it with. A 64-bit counter is compared in two halves: the one with a limit above 0 counts.
    """
    if known := loop.attribute(r'"known_trip_count":\{"n":"(\d+)"'):
        return int(known)
    condition = module.computations[loop.attribute(r"condition=%?([^\s,]+)") or ""]
    (body,) = module.called(loop)
    found = []
    for compare in condition.instructions:
        if compare.opcode == "fusion":
            compare = _unfused(module, compare)
        index, bound = _limit(condition, compare)
        if bound > 0:
            start = _constant(_element(computation, computation.by_name.get(loop.operands[0]), index)) or 0
            found.append(-(-(bound - start) // _step(body, index)))
    return max(found, default=None)


def _unfused(module: Module, fusion: Instruction) -> Instruction:
    """Replaces a fusion of one comparison by that comparison, over the fusion's operands."""
    (fused,) = module.called(fusion)
    root = fused.root
    parameters = {p.name: number for number, p in fused.parameters.items()}
    if root.opcode != "compare" or any(name not in parameters for name in root.operands):
        return fusion
    return dataclasses.replace(root, operands=[fusion.operands[parameters[name]] for name in root.operands])


def _limit(condition: Computation, compare: Instruction) -> tuple[int, int]:
    """(index, bound) if ``compare`` is ``state[index] < bound`` with a constant bound (≤: one more), else (0, 0)."""
    direction = compare.attribute(r"direction=(\w+)")
    if compare.opcode != "compare" or direction not in ("LT", "LE"):
        return 0, 0
    counter, bound = (_behind(condition, name) for name in compare.operands)
    if counter is None or counter.opcode != "get-tuple-element" or (limit := _constant(bound)) is None:
        return 0, 0
    return int(counter.attribute(r"index=(\d+)") or 0), limit + (direction == "LE")


def _step(body: Computation, index: int) -> int:
    """The positive constant that the body adds to ``state[index]``; 1 if it does anything else with it."""
    value = _element(body, body.root, index)
    terms = [_behind(body, name) for name in value.operands] if value is not None and value.opcode == "add" else []
    steps = [step for term in terms if (step := _constant(term)) is not None]
    return steps[0] if len(steps) == 1 and steps[0] > 0 else 1


def _element(computation: Computation, state: Instruction | None, index: int) -> Instruction | None:
    """The instruction that makes ``state[index]``; None if ``state`` is no tuple of so many."""
    if state is None or state.opcode != "tuple" or index >= len(state.operands):
        return None
    return _behind(computation, state.operands[index])


def _constant(instruction: Instruction | None) -> int | None:
    return int(instruction.arguments) if instruction is not None and instruction.opcode == "constant" else None


def _behind(computation: Computation, name: str) -> Instruction | None:
    """The instruction ``name``, followed through copies and views."""
    instruction = computation.by_name.get(name)
    while instruction is not None and instruction.opcode in _VIEWS and instruction.operands:
        instruction = computation.by_name.get(instruction.operands[0])
    return instruction
