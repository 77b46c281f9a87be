"""Restarts in place: what something passing ended begins again, as the same command, from its newest checkpoint.

The process is replaced by a new one of its command (`os.execv`), and the loop is not entered again in the old one. A
process opens its devices once, so after a lost host only a new one has them; nothing of the old one is left, neither
threads nor what lies on the devices; and a restart is what a launcher's would be, whose path every kill takes. It costs
a start: imports, reading, a compile.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console

from trainer.errors import TransientError, UserError
from trainer.report.lines import say

TOLD = "SHARDWRIGHT_RESTARTED"  # in the environment, which a process keeps when it is replaced
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]*@")  # of a URL
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 300.0  # seconds


@dataclass(frozen=True)
class Restarted:
    """What a process is told by the one that it took the place of.

    Args:
        count: restarts so far.
        why: what ended the process before; empty: there was none.
    """

    count: int = 0
    why: str = ""


def told(environment: Mapping[str, str]) -> Restarted:
    """What the process before this one said in the environment."""
    try:
        found = json.loads(environment.get(TOLD, "{}"))
        return Restarted(int(found.get("count", 0)), str(found.get("why", "")))
    except (ValueError, AttributeError, TypeError):  # somebody else's variable
        return Restarted()


def wait_before(restart: int) -> float:
    """Seconds to wait before restart number ``restart`` (from 1): each wait is twice the one before."""
    return min(_FIRST_WAIT * 2.0 ** (restart - 1), _LONGEST_WAIT)


def words_again(words: Sequence[str], output: str, resume: str | None, saved: bool) -> list[str]:
    """The command line with which a run goes on that had begun to train into ``output``.

    Args:
        words: its own, of which a later one wins over an earlier.
        resume: its ``--resume_from_checkpoint``.
        saved: whether it has a checkpoint to go on from. Without one it begins where it began.
    """
    own = saved or resume in (None, "latest")
    more = ["--resume_from_checkpoint", "latest"] if own else ["--overwrite_output_dir", "True"]
    return [*words, "--output_dir", output, *more]


@dataclass(frozen=True)
class Restarts:
    """How often a process may be replaced, and by what.

    Args:
        limit: ``--max_restarts``.
        command: the program and its script.
        words: the script's.
        before: what the process before this one said.
    """

    limit: int = 0
    command: Sequence[str] = ()
    words: Sequence[str] = ()
    before: Restarted = field(default_factory=lambda: told(os.environ))
    sleep: Callable[[float], None] = time.sleep
    replace: Callable[[str, list[str], Mapping[str, str]], Any] = os.execve

    def follows(self, error: BaseException, begun: bool) -> bool:
        """Whether the run begins again after ``error``.

        Args:
            begun: a step was taken. What fails before one, in a first process, is most likely asked for wrongly.
        """
        return isinstance(error, TransientError) and self.before.count < self.limit and (begun or self.before.count > 0)

    def restart(self, error: UserError, words: Sequence[str], console: Console) -> None:
        """Say why, wait, and be replaced by a process of the same program with ``words``: this does not return."""
        # it is kept in the run's page, and what lets one into a store is not
        now = Restarted(self.before.count + 1, _CREDENTIALS.sub("", f"{error.asked}: {error.found}"))
        seconds = wait_before(now.count)
        say(console, f"restart: {now.count} of {self.limit} in {seconds:g} s, after: {now.why}")
        self.sleep(seconds)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        _close_at_exec()
        environment = {**os.environ, TOLD: json.dumps(asdict(now))}
        self.replace(self.command[0], [*self.command, *words], environment)


def _close_at_exec() -> None:
    """Have the system close all files but the three standard ones: a chip's, left open, would still be in use."""
    for handle in map(int, os.listdir("/proc/self/fd")):
        if handle > 2:
            try:
                os.set_inheritable(handle, False)
            except OSError:  # that of the listing itself
                continue


def check_limit(limit: int, restarts: Restarts | None) -> None:
    """Refuse ``--max_restarts`` in a process that can't be begun anew.

    Raises:
        UserError: ``limit`` is one, and no ``restarts`` are given.
    """
    if limit and restarts is None:
        raise UserError(
            asked=f"--max_restarts {limit}",
            found="a run that Python code began, not scripts/train.py",
            why="a restart is a new process of the same command, and that code's own state would be lost with the old",
            instead="scripts/train.py; or catch trainer.errors.TransientError and train anew from `latest`",
        )


def check_hosts(limit: int, count: int) -> None:
    """Refuse ``--max_restarts`` on several hosts.

    Raises:
        UserError: ``limit`` is one, and there are so many hosts.
    """
    if limit and count > 1:
        raise UserError(
            asked=f"--max_restarts {limit}",
            found=f"a job of {count} hosts",
            why="they begin together or not at all, and a host that is lost only its launcher brings back",
            instead="a launcher that begins all of them again after exit code 76, with --resume_from_checkpoint latest",
        )


def no_progress(words: str) -> TransientError:
    """What ends a run that makes no progress; ``words`` say since when."""
    return TransientError(
        asked="the next step",
        found=words,
        why="what it waits for may never come",
        instead="the same command again, which goes on from the last checkpoint; or a longer --hang_timeout",
    )
