"""The most collectives of a compiled program that one device can wait in at once.

XLA's CPU client runs an instruction as soon as its operands are there, on a thread of its pool, and a collective holds
its thread until all devices have come. Of those of which none depends on another all can wait at once.

`python -m tests.support.waiting` prints the number of each recipe's step, with a scan over its layers and without.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from rich.console import Console
from rich.progress import track

from shardwright.compile.hlo.communication import KINDS
from shardwright.compile.hlo.text import Computation, parse
from tests.support.quick_compile import QUICK_COMPILE


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    dump = f"--xla_dump_to={folder} --xla_dump_hlo_as_text"
    os.environ.update(PJRT_DEVICE="CPU", CPU_NUM_DEVICES="8", XLA_FLAGS=f"{QUICK_COMPILE} {dump}")
    from shardwright.xla.runtime import init_runtime
    from tests.support.cases import RECIPES, make_batch, make_case

    init_runtime()
    for recipe in track(RECIPES, console=Console(stderr=True)):
        found = []
        for compute in ({}, {"scan": False, "remat": "none"}):
            case = make_case(recipe, **compute)
            case.step(make_batch(case.config, rows=2 * case.plan.batch_shards), step=1, learning_rate=0.0)
            case.step.read_metrics()
            found.append(max(_width(parse(path.read_text())) for path in folder.glob("*.cpu_after_optimizations.txt")))
            for path in folder.iterdir():
                path.unlink()
        print(recipe, *found)


def _width(computation: Computation) -> int:
    """The size of the largest set of collectives of which none depends on another, inner ones included.

    It is their number less that of the longest matching of each with a later one that depends on it (Dilworth).
    """
    above: dict[str, int] = {}  # instruction → the collectives, by bits, that it depends on
    waiting: list[int] = []  # for each collective, those that it depends on
    for instruction in computation.instructions:
        before = 0
        for name in (
            *instruction.names,
            *(instruction.attribute(r"control-predecessors={([^}]*)}") or "").split(", "),
        ):
            before |= above.get(name.lstrip("%"), 0)
        if instruction.opcode.removesuffix("-start") in KINDS:
            inside = 1
        elif instruction.opcode in ("while", "call", "conditional"):
            inside = max(map(_width, instruction.called), default=0)
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


if __name__ == "__main__":
    main()
