"""A run that makes no progress is ended, with what it was doing; one that does, however slowly, is not."""

from __future__ import annotations

import subprocess

from shardwright.errors import LOST
from tests.support import fork_server

PROGRAM = """
import time
from types import SimpleNamespace
from shardwright.hosts import watchdog
from shardwright.hosts.hosts import hosts
watchdog.LOOK = 0.1
dog = hosts().watchdog
with dog.over({timeout}, SimpleNamespace(activity="steps")):
    dog.moved(41)
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


def test_one_that_reads_and_writes_for_long_goes_on_and_so_does_a_process_after_its_run() -> None:
    ended = run(timeout=3, turns=25, act="dog.progressed()")
    assert (ended.returncode, ended.stdout.split()) == (0, ["went", "on", "ended"]), ended.stderr
