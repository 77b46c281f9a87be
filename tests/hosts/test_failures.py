"""A host that dies, stands still or can't write: the others end soon and say why, and what is saved is whole."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwright.checkpoint import manifest
from shardwright.checkpoint.lineage import NAME, whole_steps
from shardwright.errors import LOST
from shardwright.files.folder import Folder
from tests.support.hosts import SECONDS, HostLives, assert_same_losses, log_of, wait_until
from tests.support.lives import tiny_run, write_text
from tests.support.tpu_compiler import needs_libtpu

pytestmark = [pytest.mark.slow, needs_libtpu]  # whose table of functions the stand-in takes
STEPS = 40


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("failures")
    write_text(made)
    return made


@pytest.fixture(scope="module")
def lives(home) -> Iterator[HostLives]:
    with HostLives(SHARDWRIGHT_CACHE=str(home / "cache")) as found:
        yield found


def job(home: Path, *more: object) -> list[object]:
    return [*tiny_run(home), "--logging_steps", 5, "--save_steps", 5, "--resume_from_checkpoint", "latest", *more]


@pytest.fixture(scope="module")
def whole(home, lives) -> Path:
    """The output of a job on one host that is never stopped."""
    assert lives.run(home / "logs", *job(home, "--max_steps", STEPS, "--output_dir", home / "one"), hosts=1) == [0]
    return home / "one"


def whole_until(output: Path, step: int) -> None:
    wait_until(lambda: (output / f"checkpoint-{step}" / manifest.MANIFEST).exists())


@pytest.mark.parametrize("host", [0, 1])
def test_a_host_that_dies_in_a_save_leaves_no_broken_checkpoint_that_passes_for_whole(
    home, lives, whole, host, tmp_path
):
    arguments = job(home, "--max_steps", STEPS, "--output_dir", tmp_path / "out")
    output = tmp_path / "out"

    def half() -> list[str]:
        names = [name for name in os.listdir(output) if NAME.fullmatch(name)] if output.exists() else []
        return [name for name in names if not (output / name / manifest.MANIFEST).exists()]

    processes = lives.start(tmp_path / "logs", *arguments, hosts=2)
    whole_until(output, 5)
    wait_until(lambda: bool(half()))
    os.kill(processes[host], signal.SIGKILL)
    codes = lives.wait()
    assert codes[host] == -signal.SIGKILL
    assert codes[1 - host] in (LOST, -signal.SIGABRT)
    for step in whole_steps(Folder(output)):  # one whose parts were all written by then
        manifest.check(Folder(output) / f"checkpoint-{step}")
    assert lives.run(tmp_path / "logs", *arguments, hosts=2) == [0, 0]
    assert_same_losses(output, whole)


@pytest.mark.parametrize("host", [0, 1])
def test_a_host_that_stands_still_ends_the_others_with_its_number(home, lives, host, tmp_path):
    output, logs = tmp_path / "out", tmp_path / "logs"
    processes = lives.start(logs, *job(home, "--max_steps", 4000, "--output_dir", output), hosts=2)
    whole_until(output, 5)
    os.kill(processes[host], signal.SIGSTOP)
    said = "no sign of life" if host else "not answered"
    wait_until(lambda: said in log_of(logs, 1 - host))
    os.kill(processes[host], signal.SIGKILL)
    codes = lives.wait()
    assert codes[1 - host] == LOST
    log = log_of(logs, 1 - host).rpartition("error: host")[2]
    assert f"host {host} has" in log
    assert re.search(r"step \d+", log)
    assert "Thread 0x" in log, "the stacks of all threads"


def test_a_step_that_hangs_is_ended_and_shown_with_every_host_s_place(home, tmp_path):
    logs, output = tmp_path / "logs", tmp_path / "out"
    with HostLives(SHARDWRIGHT_CACHE=str(home / "cache"), HOST_SILENT="10000") as lives:
        arguments = job(home, "--max_steps", 4000, "--hang_timeout", 60, "--output_dir", output)
        processes = lives.start(logs, *arguments, hosts=2)
        whole_until(output, 5)
        os.kill(processes[1], signal.SIGSTOP)
        wait_until(lambda: "error: host" in log_of(logs, 0), 2 * SECONDS)
        os.kill(processes[1], signal.SIGKILL)
        assert lives.wait() == [LOST, -signal.SIGKILL]
    log = log_of(logs, 0)
    assert re.search(r"no progress for \d+ s after step \d+, in \w+ \(--hang_timeout\)", log)
    assert re.search(r"host 0: after step \d+, \w+ for \d+ s\n  host 1: after step \d+, \w+ for \d+ s", log)


def test_a_host_that_can_t_write_stops_all_and_leaves_no_whole_checkpoint(home, tmp_path):
    logs, output = tmp_path / "logs", tmp_path / "out"
    with HostLives(SHARDWRIGHT_CACHE=str(home / "cache"), HOST_FILE_LIMIT="1:100000") as lives:
        assert lives.run(logs, *job(home, "--max_steps", 4000, "--output_dir", output), hosts=2) == [2, 2]
    for host in (0, 1):
        assert "on host 1: " in log_of(logs, host)
        assert "File too large" in log_of(logs, host)
        assert "Traceback" not in log_of(logs, host)
    assert whole_steps(Folder(output)) == []
