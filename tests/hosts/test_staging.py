"""Two hosts with a staging folder each: what was preempted before it was copied goes on from there, if all of it is."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwright.checkpoint import manifest
from shardwright.checkpoint.lineage import LINEAGE, whole_steps
from shardwright.errors import PREEMPTED
from shardwright.files.folder import Folder
from tests.support.hosts import HostLives, assert_same_losses, log_of, wait_until
from tests.support.lives import tiny_run, write_text
from tests.support.tpu_compiler import needs_libtpu

pytestmark = [pytest.mark.slow, needs_libtpu]  # whose table of functions the stand-in takes
STEPS, SAVE = 36, 6


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("staging")
    write_text(made)
    return made


@pytest.fixture(scope="module")
def lives(home) -> Iterator[HostLives]:
    with HostLives(home) as found:
        yield found


def job(home: Path, output: Path, staging: Path) -> list[object]:
    more = ("--logging_steps", SAVE, "--save_steps", SAVE, "--max_steps", STEPS, "--resume_from_checkpoint", "latest")
    return [*tiny_run(home), *more, "--output_dir", output, "--staging_dir", staging]


class Preempted:
    """A job whose checkpoints after the first could not be copied any more; each test finds it as it was left."""

    def __init__(self, home: Path) -> None:
        self.home, self.output, self.staged = home, home / "out", [home / "staged" / str(host) for host in (0, 1)]
        self.words = [job(home, self.output, folder) for folder in self.staged]

    def stop(self, lives: HostLives) -> None:
        processes = lives.start(self.home / "logs", *self.words[0], hosts=2, others=self.words[1])
        wait_until((self.output / LINEAGE).exists)
        for step in range(SAVE + 1, STEPS + 1):  # where later ones would go lies a file
            (self.output / f"checkpoint-{step}").touch()
        wait_until((self.output / f"checkpoint-{SAVE}" / manifest.MANIFEST).exists)
        os.kill(processes[1], signal.SIGTERM)
        assert lives.wait() == [PREEMPTED, PREEMPTED]
        for step in range(SAVE + 1, STEPS + 1):
            (self.output / f"checkpoint-{step}").unlink()
        for name in ("out", "staged"):
            shutil.copytree(self.home / name, self.home / "kept" / name)

    def back(self) -> int:
        """Puts all back as it was left; returns the step that was staged last."""
        for name in ("out", "staged"):
            shutil.rmtree(self.home / name)
            shutil.copytree(self.home / "kept" / name, self.home / name)
        (place,) = self.staged[0].iterdir()
        return whole_steps(Folder(place))[-1]

    def go_on(self, lives: HostLives, logs: Path) -> str:
        assert lives.run(logs, *self.words[0], hosts=2, others=self.words[1]) == [0, 0]
        return log_of(logs, 0)


@pytest.fixture(scope="module")
def preempted(home, lives) -> Preempted:
    made = Preempted(home)
    made.stop(lives)
    return made


@pytest.fixture(scope="module")
def never_stopped(home, lives) -> Path:
    words = job(home, home / "one", home / "unused")
    assert lives.run(home / "logs-one", *words, hosts=1) == [0]
    return home / "one"


def test_what_both_hosts_staged_is_copied_and_gone_on_from(preempted, never_stopped, lives, tmp_path):
    step = preempted.back()
    log = preempted.go_on(lives, tmp_path / "logs")
    assert f"staging: checkpoint-{step} is recovered" in log
    assert re.search(rf"resume: .*checkpoint-{step}\b", log)
    assert_same_losses(preempted.output, never_stopped)
    assert [folder.exists() and list(folder.iterdir()) for folder in preempted.staged] == [[], []]


def test_what_lacks_a_host_s_part_is_said_and_the_newest_of_the_output_folder_is_gone_on_from(
    preempted, never_stopped, lives, tmp_path
):
    step = preempted.back()
    shutil.rmtree(preempted.staged[1])
    log = preempted.go_on(lives, tmp_path / "logs")
    assert re.search(rf"checkpoint-{step} of .* is not recovered: no host has its tensors-1-0\.safetensors", log)
    assert re.search(rf"resume: .*checkpoint-{SAVE}\b", log)
    assert_same_losses(preempted.output, never_stopped)


def test_one_folder_for_two_hosts_is_refused(home, lives, tmp_path):
    words = job(home, tmp_path / "out", tmp_path / "staged")
    assert lives.run(tmp_path / "logs", *words, hosts=2) == [2, 2]
    for host in (0, 1):
        assert "a folder that several hosts see (2 of them)" in log_of(tmp_path / "logs", host)
    assert not (tmp_path / "out").exists()
