"""Runs cases in a forked process with bounds on time and memory, watched from outside."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import resource
import select
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.configuration import set_hypothesis_home_dir

from shardwright.errors import UserError
from tests.support.fuzz.kind import Kind

SECONDS = 60  # of one case; a machine that does other work too takes a second for one that takes the longest
KILL_AFTER = 3 * SECONDS  # of one case, if the alarm can't end it
ADDRESSES = 4 << 30  # bytes of address space beyond what the process has at its start
GROWTH = 512 << 20  # bytes of memory that one case may take
LONGEST = 20_000  # characters of a refusal


@dataclass
class Tally:
    """What became of the cases of a kind; each failure is a case and what it ended in."""

    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[Any, str]] = field(default_factory=list)
    refusals: Counter[str] = field(default_factory=Counter)  # by what was found, without its numbers

    @property
    def cases(self) -> int:
        return sum(self.outcomes.values())


class TooLong(BaseException):
    """A case did not end; not an Exception, so that nothing takes it for a refusal."""


def run_cases(kind: Kind, count: int, number: int, tally: Tally) -> None:
    """Runs ``count`` cases drawn with the seed ``number``. One that kills the process is a failure."""
    done = tally.cases
    while (left := count - (tally.cases - done)) > 0:
        _in_a_process(lambda root, answer: _draw(kind, left, number + tally.cases, root, answer), tally)


def run_case(kind: Kind, case: Any, tally: Tally) -> None:
    """Runs one case."""
    _in_a_process(lambda root, answer: _work(kind, root, answer)(case), tally)


def _in_a_process(work: Any, tally: Tally) -> None:
    """Forks a process for ``work``, which gets a folder, and writes a line before each case and one after it."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as root:
        readable, writable = os.pipe()
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            os.close(readable)
            _child(functools.partial(work, Path(root)), writable)
        os.close(writable)
        _watch(child, readable, tally)


def _watch(child: int, readable: int, tally: Tally) -> None:
    """Notes what the process says of each case; ends it if it says nothing for too long."""
    begun, ended = None, "died"
    with os.fdopen(readable, "rb") as answers:
        while select.select([answers], [], [], KILL_AFTER)[0]:
            if not (line := answers.readline()):
                break
            found = json.loads(line)
            if "case" in found:
                begun = found["case"]
                continue
            tally.outcomes[found["outcome"]] += 1
            if found["outcome"] == "failed":
                tally.failures.append((begun, found["why"]))
            if found["outcome"] == "refused":
                tally.refusals[re.sub(r"\d+|'.*'|/\S+", "_", found["why"])] += 1
            begun = None
        else:
            ended = f"did not end in {KILL_AFTER} s"
            os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code or begun is not None:
        tally.outcomes["failed"] += 1
        tally.failures.append((begun, f"the process {ended} (exit code {code})"))


def _child(work: Any, answer: int) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1) if os.environ.get("FUZZ_STDERR") else (0, 1, 2):
        os.dup2(nothing, stream)
    code = 1
    try:
        torch.set_num_threads(1)
        work(answer)
        code = 0
    except BaseException:
        os.write(answer, _line(outcome="failed", why=f"outside of a case: {traceback.format_exc()[-3000:]}"))
        code = 0
    finally:
        os._exit(code)


def _draw(kind: Kind, count: int, number: int, root: Path, answer: int) -> None:
    set_hypothesis_home_dir(root)
    run = settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )(seed(number)(given(kind.cases)(_work(kind, root, answer))))
    run()


def _work(kind: Kind, root: Path, answer: int) -> Any:
    """What runs a case and answers with its outcome."""
    (root / "base").mkdir()
    made = kind.prepare(root / "base")
    _limit()

    def work(case: Any) -> None:
        case = json.loads(json.dumps(case))
        os.write(answer, _line(case=case))
        scratch = root / "case"
        scratch.mkdir()
        os.chdir(scratch)
        outcome, why = _outcome(kind, made, case, scratch)
        os.chdir(root)
        shutil.rmtree(scratch, ignore_errors=True)
        os.write(answer, _line(outcome=outcome, why=why))

    return work


def _outcome(kind: Kind, made: Any, case: Any, scratch: Path) -> tuple[str, str]:
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    try:
        with _bounded():
            kind.run(made, case, scratch)
        found = "succeeded", ""
    except UserError as error:
        found = (
            ("refused", error.found[:70])
            if len(str(error)) < LONGEST
            else ("failed", f"a refusal of {len(str(error))} characters")
        )
    except SystemExit as error:  # argparse's
        found = ("refused", "") if error.code == 2 else ("failed", f"exit code {error.code}")
    except BaseException:
        found = "failed", traceback.format_exc()[-3000:]
    grown = _memory("VmHWM") - before
    return found if grown < GROWTH else ("failed", f"{grown:,} bytes of memory; it ended as: {found}")


@contextlib.contextmanager
def _bounded() -> Iterator[None]:
    def too_long(*_: object) -> None:
        raise TooLong(f"more than {SECONDS} s")

    signal.signal(signal.SIGALRM, too_long)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)


def _limit() -> None:
    limit = _memory("VmSize") + ADDRESSES
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _memory(name: str) -> int:
    """Bytes that the process has or had, by a name in /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def _line(**content: Any) -> bytes:
    return json.dumps(content).encode() + b"\n"
