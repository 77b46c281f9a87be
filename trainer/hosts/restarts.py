"""Restarts in place: what a run tells its supervisor, and what follows from how it ended.

With ``--max_restarts`` the command's process is a supervisor (`shardwright.hosts.supervisor`), and the training a child
of it. A process opens its devices once, so after a lost host only a new one has them; nothing of the old one is left,
neither threads nor what lies on the devices; and a restart is what a launcher's would be, whose path every kill takes.
It costs a start: imports, reading, a compile.

The two speak by a file, the notes: one that is killed leaves what it noted before.
"""

from __future__ import annotations

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

from shardwright.errors import INTERRUPTED, LOST, PREEMPTED, TransientError, UserError, command, without_credentials

NOTES = "SHARDWRIGHT_NOTES"  # in a child's environment: the path of its notes
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 300.0  # seconds
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of linux/prctl.h
_ASKED_TO_STOP = (PREEMPTED, INTERRUPTED, -signal.SIGTERM, -signal.SIGINT)


@dataclass(frozen=True)
class Restarted:
    """What a run is told of the ones that it took the place of.

    Args:
        count: restarts so far.
        why: what ended the run before; empty: there was none.
    """

    count: int = 0
    why: str = ""


@dataclass(frozen=True)
class Restarts:
    """How often a run may begin again.

    Args:
        limit: ``--max_restarts``.
        before: what its supervisor told it.
    """

    limit: int = 0
    before: Restarted = Restarted()

    def follows(self, error: BaseException, begun: bool) -> bool:
        """Whether the run begins again after ``error``.

        Args:
            begun: a step was taken. What fails before one, in a first process, is most likely asked for wrongly.
        """
        return isinstance(error, TransientError) and self.before.count < self.limit and (begun or self.before.count > 0)


def asked_limit(words: Sequence[str]) -> int:
    """``--max_restarts`` among the words of a command line; 0 if it is not there, or can't be: a run refuses it then.

    To check all options imports transformers, which a supervisor does without.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--max_restarts", "--max-restarts", type=int, default=0)
    try:
        return max(parser.parse_known_args(list(words))[0].max_restarts, 0)
    except argparse.ArgumentError:
        return 0


def wait_before(restart: int) -> float:
    """Seconds to wait before restart number ``restart`` (from 1): each wait is twice the one before."""
    return min(_FIRST_WAIT * 2.0 ** (restart - 1), _LONGEST_WAIT)


def words_again(output: str, resume: str | None, saved: bool) -> list[str]:
    """What is added to the command of a run that had begun to train into ``output``, so that it goes on.

    Of an option that a command line has twice the later one wins.

    Args:
        resume: its ``--resume_from_checkpoint``.
        saved: whether it has a checkpoint to go on from. Without one it begins where it began.
    """
    own = saved or resume in (None, "latest")
    more = ["--resume_from_checkpoint", "latest"] if own else ["--overwrite_output_dir", "True"]
    return ["--output_dir", output, *more]


def check_limit(limit: int, restarts: Restarts | None) -> None:
    """Refuse ``--max_restarts`` in a process that has no supervisor.

    Raises:
        UserError: ``limit`` is one, and no ``restarts`` are given.
    """
    if limit and restarts is None:
        raise UserError(
            asked=f"--max_restarts {limit}",
            found=f"a run that Python code began, not {command('train')}",
            why="a restart is a new process of the same command, and that code's own state would be lost with the old",
            instead=f"{command('train')}; or catch shardwright.errors.TransientError and train anew from `latest`",
        )


# ---- the notes ----

_notes: str | None = None  # of this process, if a supervisor began it
_lock = threading.Lock()  # the watchdog's threads note things too


def follow_supervisor(environment: MutableMapping[str, str]) -> Restarted | None:
    """What this process's supervisor told it; None: it has none. A process whose supervisor dies is killed.

    The path of the notes is taken out of ``environment``, so that no program which the run starts writes there.
    """
    global _notes
    if (path := environment.pop(NOTES, None)) is None:
        return None
    _notes, told = path, read_notes(path)
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != told.get("supervisor"):  # it died before that call
        os._exit(LOST)
    return Restarted(int(told.get("count", 0)), str(told.get("why", "")))


def supervised() -> bool:
    """Whether a supervisor began this process."""
    return _notes is not None


def note(**facts: Any) -> None:
    """Tell the supervisor, if there is one: ``job`` (:class:`supervisor.Place`), ``begun``, ``more`` words."""
    if _notes is None:
        return
    with _lock, contextlib.suppress(OSError):  # a full disk: what was noted before stays
        write_notes(_notes, read_notes(_notes) | facts)


def note_passing(why: str) -> None:
    """Tell the supervisor that this process ends because of something passing. No credentials of a URL are told."""
    note(transient=True, ended=without_credentials(why.partition("\n")[0]))


def read_notes(path: str) -> dict[str, Any]:
    """What the file ``path`` says; nothing where there is none."""
    try:
        with open(path) as file:
            found = json.load(file)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_notes(path: str, facts: Mapping[str, Any]) -> None:
    """Puts ``facts`` into the file ``path``, whole or not at all."""
    with open(f"{path}.new", "w") as file:
        json.dump(dict(facts), file)
    os.replace(f"{path}.new", path)


# ---- what follows ----


@dataclass(frozen=True)
class Ended:
    """How the run of one host ended.

    Args:
        code: its exit code, or minus the signal that ended it.
        told: its supervisor passed a signal on to it, or would have.
        transient: it said that what ended it may pass.
        begun: a step was taken.
        why: what it said of its end.
        more: the words with which its command goes on.
    """

    code: int
    told: bool = False
    transient: bool = False
    begun: bool = False
    why: str = ""
    more: Sequence[str] = ()

    @property
    def killed(self) -> bool:
        """Something outside ended it: a host's kernel that was out of memory, or a person."""
        return self.code == -signal.SIGKILL

    @property
    def passing(self) -> bool:
        return self.transient or self.killed or self.code == LOST

    @property
    def stopped(self) -> bool:
        return self.code in _ASKED_TO_STOP or (self.told and self.code != 0)

    @property
    def failed(self) -> bool:
        """It ended in a way after which the other hosts have nothing more to do."""
        return self.code not in (0, PREEMPTED, INTERRUPTED)


@dataclass(frozen=True)
class Verdict:
    """What all hosts of a job do next.

    Args:
        again: begin again, with ``more`` words; else end with ``code``.
        why: what ended the runs.
    """

    again: bool
    code: int = 0
    why: str = ""
    more: Sequence[str] = ()


def decide(ended: Sequence[Ended], restarts: int, limit: int) -> Verdict:
    """What follows, for all hosts alike.

    A host that is lost ends the others in various ways (torch_xla's coordinator aborts them, a computation raises), so
    one end that is passing makes up for others that say nothing. A user's error and a request to stop are final.

    Args:
        ended: how each host's run ended, in the order of hosts.
        restarts: so far.
    """
    refused = [each for each in ended if each.code == 2 and not each.transient]
    stopped = [each for each in ended if each.stopped]
    if final := [*refused, *stopped]:
        return Verdict(False, final[0].code)
    passing = [each for each in ended if each.passing]
    begun = restarts > 0 or any(each.begun for each in ended)
    if passing and begun and restarts < limit:
        more = next((each.more for each in ended if each.more), ())
        return Verdict(True, why=_why(ended), more=more)
    lost = len(ended) > 1 and any(each.killed or each.code == LOST for each in ended)
    return Verdict(False, LOST if lost else next((each.code for each in ended if each.code), 0), _why(ended))


def _why(ended: Sequence[Ended]) -> str:
    for host, each in enumerate(ended):
        if each.killed:
            return f"host {host} was killed (SIGKILL)" if len(ended) > 1 else "it was killed (SIGKILL)"
    said = (each.why for each in ended if each.passing and each.why)
    return next(said, "")
