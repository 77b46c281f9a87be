"""Restarts in place: the notes of a run for its supervisor, and the verdict on how it ended.

With ``--max_restarts`` the command's process is a supervisor (`shardwright.hosts.supervisor`), and the training its
child. A process opens its devices only once, so going on after a lost host takes a new process. It starts as a
launcher would start it, with nothing of the old one left, and costs imports, reading and a compile.

The child speaks by a file, the notes, which a kill leaves behind.
"""

import argparse
import contextlib
import ctypes
import json
import os
import signal
import threading
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwright.errors import (
    BUG,
    INTERRUPTED,
    LOST,
    PREEMPTED,
    TERMINATED,
    TransientError,
    UserError,
    command,
    without_credentials,
)

NOTES = "SHARDWRIGHT_NOTES"  # in a child's environment: the path of its notes
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 300.0  # seconds
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of linux/prctl.h
_ASKED_TO_STOP = (PREEMPTED, INTERRUPTED, TERMINATED, -signal.SIGTERM, -signal.SIGINT)


@dataclass(frozen=True)
class LastRestart:
    """The number of restarts so far, and the reason of the last; empty: there was none."""

    count: int = 0
    why: str = ""


@dataclass(frozen=True)
class Restarts:
    """The restarts of a run: at most ``limit`` (``--max_restarts``), and those ``before`` this process."""

    limit: int = 0
    before: LastRestart = LastRestart()

    def follows(self, error: BaseException, begun: bool) -> bool:
        """Whether the run begins again after ``error``; ``begun``: a step was taken.

        A first process that fails before one was most likely given wrong options.
        """
        return isinstance(error, TransientError) and self.before.count < self.limit and (begun or self.before.count > 0)


def asked_limit(words: Sequence[str]) -> int:
    """``--max_restarts`` in a command line; 0 without one, and for a bad value, which the run itself refuses.

    To check all options imports transformers, which a supervisor does without.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--max_restarts", "--max-restarts", type=int, default=0)
    try:
        return max(parser.parse_known_args(list(words))[0].max_restarts, 0)
    except argparse.ArgumentError:
        return 0


def wait_before(restart: int) -> float:
    """Seconds to wait before restart number ``restart`` (from 1), doubled each time."""
    return min(_FIRST_WAIT * 2.0 ** (restart - 1), _LONGEST_WAIT)


def words_again(output: str, resume: str | None, saved: bool) -> list[str]:
    """The words to add to a command that has trained into ``output``, so that it goes on; later options win.

    Without a ``saved`` checkpoint it begins where it began, as its ``--resume_from_checkpoint`` (``resume``) says.
    """
    own = saved or resume in (None, "latest")
    more = ["--resume_from_checkpoint", "latest"] if own else ["--overwrite_output_dir", "True"]
    return ["--output_dir", output, *more]


def check_limit(limit: int, restarts: Restarts | None) -> None:
    """Raises UserError for ``--max_restarts`` in a process without a supervisor."""
    if limit and restarts is None:
        raise UserError(
            asked=f"--max_restarts {limit}",
            found=f"a run that Python code began, not {command('train')}",
            why="a restart is a new process of the same command, and that code's own state would be lost with the old",
            instead=f"{command('train')}; or catch shardwright.errors.TransientError and train anew from `latest`",
        )


# ---- the notes ----

_notes: str | None = None  # the path of this process's notes, if it has a supervisor
_lock = threading.Lock()  # the watchdog's threads write notes too


def follow_supervisor(environment: MutableMapping[str, str]) -> LastRestart | None:
    """Ties this process's life to its supervisor's, and returns the restarts before it; None without a supervisor.

    The path of the notes is taken out of ``environment``, so that no program started by the run writes there.
    """
    global _notes
    if (path := environment.pop(NOTES, None)) is None:
        return None
    _notes, told = path, read_notes(path)
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != told.get("supervisor"):  # it died before that call
        os._exit(LOST)
    return LastRestart(int(told.get("count", 0)), str(told.get("why", "")))


def has_supervisor() -> bool:
    return _notes is not None


def note(**facts: Any) -> None:
    """Tells the supervisor, if there is one: ``job`` (:class:`supervisor.HostPlace`), ``begun``, ``more`` words."""
    if _notes is None:
        return
    with _lock, contextlib.suppress(OSError):  # a full disk: earlier notes stay
        write_notes(_notes, read_notes(_notes) | facts)


def note_passing(why: str) -> None:
    """Tells the supervisor that this process ends for a transient reason, without a URL's credentials."""
    note(transient=True, ended=without_credentials(why.partition("\n")[0]))


def read_notes(path: str) -> dict[str, Any]:
    """The facts in the file ``path``; none without the file."""
    try:
        with open(path) as file:
            found = json.load(file)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_notes(path: str, facts: Mapping[str, Any]) -> None:
    """Writes ``facts`` to the file ``path``, whole or not at all."""
    with open(f"{path}.new", "w") as file:
        json.dump(dict(facts), file)
    os.replace(f"{path}.new", path)


# ---- the verdict ----


@dataclass(frozen=True)
class RunEnd:
    """The end of one host's run."""

    code: int  # its exit code, or minus the signal that ended it
    told: bool = False  # its supervisor was told to stop
    transient: bool = False  # it noted a transient reason
    begun: bool = False  # a step was taken
    why: str = ""  # the reason that it noted
    more: Sequence[str] = ()  # words with which its command goes on

    @property
    def killed(self) -> bool:
        """Killed from outside, by a kernel out of memory or a person."""
        return self.code == -signal.SIGKILL

    @property
    def passing(self) -> bool:
        return self.transient or self.killed or self.code == LOST

    @property
    def stopped(self) -> bool:
        return self.code in _ASKED_TO_STOP or (self.told and self.code != 0)

    @property
    def failed(self) -> bool:
        """It ended in a way that leaves the other hosts nothing to do."""
        return self.code not in (0, PREEMPTED, INTERRUPTED)


@dataclass(frozen=True)
class Verdict:
    """The next act of all hosts of a job: begin ``again`` with ``more`` words, or end with ``code``; and why."""

    again: bool
    code: int = 0
    why: str = ""
    more: Sequence[str] = ()


def decide(ended: Sequence[RunEnd], restarts: int, limit: int) -> Verdict:
    """The verdict on the ends of all hosts' runs, in order of hosts, after so many ``restarts``.

    A lost host ends the others in various ways (torch_xla's coordinator aborts them, a computation raises), so one
    transient end makes up for others without a reason. A user's error, a bug and a request to stop are final.
    """
    refused = [each for each in ended if each.code in (2, BUG) and not each.transient]
    if final := [*refused, *(each for each in ended if each.stopped)]:
        return Verdict(False, final[0].code)
    begun = restarts > 0 or any(each.begun for each in ended)
    if begun and restarts < limit and any(each.passing for each in ended):
        return Verdict(True, why=_why(ended), more=next((each.more for each in ended if each.more), ()))
    lost = len(ended) > 1 and any(each.killed or each.code == LOST for each in ended)
    return Verdict(False, LOST if lost else next((each.code for each in ended if each.code), 0), _why(ended))


def _why(ended: Sequence[RunEnd]) -> str:
    for host, each in enumerate(ended):
        if each.killed:
            return f"host {host} was killed (SIGKILL)" if len(ended) > 1 else "it was killed (SIGKILL)"
    return next((each.why for each in ended if each.passing and each.why), "")
