"""A run that makes no progress is ended, with what it was doing; one that does, however slowly, is not."""

from __future__ import annotations

import signal
import subprocess
import time

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
time.sleep(2 * {timeout})
print("ended")
"""


def run(timeout: float, turns: int, act: str) -> subprocess.CompletedProcess[str]:
    program = PROGRAM.format(timeout=timeout, turns=turns, act=act)
    return fork_server.run("-c", program)


def test_a_run_without_progress_is_ended_and_says_where_every_thread_stands() -> None:
    ended = run(timeout=1, turns=3000, act="pass")
    assert ended.returncode == LOST
    assert "after step 41, in steps (--hang_timeout)" in ended.stderr
    assert "most recent call first" in ended.stderr
    assert "went on" not in ended.stdout


def test_a_run_that_was_paused_for_longer_goes_on() -> None:
    program = PROGRAM.format(timeout=10, turns=10, act="pass")
    with fork_server.Forked("-c", program, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as paused:
        assert paused.stdout.readline() == "began\n"
        paused.send_signal(signal.SIGSTOP)
        time.sleep(11)
        paused.send_signal(signal.SIGCONT)
        said = paused.communicate()
    assert (paused.returncode, said[0].split()) == (0, ["went", "on", "ended"]), said[1]


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


def test_a_compile_counts_as_progress_however_long_it_takes_and_what_comes_after_it_does_not() -> None:
    ended = fork_server.run("-c", COMPILES, env={**environment(), "PJRT_DEVICE": "CPU"})
    assert (ended.returncode, ended.stdout) == (LOST, "compiled\n"), ended.stderr


def test_one_that_reads_and_writes_for_long_goes_on_and_so_does_a_process_after_its_run() -> None:
    ended = run(timeout=3, turns=25, act="dog.progressed()")
    assert (ended.returncode, ended.stdout.split()) == (0, ["began", "went", "on", "ended"]), ended.stderr
