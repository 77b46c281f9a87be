"""A run that makes no progress is ended, with what it was doing; one that does, however slowly, is not.

To wait for that takes long, so all the runs begin at once.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from shardwright.errors import LOST
from tests.support import fork_server
from tests.support.training import environment

PROGRAM = """
import time
from types import SimpleNamespace
from shardwright.hosts import watchdog
from shardwright.hosts.hosts import hosts
watchdog.LOOK = 0.1
dog = hosts().watchdog
with dog.over({timeout}, SimpleNamespace(activity="steps")):
    dog.moved(41)
    print("began", flush=True)
    for _ in range({turns}):
        time.sleep(0.2)
        {act}
    print("went on")
time.sleep({after})
print("ended")
"""

COMPILES = """
import time, torch
import torch_xla
from types import SimpleNamespace
from shardwright.hosts import watchdog
from shardwright.hosts.hosts import hosts
from shardwright.step.compile_guard import CompileGuard
watchdog.LOOK = 0.1
ones, guard = torch.ones(2, device=torch_xla.device()), CompileGuard("step", 1)
def trace(batch):
    time.sleep(3)
    return {"sum": batch["ones"] + 1}
with hosts().watchdog.over(1, SimpleNamespace(activity="steps")):
    hosts().watchdog.moved(41)
    guard.run({"ones": ones}, trace)
    print("compiled", flush=True)
    guard.run({"ones": ones}, trace)
"""


@dataclass
class Begun:
    """The runs of this file, and when one of them was paused."""

    stands: fork_server.Forked
    paused: fork_server.Forked
    compiles: fork_server.Forked
    reads: fork_server.Forked
    since: float = 0.0


def start(program: str, **options: object) -> fork_server.Forked:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return fork_server.Forked("-c", program, text=True, **pipes, **options)


def end(run: fork_server.Forked) -> tuple[int, str, str]:
    """A run's exit code, what it printed, and its errors."""
    said, errors = run.communicate(timeout=900)
    return run.returncode, said, errors


@pytest.fixture(scope="module", autouse=True)
def begun() -> Iterator[Begun]:
    found = Begun(
        stands=start(PROGRAM.format(timeout=1, turns=3000, act="pass", after=2)),
        paused=start(PROGRAM.format(timeout=10, turns=10, act="pass", after=0)),
        compiles=start(COMPILES, env={**environment(), "PJRT_DEVICE": "CPU"}),
        reads=start(PROGRAM.format(timeout=3, turns=25, act="dog.progressed()", after=6)),
    )
    assert found.paused.stdout.readline() == "began\n"
    found.paused.send_signal(signal.SIGSTOP)
    found.since = time.monotonic()
    yield found
    for each in (found.stands, found.paused, found.compiles, found.reads):
        each.kill()  # if a test failed


def test_a_run_without_progress_is_ended_and_says_where_every_thread_stands(begun: Begun) -> None:
    code, said, errors = end(begun.stands)
    assert code == LOST
    assert "after step 41, in steps (--hang_timeout)" in errors
    assert "most recent call first" in errors
    assert "went on" not in said


def test_a_compile_counts_as_progress_however_long_it_takes_and_what_comes_after_it_does_not(begun: Begun) -> None:
    code, said, errors = end(begun.compiles)
    assert (code, said) == (LOST, "compiled\n"), errors


def test_one_that_reads_and_writes_for_long_goes_on_and_so_does_a_process_after_its_run(begun: Begun) -> None:
    code, said, errors = end(begun.reads)
    assert (code, said.split()) == (0, ["began", "went", "on", "ended"]), errors


def test_a_run_that_was_paused_for_longer_goes_on(begun: Begun) -> None:
    time.sleep(max(0.0, begun.since + 11 - time.monotonic()))
    begun.paused.send_signal(signal.SIGCONT)
    code, said, errors = end(begun.paused)
    assert (code, said.split()) == (0, ["went", "on", "ended"]), errors
