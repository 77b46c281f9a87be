"""What is in HBM when that is fullest, from the buffer assignment that XLA dumps.

The dump names a peak of its own, which is that of all memories together: VMEM, and the host's where values are
offloaded. The fullest moment of HBM can be another.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass

_RANGE = re.compile(r"^ +(\S+\{[\d,]*\}):(\d+)-(\d+)$", re.MULTILINE)
_VALUE = re.compile(r" value: <\d+ (\S+) @\d+> \(size=(\d+),offset=(\d+)\)")


@dataclass(frozen=True)
class _BufferValue:
    """A value in HBM: its name, its bytes, and its place, which it may share with others that are the same buffer."""

    name: str
    bytes: int
    place: tuple[int, int, int]


def fullest(assignment: str) -> str:
    """The lines of a dumped buffer assignment that count: allocations, and the buffers in HBM when it is fullest.

    The step's arguments have memory of their own all along, so they are always among them.
    """
    allocations: list[str] = []
    arguments: list[_BufferValue] = []
    values: list[_BufferValue] = []
    argument = in_hbm = False
    for line in assignment.splitlines():
        if line.startswith("allocation "):
            allocations.append(line)
            argument, in_hbm = ", parameter " in line, "color " not in line  # a color: VMEM, the host, …
        elif in_hbm and (found := _VALUE.match(line)):
            name = found[1] if found[1].endswith("}") else found[1] + "{}"
            place = len(allocations), int(found[3]), int(found[2])
            (arguments if argument else values).append(_BufferValue(name, int(found[2]), place))
    held = {value.place: value for value in reversed(arguments)}  # of an allocation the first, the argument itself
    alive = {value.place: value for value in reversed(_most(assignment, values))}
    lines = [f"    {value.name}: {value.bytes} bytes" for value in (*alive.values(), *held.values())]
    return "\n".join([*allocations, "peak:", *lines])


def _most(assignment: str, values: list[_BufferValue]) -> list[_BufferValue]:
    """Those of ``values`` that are alive when they take most bytes; what shares a place counts once."""
    ranges = {name: (int(start), int(end)) for name, start, end in _RANGE.findall(assignment)}
    begins, ends = defaultdict(list), defaultdict(list)
    for value in values:
        if value.name in ranges:
            start, end = ranges[value.name]
            begins[start].append(value)
            ends[end + 1].append(value)
    at: Counter[tuple[int, int, int]] = Counter()
    total = most = best = 0
    for time in sorted({*begins, *ends}):
        for value in ends[time]:
            at[value.place] -= 1
            total -= value.bytes if not at[value.place] else 0
        for value in begins[time]:
            total += value.bytes if not at[value.place] else 0
            at[value.place] += 1
        if total > most:
            most, best = total, time
    return [v for v in values if v.name in ranges and ranges[v.name][0] <= best <= ranges[v.name][1]]
