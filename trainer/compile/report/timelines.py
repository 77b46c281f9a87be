"""A step's schedule for pictures: lanes of the chip and of its links in columns of equal time, and the HBM in each."""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwright.compile.hlo.timeline import BEGUN, CHIP, Mark, Run

COLUMNS = 1500  # so many that each run of a loop of 80 layers, there and back, has some
_LOOPS = 2  # loops of which one run is shown by itself: a scan's forward and its backward
_LEAST = 0.02  # the part of the step that such a loop takes


@dataclass(frozen=True)
class Segment:
    """Columns ``first`` to ``last``, the latter too, in which one cause took most time.

    ``name`` is of the operation or transfer that took most of it, ``seconds`` are the cause's. ``quarters`` of each
    column are filled by something, at least one; four on the chip, which always does something.
    """

    first: int
    last: int
    cause: str
    name: str
    seconds: float
    quarters: int


@dataclass(frozen=True)
class Timeline:
    """A step, or one run of a loop.

    Args:
        loop: the loop's name; empty: it is the step.
        times: runs of the loop.
        seconds: of the step, or of one run.
        lanes: lane → its segments: the chip's, then those of the networks that send anything.
        held: bytes of temporaries in HBM in each column; empty: not known.
    """

    loop: str
    times: int
    seconds: float
    lanes: Mapping[str, Sequence[Segment]]
    held: Sequence[int]


def timelines_of(run: Run, held: Mapping[str, int]) -> tuple[Timeline, ...]:
    """The step ``run``, and one run of each of its longest loops; ``held`` is `hlo.buffers.held_over_time`'s."""
    if not run.now:
        return ()
    whole = Mark(CHIP, "", 0.0, run.now, "", run)
    loops = [mark for mark in run.marks if mark.inside is not None and mark.times > 1 and mark.seconds > 0]
    loops = [mark for mark in loops if mark.times * mark.seconds > _LEAST * run.now]
    longest = sorted(loops, key=lambda mark: -mark.times * mark.seconds)[:_LOOPS]
    return tuple(_timeline(mark, held) for mark in (whole, *sorted(longest, key=lambda mark: mark.start)))


def _timeline(of: Mark, held: Mapping[str, int]) -> Timeline:
    run = of.inside or Run()
    column = run.now / COLUMNS
    lanes: dict[str, _Lane] = defaultdict(_Lane)
    begun: list[Mark] = []
    for mark in _flat(run, 0.0, column):
        if mark.lane == BEGUN:
            begun.append(mark)
        else:
            lanes[mark.lane].add(mark, column)
    order = [CHIP, *sorted(lanes.keys() - {CHIP})]
    shown = {lane: lanes[lane].segments(column) for lane in order if lane in lanes}
    return Timeline(of.name, of.times, run.now, shown, _held(begun, held, column))


def _flat(run: Run, start: float, column: float) -> Iterator[Mark]:
    """The marks of a run that begins at ``start``, with those of the runs inside.

    Of short ones only the causes, and the beginnings in the first of them.
    """
    for mark in run.marks:
        at = start + mark.start
        if mark.inside is None:
            yield mark._replace(start=at)
        elif mark.seconds >= column:
            for number in range(mark.times):
                yield from _flat(mark.inside, at + number * mark.seconds, column)
        else:
            yield from (each for each in _flat(mark.inside, at, column) if each.lane == BEGUN)
            for cause, seconds in mark.inside.seconds.items():
                yield Mark(CHIP, cause, at, seconds * mark.times, mark.name)
                at += seconds * mark.times


class _Lane:
    """Seconds by cause in each column, and the name that took most of them."""

    def __init__(self) -> None:
        self.seconds: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self.names: dict[tuple[int, str], tuple[float, str]] = {}

    def add(self, mark: Mark, column: float) -> None:
        end = mark.start + mark.seconds
        for number in range(max(int(mark.start / column), 0), min(int(end / column), COLUMNS - 1) + 1):
            part = min(end, (number + 1) * column) - max(mark.start, number * column)
            if part > 0:
                self.seconds[number][mark.cause] += part
                key = number, mark.cause
                self.names[key] = max(self.names.get(key, (0.0, "")), (part, mark.name))

    def segments(self, column: float) -> list[Segment]:
        chosen = {}
        for number, causes in sorted(self.seconds.items()):
            cause = max(causes, key=lambda each: causes[each])
            chosen[number] = cause, min(max(round(4 * sum(causes.values()) / column), 1), 4)
        found = []
        # of neighbours with the same cause, as much filled
        for _, group in itertools.groupby(enumerate(chosen.items()), lambda item: (item[1][0] - item[0], item[1][1])):
            members = [entry for _, entry in group]
            (first, (cause, quarters)), (last, _) = members[0], members[-1]
            _, name = max(self.names[number, cause] for number, _ in members)
            seconds = sum(self.seconds[number][cause] for number, _ in members)
            found.append(Segment(first, last, cause, name, seconds, quarters))
        return found


def _held(begun: Sequence[Mark], held: Mapping[str, int], column: float) -> list[int]:
    """The most bytes of temporaries in each column; in one in which nothing begins, those of the one before."""
    most: dict[int, int] = {}
    last: dict[int, int] = {}
    for mark in begun:
        if (count := held.get(mark.name)) is not None:
            number = min(int(mark.start / column), COLUMNS - 1)
            most[number], last[number] = max(most.get(number, 0), count), count
    if not most:
        return []
    found, before = [], last[min(last)]
    for number in range(COLUMNS):
        found.append(most.get(number, before))
        before = last.get(number, before)
    return found
