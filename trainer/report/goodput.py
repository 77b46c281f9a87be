"""Where the seconds of a run went, over all of its lives: what a killed and resumed run paid for its steps."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

# what a life's seconds are charged to; "start" is all before the first step that is none of the others
ACTIVITIES = ("start", "steps", "compile", "data", "evaluation", "save")
# the same over all lives, as a person reads them
WHAT = {
    "steps": "steps",
    "again": "steps done again after a restart",
    "compile": "compile",
    "data": "waiting for data",
    "evaluation": "evaluation",
    "save": "save",
    "start": "start",
    "restart": "restart: every later start",
    "between": "between a failure and the restart after it",
}


class Clock:
    """Charges every second of a life to one activity, first to ``start``; seconds of compiling to ``compile``.

    Args:
        compiled: the seconds that this process has compiled for so far, in whatever activity.
        now: seconds, from any moment on.

    Attributes:
        activity: what seconds are charged to now.
    """

    def __init__(self, compiled: Callable[[], float], now: Callable[[], float] = time.perf_counter) -> None:
        self._compiled, self._now = compiled, now
        self._charged = dict.fromkeys(ACTIVITIES, 0.0)
        self.activity, self._mark = "start", (now(), compiled())

    def began(self, earlier: float) -> None:
        """The life began ``earlier`` than the clock, so many seconds; they are charged to ``start``."""
        self._charged["start"] += earlier

    def turn_to(self, activity: str) -> str:
        """From now on seconds are charged to ``activity``; returns what they were charged to."""
        before, (then, compiled) = self.activity, self._mark
        self.activity, self._mark = activity, (self._now(), self._compiled())
        compiling = self._mark[1] - compiled
        self._charged["compile"] += compiling
        self._charged[before] += max(self._mark[0] - then - compiling, 0.0)
        return before

    @contextlib.contextmanager
    def on(self, activity: str) -> Iterator[None]:
        """Inside, seconds are charged to ``activity``."""
        before = self.turn_to(activity)
        try:
            yield
        finally:
            self.turn_to(before)

    @property
    def seconds(self) -> dict[str, float]:
        """Activity → seconds until now."""
        self.turn_to(self.activity)
        return dict(self._charged)


@dataclass
class Life:
    """One process of a run, from the moment it had the output folder.

    Args:
        began, ended: Unix time; ``ended`` of a life that was killed is when this was last written.
        first: the step that it went on from.
        last: the last step that it did.
        seconds: activity → seconds.
        after: what ended the life before, where the run itself went on after it (``--max_restarts``); empty: somebody
            began this one, and the time before it is nobody's.
    """

    began: float
    ended: float
    first: int
    last: int
    seconds: dict[str, float] = field(default_factory=dict)
    after: str = ""


def where_time_went(lives: Sequence[Life]) -> dict[str, float]:
    """Seconds of all lives by what they went to, the keys of :data:`WHAT`.

    Steps that a later life did again, since it went on from before them, are not counted as steps; a life's steps are
    taken to have been equally long.
    """
    total = dict.fromkeys(WHAT, 0.0)
    for number, life in enumerate(lives):
        for activity in ACTIVITIES:
            total["restart" if number and activity == "start" else activity] += life.seconds.get(activity, 0.0)
        if number and life.after:
            total["between"] += max(life.began - lives[number - 1].ended, 0.0)
        kept = min([life.last, *(later.first for later in lives[number + 1 :])])
        if life.last > life.first:
            again = life.seconds.get("steps", 0.0) * (life.last - max(kept, life.first)) / (life.last - life.first)
            total["steps"] -= again
            total["again"] += again
    return total


def goodput(spent: dict[str, float]) -> float | None:
    """The share of the seconds that :func:`where_time_went` gave which went to steps that count."""
    return spent["steps"] / total if (total := sum(spent.values())) else None


def log_entries(lives: Sequence[Life]) -> dict[str, float]:
    """Where the seconds of all lives went, and how often the run itself went on after a failure, as a log has it."""
    spent = where_time_went(lives)
    logs = {f"seconds/{cause}": seconds for cause, seconds in spent.items() if seconds}
    if (share := goodput(spent)) is not None:
        logs["goodput"] = share
    restarts = sum(bool(life.after) for life in lives)
    return logs | ({"restarts": restarts} if restarts else {})


def lives_as_json(lives: Sequence[Life]) -> bytes:
    """The lives as a file."""
    return (json.dumps([asdict(life) for life in lives], indent=2) + "\n").encode()


def read_lives(data: bytes) -> list[Life]:
    """The lives that :func:`lives_as_json` wrote.

    Raises:
        ValueError: it wrote no such thing.
    """
    try:
        lives = [Life(**entry) for entry in json.loads(data)]
        return [_checked(life) for life in lives]
    except (TypeError, AttributeError, RecursionError) as error:
        raise ValueError(str(error)) from error


def _checked(life: Life) -> Life:
    steps: list[Any] = [life.first, life.last]
    numbers: list[Any] = [life.began, life.ended, *(life.seconds.get(name, 0.0) for name in ACTIVITIES)]
    whole = all(type(step) is int and 0 <= step < 1 << 53 for step in steps)
    whole = whole and type(life.after) is str
    if not whole or not all(type(n) in (int, float) and math.isfinite(n) and 0 <= n < 1 << 53 for n in numbers):
        raise ValueError(f"{life!r:.200}")
    return life
