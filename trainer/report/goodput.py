"""Accounts for the seconds of a run over all of its lives, the processes of a killed and resumed run."""

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

# a life's activities; "start" is all time before the first step that belongs to no other
ACTIVITIES = ("start", "steps", "compile", "data", "evaluation", "save")
# causes over all lives → words for a person
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
    """Charges every second of a life to the current ``activity``, first ``start``; compiling always to ``compile``.

    ``compiled`` gives the seconds that this process has spent compiling so far, in any activity.
    """

    def __init__(self, compiled: Callable[[], float], now: Callable[[], float] = time.perf_counter) -> None:
        self._compiled, self._now = compiled, now
        self._charged = dict.fromkeys(ACTIVITIES, 0.0)
        self.activity, self._mark = "start", (now(), compiled())

    def began(self, earlier: float) -> None:
        """Charge the seconds that the life began ``earlier`` than the clock to ``start``."""
        self._charged["start"] += earlier

    def turn_to(self, activity: str) -> str:
        """Charge seconds to ``activity`` from now on; returns the activity before."""
        before, (then, compiled) = self.activity, self._mark
        self.activity, self._mark = activity, (self._now(), self._compiled())
        compiling = self._mark[1] - compiled
        self._charged["compile"] += compiling
        self._charged[before] += max(self._mark[0] - then - compiling, 0.0)
        return before

    @contextlib.contextmanager
    def on(self, activity: str) -> Iterator[None]:
        before = self.turn_to(activity)
        try:
            yield
        finally:
            self.turn_to(before)

    @property
    def seconds(self) -> dict[str, float]:
        self.turn_to(self.activity)
        return dict(self._charged)


@dataclass
class Life:
    """One process of a run, from the moment it had the output folder."""

    began: float  # Unix time
    ended: float  # a killed life ended when it was last written
    first: int  # step that it resumed from
    last: int  # step that it did
    seconds: dict[str, float] = field(default_factory=dict)  # by activity
    # the failure of the life before, if the run restarted itself (--max_restarts); empty: somebody started this life,
    # and the time before it is not counted
    after: str = ""


def where_time_went(lives: Sequence[Life]) -> dict[str, float]:
    """Cause (:data:`WHAT`) → seconds of all lives.

    Steps that a later life repeated count as ``again``; a life's steps are taken to be equally long.
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
    """The share of steps that count in the seconds of :func:`where_time_went`; None: no time has passed."""
    return spent["steps"] / total if (total := sum(spent.values())) else None


def log_entries(lives: Sequence[Life]) -> dict[str, float]:
    """Log entries: the seconds of all lives by cause, the goodput, and the number of the run's own restarts."""
    spent = where_time_went(lives)
    logs = {f"seconds/{cause}": seconds for cause, seconds in spent.items() if seconds}
    if (share := goodput(spent)) is not None:
        logs["goodput"] = share
    restarts = sum(bool(life.after) for life in lives)
    return logs | ({"restarts": restarts} if restarts else {})


def lives_as_json(lives: Sequence[Life]) -> bytes:
    return (json.dumps([asdict(life) for life in lives], indent=2) + "\n").encode()


def read_lives(data: bytes) -> list[Life]:
    """The lives that :func:`lives_as_json` wrote; raises ValueError for other data."""
    try:
        lives = [Life(**entry) for entry in json.loads(data)]
        for life in lives:
            seconds = [life.seconds.get(name, 0.0) for name in ACTIVITIES]
            numbers: list[Any] = [life.first, life.last, life.began, life.ended, *seconds]
            steps_are_whole = type(life.first) is type(life.last) is int
            in_range = all(type(n) in (int, float) and math.isfinite(n) and 0 <= n < 1 << 53 for n in numbers)
            if not (steps_are_whole and in_range and type(life.after) is str):
                raise ValueError(f"{life!r:.200}")
    except (TypeError, AttributeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    return lives
