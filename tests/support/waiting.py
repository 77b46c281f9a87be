"""The most collectives of a compiled program that one device can wait in at once.

XLA's CPU client runs an instruction on a thread of its pool once its operands are there, and a collective holds its
thread until all devices have come. It starts the collectives of a program in the program's order, each when the one
before it has ended. A loop counts as one of them, with all that are inside, but those that follow it, and need nothing
of it, start as soon as it runs (openxla/xla, xla/runtime/execution_graph.cc: an edge of scheduling, not of execution).
So a device waits in several at once only where loops run beside what follows them.

`python -m tests.support.waiting` prints the number of each recipe's step, with a scan over its layers and without, and
fails if one is above :data:`shardwright.xla.virtual_devices.AT_ONCE`.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.progress import track

from shardwright.compile.hlo.communication import KINDS
from shardwright.compile.hlo.text import Computation, parse
from tests.support.quick_compile import QUICK_COMPILE

_RUN = ("while", "call", "conditional")  # instructions that run other computations, and go on beside what follows


def main() -> int:
    folder = Path(tempfile.mkdtemp())
    dump = f"--xla_dump_to={folder} --xla_dump_hlo_as_text"
    os.environ.update(PJRT_DEVICE="CPU", CPU_NUM_DEVICES="8", XLA_FLAGS=f"{QUICK_COMPILE} {dump}")
    from shardwright.xla.runtime import init_runtime
    from shardwright.xla.virtual_devices import AT_ONCE
    from tests.support.cases import RECIPES, make_batch, make_case

    init_runtime()
    most = 0
    for recipe in track(RECIPES, console=Console(stderr=True)):
        found = []
        for compute in ({}, {"scan": False, "remat": "none"}):
            case = make_case(recipe, **compute)
            case.step(make_batch(case.config, rows=2 * case.plan.batch_shards), step=1, learning_rate=0.0)
            case.step.read_metrics()
            found.append(max(width(parse(path.read_text())) for path in folder.glob("*.cpu_after_optimizations.txt")))
            for path in folder.iterdir():
                path.unlink()
        print(recipe, *found, flush=True)
        most = max(most, *found)
    return int(most > AT_ONCE)


def width(computation: Computation) -> int:
    """The size of the largest set of collectives of which none ends before another begins, inner ones included.

    It is their number less that of the longest matching of each with a later one that begins after its end (Dilworth).
    """
    above: dict[str, int] = {}  # instruction → the collectives, by bits, that have ended when it begins
    ended = 0  # those that have when the next collective or loop begins: a collective by itself holds back all after it
    waiting: list[int] = []  # for each collective, those that have ended when it begins
    for instruction in computation.instructions:
        before = 0
        for name in (
            *instruction.names,
            *(instruction.attribute(r"control-predecessors={([^}]*)}") or "").split(", "),
        ):
            before |= above.get(name.lstrip("%"), 0)
        alone = instruction.opcode.removesuffix("-start") in KINDS
        inside = 1 if alone else max(map(width, instruction.called), default=0) if instruction.opcode in _RUN else 0
        own = ((1 << inside) - 1) << len(waiting)
        if inside:
            before |= ended
        waiting += [before] * inside
        above[instruction.name] = before | own
        if alone:
            ended = before | own
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
    sys.exit(main())
