"""The most collectives of a compiled program that one device can wait in at once.

XLA's CPU client runs an instruction as soon as its operands are there, on a thread of its pool, and a collective holds
its thread until all devices have come. Of those of which none depends on another all can wait at once.
"""

from __future__ import annotations

from pathlib import Path

from shardwright.compile.hlo.communication import KINDS
from shardwright.compile.hlo.text import Computation, Module, parse


def dump_flags(folder: Path) -> str:
    """XLA's flags that leave the text of each compiled program in ``folder``."""
    return f"--xla_dump_to={folder} --xla_dump_hlo_as_text --xla_dump_hlo_pass_re="


def most_waiting(folder: Path) -> int:
    """The most of any program that was compiled with :func:`dump_flags`."""
    texts = [path.read_text() for path in folder.glob("*.cpu_after_optimizations.txt")]
    modules = [parse(text) for text in texts]
    return max(_width(module, module.entry) for module in modules)


def _width(module: Module, computation: Computation) -> int:
    """The size of the largest set of collectives of which none depends on another, inner ones included.

    It is their number less that of the longest matching of each with a later one that depends on it (Dilworth).
    """
    above: dict[str, int] = {}  # instruction → the collectives, by bits, that it depends on
    waiting: list[int] = []  # for each collective, those that it depends on
    for instruction in computation.instructions:
        before = 0
        for name in (*instruction.operands, *(instruction.attribute(r"control-predecessors={([^}]*)}") or "").split(", ")):
            before |= above.get(name.lstrip("%"), 0)
        if instruction.opcode.removesuffix("-start") in KINDS:
            inside = 1
        elif instruction.opcode in ("while", "call", "conditional"):
            inside = max((_width(module, called) for called in module.called(instruction)), default=0)
        else:
            inside = 0
        own = ((1 << inside) - 1) << len(waiting)
        waiting += [before] * inside
        above[instruction.name] = before | own
    return len(waiting) - _matched(waiting)


def _matched(earlier: list[int]) -> int:
    """The largest number of pairs of each number with one of its ``earlier``, none of them in two pairs on one side."""
    partner: dict[int, int] = {}

    def takes(number: int, tried: set[int]) -> bool:
        left = earlier[number]
        while left:
            other = (left & -left).bit_length() - 1
            left &= left - 1
            if other not in tried:
                tried.add(other)
                if other not in partner or takes(partner[other], tried):
                    partner[other] = number
                    return True
        return False

    return sum(takes(number, set()) for number in range(len(earlier)))
