"""A host that dies, stands still or can't write: the others end soon and say why, and what is saved is whole.

To wait for that takes a minute and more, so such jobs run beside each other.
"""

from __future__ import annotations

import os
import re
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from shardwright.checkpoint import manifest
from shardwright.checkpoint.lineage import NAME, whole_steps
from shardwright.errors import LOST
from shardwright.files.folder import Folder
from tests.support.hosts import SECONDS, HostLives, Job, assert_same_losses, wait_until
from tests.support.lives import tiny_run, write_text
from tests.support.tpu_compiler import needs_libtpu

pytestmark = [pytest.mark.slow, needs_libtpu]  # whose table of functions the stand-in takes
STEPS, SAVE = 24, 4


@pytest.fixture(scope="module")
def home(on_disk) -> Path:
    write_text(on_disk)
    return on_disk


def job(home: Path, name: str, *more: object, **environment: str) -> Job:
    every = ("--logging_steps", SAVE, "--save_steps", SAVE, "--resume_from_checkpoint", "latest")
    return Job(home / name, HostLives(home, **environment), *tiny_run(home), *every, *more)


@pytest.fixture(scope="module")
def whole(home) -> Path:
    """The output of a job on one host that is never stopped."""
    never = job(home, "whole", "--max_steps", STEPS)
    assert never.lives.run(never.logs, *never.words, hosts=1) == [0]
    return never.output


def half_written(output: Path) -> list[str]:
    names = [name for name in os.listdir(output) if NAME.fullmatch(name)] if output.exists() else []
    return [name for name in names if not (output / name / manifest.MANIFEST).exists()]


@pytest.fixture(scope="module")
def killed(home, whole) -> tuple[list[Job], Job]:
    """Two jobs of which a host was killed in a save, the first and the second; and one whose second could not write.

    The rows of all are in the cache by now: the second host of the last could not write these either.
    """
    jobs = [job(home, f"killed-{host}", "--max_steps", STEPS) for host in (0, 1)]
    # a shard of the weights is larger; and the first learns long after the second that all must end
    late = {"HOST_FILE_LIMIT": "1:15000", "HOST_LATE": "0"}
    full = job(home, "full", "--max_steps", 400, "--save_steps", 20, **late)
    with full, jobs[0], jobs[1]:
        left = dict(enumerate(jobs))

        def all_killed() -> bool:
            for host, each in list(left.items()):
                if each.saved(SAVE) and half_written(each.output):
                    os.kill(left.pop(host).processes[host], signal.SIGKILL)
            return not left

        wait_until(all_killed)
    return jobs, full


@pytest.mark.parametrize("host", [0, 1])
def test_a_host_that_dies_in_a_save_leaves_no_broken_checkpoint_that_passes_for_whole(killed, whole, host):
    ended = killed[0][host]
    assert ended.codes[host] == -signal.SIGKILL
    assert ended.codes[1 - host] in (LOST, -signal.SIGABRT)
    for step in whole_steps(Folder(ended.output)):  # one whose parts were all written by then
        manifest.check(Folder(ended.output) / f"checkpoint-{step}")
    with ended:  # once more
        pass
    assert ended.codes == [0, 0]
    assert_same_losses(ended.output, whole)


def test_a_host_that_can_t_write_stops_all_and_leaves_no_whole_checkpoint(killed):
    full = killed[1]
    assert full.codes == [2, 2]
    for host in (0, 1):
        assert "on host 1: " in full.log(host)
        assert "File too large" in full.log(host)
        assert "Traceback" not in full.log(host)
    assert whole_steps(Folder(full.output)) == []


@pytest.fixture(scope="module")
def standing(home) -> dict[str, Job]:
    """Jobs of which one host stood still: the first, the second, and the second where none is taken for lost."""
    jobs = {
        "0": job(home, "still-0", "--max_steps", 4000),
        "1": job(home, "still-1", "--max_steps", 4000),
        "hangs": job(home, "hangs", "--max_steps", 4000, "--hang_timeout", 25, HOST_SILENT="10000"),
    }
    # the host that stands still, and what the other one says
    ways = {"0": (0, "not answered"), "1": (1, "no sign of life"), "hangs": (1, "error: host")}
    with ExitStack() as running:
        for each in jobs.values():
            running.enter_context(each)
        for name, each in jobs.items():
            wait_until(lambda each=each: each.saved(SAVE))
            os.kill(each.processes[ways[name][0]], signal.SIGSTOP)
        for name, each in jobs.items():
            still, said = ways[name]
            wait_until(lambda each=each, still=still, said=said: said in each.log(1 - still), 2 * SECONDS)
            os.kill(each.processes[still], signal.SIGKILL)
    return jobs


@pytest.mark.parametrize("host", [0, 1])
def test_a_host_that_stands_still_ends_the_others_with_its_number(standing, host):
    ended = standing[str(host)]
    assert ended.codes[1 - host] == LOST
    log = ended.log(1 - host).rpartition("error: host")[2]
    assert f"host {host} has" in log
    assert re.search(r"step \d+", log)
    assert "Thread 0x" in log, "the stacks of all threads"


def test_a_step_that_hangs_is_ended_and_shown_with_every_host_s_place(standing):
    assert standing["hangs"].codes == [LOST, -signal.SIGKILL]
    log = standing["hangs"].log(0)
    assert re.search(r"no progress for \d+ s after step \d+, in \w+ \(--hang_timeout\)", log)
    assert re.search(r"host 0: after step \d+, \w+ for \d+ s\n  host 1: after step \d+, \w+ for \d+ s", log)
