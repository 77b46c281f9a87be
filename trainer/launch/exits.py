"""Which exit codes of a run start it again, as each engine decides that; the targets write their rules from here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from shardwright.errors import INTERRUPTED, LOST, PREEMPTED

USER_ERROR = 2


class Wanted(StrEnum):
    """What should follow an exit code."""

    DONE = "nothing: it is done"
    AGAIN = "start again"
    NEVER = "never start again"
    EITHER = "either; if again, then so many times at most"


@dataclass(frozen=True)
class Exit:
    """What an exit code of `scripts/train.py` says, and what should follow it."""

    meaning: str
    wanted: Wanted


# 128 + N is a process that signal N ended. The loss of a host reaches the others as LOST or as 134, which torch_xla's
# coordinator ends them with, and as 1 where a computation raises first.
CODES: dict[int, Exit] = {
    0: Exit("done", Wanted.DONE),
    1: Exit("an error that nobody foresaw, or another host is lost", Wanted.EITHER),
    USER_ERROR: Exit("something asked for can't be", Wanted.NEVER),
    PREEMPTED: Exit("SIGTERM, and what was learned is in a checkpoint", Wanted.AGAIN),
    LOST: Exit("another host is lost, or nothing moved", Wanted.AGAIN),
    INTERRUPTED: Exit("Ctrl-C, which nobody presses on a cluster", Wanted.EITHER),
    134: Exit("aborted: a runtime's check failed, or another host is lost", Wanted.EITHER),
    135: Exit("bus error: a mapped file's disk is gone", Wanted.EITHER),
    137: Exit("killed: out of memory, or no time left to save", Wanted.EITHER),
    139: Exit("segmentation fault", Wanted.EITHER),
    143: Exit("SIGTERM before the first step: nothing was learned", Wanted.AGAIN),
}

FINAL = (USER_ERROR, INTERRUPTED)  # where a rule names the codes that are not started again
XPK_ALWAYS = frozenset({42, *range(127, 256)})  # xpk 1.16 restarts on these, whatever it is told
XPK_TOO = (1, PREEMPTED, LOST)  # what it is told beside them
# SkyPilot counts no restart that it makes because of a code, so only codes that say "stopped from outside" are named.
# The loss of a host's machine it sees by itself, and starts again with no look at the code.
SKYPILOT = (PREEMPTED, LOST, 143)


@dataclass(frozen=True)
class ExitRule:
    """How an engine decides.

    Args:
        restarts: whether it starts a run again that ended with a code.
        bounded: whether it does so `--max_restarts` times at most.
        written: where the rule stands in what is written.
    """

    restarts: Callable[[int], bool]
    bounded: bool
    written: str


def ours(code: int) -> bool:
    """Whether a run that ended with ``code`` is started again where a rule names the final codes."""
    return code not in (0, *FINAL)


RULES: dict[str, ExitRule] = {
    "xpk": ExitRule(lambda code: code in XPK_ALWAYS or code in XPK_TOO, True, "`--restart-on-exit-codes`"),
    "jobset": ExitRule(ours, True, "`podFailurePolicy`: FailJob; `failurePolicy`: FailJobSet"),
    "skypilot": ExitRule(lambda code: code in SKYPILOT, False, "`job_recovery`: recover_on_exit_codes"),
    "tpu-vm": ExitRule(ours, True, "the loop in `host.sh`"),
    "ray": ExitRule(ours, True, "the loop of `shardwright.launch.ray_hosts`"),
}


def table() -> str:
    """The exit codes × the engines, as the Markdown table of docs/launch.md."""
    lines = [
        "| exit code | what it says | " + " | ".join(RULES) + " |",
        "|---" * (2 + len(RULES)) + "|",
    ]
    for code, exit_ in CODES.items():
        cells = [_cell(code, rule) for rule in RULES.values()]
        lines.append(f"| {code} | {exit_.meaning} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "| | *where that stands* | " + " | ".join(r.written for r in RULES.values()) + " |"])


def _cell(code: int, rule: ExitRule) -> str:
    if code == 0:
        return "done"
    return ("again, counted" if rule.bounded else "again") if rule.restarts(code) else "fails"
