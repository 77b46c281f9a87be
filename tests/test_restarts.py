"""--max_restarts: what something passing ended goes on by itself to the end that it would have had."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.support.jobs import job_of
from tests.support.lives import QUICK_COMPILE, tiny_run, write_text
from tests.support.paths import ROOT
from trainer.errors import LOST, TransientError, UserError
from trainer.report.goodput import read_lives
from trainer.restarts import (
    TOLD,
    Restarted,
    Restarts,
    check_hosts,
    check_limit,
    no_progress,
    told,
    wait_before,
    words_again,
)
from trainer.storage import StorageError
from trainer.watchdog import Watchdog

WORDS = {"asked": "write /mnt/x", "found": "OSError: gone", "why": "w", "instead": "i"}
STORE = StorageError(**WORDS)


class LostHost(TransientError):
    """What somebody else calls passing."""


def test_only_what_is_passing_is_followed_by_a_restart_and_only_so_often_and_once_the_run_has_begun():
    first = Restarts(limit=2, before=Restarted())
    assert first.follows(STORE, begun=True)
    assert first.follows(LostHost(**WORDS), begun=True)
    assert not first.follows(UserError(**WORDS), begun=True)  # a bad loss, an option
    assert not first.follows(RuntimeError("a bug"), begun=True)
    assert not first.follows(STORE, begun=False)  # a path that never was
    later = Restarts(limit=2, before=Restarted(1, "gone"))
    assert later.follows(STORE, begun=False)  # the store is still away
    assert not Restarts(limit=2, before=Restarted(2, "gone")).follows(STORE, begun=True)
    assert not Restarts().follows(STORE, begun=True)


def test_each_wait_is_twice_the_one_before_up_to_a_limit():
    assert [wait_before(restart) for restart in (1, 2, 3, 4)] == [1, 2, 4, 8]
    assert wait_before(2000 // 10) == wait_before(30) == 300


def test_a_restart_waits_says_why_and_becomes_the_command_with_these_words():
    waited: list[float] = []
    became: list[Any] = []
    console = Console(file=io.StringIO(), width=200)
    error = StorageError(**{**WORDS, "asked": "write s3://me:secret@host/x"})
    restarts = Restarts(3, ["python", "train.py"], [], Restarted(1, "x"), waited.append, lambda *a: became.append(a))
    restarts.restart(error, ["--recipe", "r"], console)
    ((program, words, environment),) = became
    assert waited == [2.0]
    assert (program, words) == ("python", ["python", "train.py", "--recipe", "r"])
    assert told(environment) == Restarted(2, "write s3://host/x: OSError: gone")
    assert "restart: 2 of 3 in 2 s, after: write s3://host/x: OSError: gone" in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("value", ["", "x", "[]", "3", '{"count": "x"}', '{"count": null}'])
def test_what_nobody_told_is_no_restart(value):
    assert told({TOLD: value}) == Restarted()


@pytest.mark.parametrize(
    ("resume", "saved", "more"),
    [
        (None, True, ["--resume_from_checkpoint", "latest"]),
        (None, False, ["--resume_from_checkpoint", "latest"]),
        ("latest", False, ["--resume_from_checkpoint", "latest"]),
        ("other/checkpoint-3", True, ["--resume_from_checkpoint", "latest"]),
        ("other/checkpoint-3", False, ["--overwrite_output_dir", "True"]),  # from there once more
    ],
)
def test_a_run_goes_on_in_its_folder_from_its_own_checkpoint_or_where_it_began(resume, saved, more):
    assert words_again(["--seed", "3"], "out", resume, saved) == ["--seed", "3", "--output_dir", "out", *more]


def test_python_code_is_told_that_it_can_not_be_begun_anew():
    with pytest.raises(UserError, match=r"scripts/train\.py; or catch"):
        check_limit(2, None)
    check_limit(0, None)
    check_limit(2, Restarts(2))
    with pytest.raises(UserError, match="--max_restarts"):
        job_of("llama_fsdp", max_restarts=-1)


def test_a_process_that_is_to_be_started_again_since_it_hangs_is_told_so_before_it_ends():
    watchdog, heard = Watchdog(), list[str]()

    def again(words: str) -> None:
        heard.append(words)
        raise InterruptedError

    watchdog.again = again
    with pytest.raises(InterruptedError):
        watchdog._end("no progress for 60 s", LOST)
    assert heard == ["no progress for 60 s"]
    assert Restarts(1, before=Restarted()).follows(no_progress(heard[0]), begun=True)


def test_several_hosts_are_their_launchers_to_begin_again():
    with pytest.raises(UserError, match="exit code 76"):
        check_hosts(2, 4)
    check_hosts(0, 4)
    check_hosts(2, 1)


# scripts/train.py, whose first process can't write one checkpoint
FAILS_ONCE = f"""
import errno, os, sys
from trainer.storage import Folder
real = Folder._open
def fails(self, name, mode):
    if "w" in mode and self.name == os.environ["FAILS"] and {TOLD!r} not in os.environ:
        raise OSError(errno.EIO, "Input/output error")
    return real(self, name, mode)
Folder._open = fails
from scripts import train
from trainer.errors import exit_code
sys.exit(exit_code(train.main))
"""


def run(folder: Path, name: str, fails: str, *more: object) -> subprocess.CompletedProcess[str]:
    words = [*tiny_run(folder), "--max_steps", 12, "--logging_steps", 2, "--save_steps", 4, *more]
    environment = {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2", "FAILS": fails, "PYTHONPATH": str(ROOT)}
    environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK_COMPILE}".strip()
    environment.pop("NPROC", None)
    command = [sys.executable, "-c", FAILS_ONCE, *map(str, words), "--output_dir", str(folder / name)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)


def log(output: Path) -> list[dict[str, Any]]:
    return json.loads((output / "trainer_state.json").read_text())["log_history"]


def losses(output: Path) -> list[tuple]:
    return [(e["step"], e["loss"], e["grad_norm"], e["learning_rate"]) for e in log(output) if "loss" in e]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("restarts")
    write_text(folder)
    done = run(folder, "whole", "")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fails", "goes_on"), [("checkpoint-8", "checkpoint-4\n"), ("checkpoint-4", "training starts anew")]
)
def test_a_folder_that_fails_once_costs_a_restart_and_no_loss(place, fails, goes_on):
    done, output = run(place, f"out-{fails}", fails, "--max_restarts", 2), place / f"out-{fails}"
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("restart: 1 of") == 1
    assert "restart: 2 of" not in done.stdout
    assert f"restart: 1 of 2 in 1 s, after: a checkpoint in {output}: write" in done.stdout
    assert goes_on in done.stdout
    assert "nor could the model be saved" not in done.stdout
    assert losses(output) == losses(place / "whole")
    weights = "model/model.safetensors"
    assert (output / weights).read_bytes() == (place / "whole" / weights).read_bytes()
    # where the time went, over both processes
    (summary,) = [entry for entry in log(output) if "train_runtime" in entry]
    first, second = read_lives((output / "lives.json").read_bytes())
    assert (first.after, second.first) == ("", 4 if fails == "checkpoint-8" else 0)
    assert "Input/output error" in second.after
    assert summary["restarts"] == 1
    assert summary["seconds/between"] == pytest.approx(second.began - first.ended, abs=0.01)
    assert summary["seconds/between"] > 1  # the wait, and a start of Python
    assert summary["seconds/again"] > 0
    assert 0 < summary["goodput"] < 1
    page = (output / "report.html").read_text()
    assert "2 processes, one after another (1 of them begun by the run itself)" in page
    assert "between a failure and the restart after it" in page


@pytest.mark.slow
def test_without_restarts_left_the_run_ends_with_what_was_learned_as_it_always_did(place):
    done = run(place, "none", "checkpoint-8")
    assert done.returncode == 2
    assert "restart: 1 of" not in done.stdout
    assert "Input/output error" in done.stderr
    assert (place / "none" / "model" / "model.safetensors").exists()
