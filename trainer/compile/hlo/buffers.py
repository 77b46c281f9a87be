"""The buffers in HBM at its peak, from the buffer assignment that XLA dumps.

The dump's own peak is that of all memories together (VMEM and the host's too), which can be another moment. A newer
libtpu's dump does not say when a buffer is alive (0.0.52 does not); then it is the largest buffers that lie beside one
another, each of which is alive at some time.
"""

import bisect
import re
from collections import Counter, defaultdict
from typing import NamedTuple

_RANGE = re.compile(r"^ +(\S+\{[\d,]*\}):(\d+)-(\d+)$", re.MULTILINE)
# a loop's own values, such as the stack that its turns write into, are marked as phi
_VALUE = re.compile(r" value: <\d+ (\S+)(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\)")
_OVER_TIME = re.compile(r"^    (\S+) (\d+)$", re.MULTILINE)


class _BufferValue(NamedTuple):
    """A value in HBM. Values with the same ``place`` share one buffer."""

    name: str
    bytes: int
    place: tuple[int, int, int]  # allocation, offset, bytes


def peak_buffers(assignment: str) -> str:
    """Extracts the allocations and the buffers in HBM at its peak from a dumped buffer assignment.

    The step's arguments are always among them: their memory is theirs all along. Behind them, under ``over time:``,
    stand the bytes of all other buffers in HBM each time that one begins, by the instruction that makes it.
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
    if _RANGE.search(assignment):
        at_peak, over_time = _alive(assignment, values)
    else:
        at_peak, over_time = _side_by_side(values), {}
    alive = {value.place: value for value in reversed(at_peak)}
    lines = [f"    {value.name}: {value.bytes} bytes" for value in (*alive.values(), *held.values())]
    times = [f"    {name} {count}" for name, count in over_time.items()]
    return "\n".join([*allocations, "peak:", *lines, *(["over time:", *times] if times else [])])


def held_over_time(buffers: str) -> dict[str, int]:
    """Instruction → bytes of temporaries in HBM once it is made, from what :func:`peak_buffers` extracted."""
    return {name: int(count) for name, count in _OVER_TIME.findall(buffers.partition("over time:")[2])}


def _alive(assignment: str, values: list[_BufferValue]) -> tuple[list[_BufferValue], dict[str, int]]:
    """The ``values`` that are alive when all take most bytes, and the bytes each time that some begin.

    A shared place counts once.
    """
    ranges = {name: (int(start), int(end)) for name, start, end in _RANGE.findall(assignment)}
    begins, ends = defaultdict(list), defaultdict(list)
    for value in values:
        if value.name in ranges:
            start, end = ranges[value.name]
            begins[start].append(value)
            ends[end + 1].append(value)
    at: Counter[tuple[int, int, int]] = Counter()
    total = most = best = 0
    over_time: dict[str, int] = {}
    for time in sorted({*begins, *ends}):
        for value in ends[time]:
            at[value.place] -= 1
            total -= value.bytes if not at[value.place] else 0
        for value in begins[time]:
            total += value.bytes if not at[value.place] else 0
            at[value.place] += 1
        if begins[time]:
            over_time[begins[time][0].name.partition("{")[0]] = total
        if total > most:
            most, best = total, time
    return [v for v in values if v.name in ranges and ranges[v.name][0] <= best <= ranges[v.name][1]], over_time


def _side_by_side(values: list[_BufferValue]) -> list[_BufferValue]:
    """Filters ``values``, the largest first, by whether their bytes overlap those of no other that is taken."""
    taken: dict[int, list[tuple[int, int]]] = defaultdict(list)  # allocation → (first byte, byte behind the last)
    found = []
    for value in sorted(values, key=lambda value: -value.bytes):
        allocation, start, size = value.place
        others = taken[allocation]
        after = bisect.bisect(others, (start, start + size))
        if (not after or others[after - 1][1] <= start) and (after == len(others) or others[after][0] >= start + size):
            others.insert(after, (start, start + size))
            found.append(value)
    return found
