"""Compiled programs that are kept: a run that begins again compiles nothing, and its numbers are the same to the bit.

The plugin is the hosts' stand-in, whose table of functions torch_xla and the keeping of programs both go through; its
own compiles are counted where it compiles. That libtpu loads what it has serialised is not shown by it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwright.checkpoint import manifest
from tests.support.hosts import HostLives, log_of, losses, wait_until
from tests.support.lives import tiny_run, write_text
from tests.support.tpu_compiler import needs_libtpu

pytestmark = [pytest.mark.slow, needs_libtpu]  # whose table of functions the stand-in takes
HOSTS = 2


class Jobs:
    """Jobs on one folder of programs, each of which says what its hosts compiled.

    Args:
        compiled: what SHARDWRIGHT_COMPILED is.
    """

    def __init__(self, home: Path, lives: HostLives, compiled: Path) -> None:
        self.home, self.lives, self.compiled = home, lives, compiled

    def arguments(self, name: str) -> list[object]:
        every = ("--max_steps", 12, "--logging_steps", 1, "--save_steps", 4, "--eval_strategy", "steps")
        output = ("--output_dir", self.home / name, "--resume_from_checkpoint", "latest")
        return [*tiny_run(self.home), *every, "--eval_steps", 6, *output]

    def run(self, name: str, hosts: int = HOSTS) -> tuple[list[int], str]:
        """Runs a job; how many programs each host compiled, and the first one's log."""
        for each in (self.home / "programs").iterdir():
            each.unlink()
        logs = self.home / f"{name}-logs"
        before = len(log_of(logs, 0)) if logs.exists() else 0
        assert self.lives.run(logs, *self.arguments(name), hosts=hosts) == [0] * hosts, log_of(logs, 0)
        made = [self.home / "programs" / str(host) for host in range(hosts)]
        return [len(each.read_text().split()) if each.exists() else 0 for each in made], log_of(logs, 0)[before:]


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("compiled")
    write_text(folder)
    (folder / "programs").mkdir()
    return folder


@pytest.fixture(scope="module")
def jobs(home) -> Iterator[Jobs]:
    compiled = home / "shared" / "compiled"
    environment = {"HOST_PROGRAMS": home / "programs", "SHARDWRIGHT_CACHE": home / "cache"}
    with HostLives(**{k: str(v) for k, v in environment.items()}, SHARDWRIGHT_COMPILED=str(compiled)) as lives:
        yield Jobs(home, lives, compiled)


@pytest.fixture(scope="module")
def first(jobs) -> tuple[list[int], str]:
    """A job that is never stopped, which finds nothing that is kept."""
    return jobs.run("first")


def test_the_first_run_compiles_and_the_first_host_keeps_it(jobs, first):
    (compiled, other), log = first
    assert compiled > 1
    assert other <= compiled  # a host that is late finds what the first has kept meanwhile
    assert len(os.listdir(jobs.compiled)) == compiled
    assert f"compile: {compiled} programs, 0 loaded from {jobs.compiled}" in log.splitlines()


def test_a_run_that_is_killed_and_begun_again_compiles_nothing_and_has_the_same_losses(jobs, first, home):
    processes = jobs.lives.start(home / "killed-logs", *jobs.arguments("killed"), hosts=HOSTS)
    wait_until(lambda: (home / "killed" / "checkpoint-4" / manifest.MANIFEST).exists())
    for process in processes:
        os.kill(process, signal.SIGKILL)
    jobs.lives.wait()
    compiled, log = jobs.run("killed")
    assert compiled == [0] * HOSTS
    assert "resume:" in log
    assert [line for line in log.splitlines() if line.startswith("compile: ")][-1].endswith(
        f"loaded from {jobs.compiled}"
    )
    assert "  0 compiles" in log
    assert losses(home / "killed") == losses(home / "first"), "to the bit"


def test_what_is_damaged_or_of_another_program_is_compiled_again_with_a_notice_and_kept_anew(jobs, first, home):
    (count, _), _ = first
    one, two = sorted(jobs.compiled.iterdir(), key=lambda file: -file.stat().st_size)[:2]
    whole = one.read_bytes()
    one.write_bytes(whole[: len(whole) // 2])
    two.write_bytes(whole)
    (compiled, other), log = jobs.run("damaged")
    assert compiled == 2
    assert other <= 2  # as above
    for file in (one, two):
        assert f"{file} is damaged, and compiled again" in log
    assert f"compile: {count} programs, {count - 2} loaded from {jobs.compiled}" in log.splitlines()
    assert losses(home / "damaged") == losses(home / "first")
    assert not (jobs.home / "damaged-logs" / "1.log").read_text().count("damaged"), "the first host speaks"
    # whole again; not the same bytes: a program that is serialised twice differs in a few
    assert jobs.run("anew")[0] == [0] * HOSTS


def test_a_folder_that_cannot_be_written_is_said_and_the_run_goes_on(home):
    (home / "taken").write_text("a file, where the folder should be")
    environment = {"HOST_PROGRAMS": str(home / "programs"), "SHARDWRIGHT_CACHE": str(home / "cache")}
    with HostLives(**environment, SHARDWRIGHT_COMPILED=str(home / "taken" / "compiled")) as lives:
        (compiled,), log = Jobs(home, lives, home / "taken").run("unwritable", hosts=1)
    assert compiled > 1
    assert log.count("compiled programs can't be kept, and the run goes on") == 1


def test_without_the_variable_each_host_keeps_its_own_in_its_cache(home):
    lives = HostLives(HOST_PROGRAMS=str(home / "programs"), SHARDWRIGHT_CACHE=str(home / "cache"))
    del lives.environment["SHARDWRIGHT_COMPILED"]
    with lives:
        (compiled,), log = Jobs(home, lives, home).run("own", hosts=1)
    assert len(list((home / "cache" / "programs" / "0").iterdir())) == compiled > 1
    assert f"compile: {compiled} programs, 0 loaded from {home / 'cache' / 'programs' / '0'}" in log.splitlines()
