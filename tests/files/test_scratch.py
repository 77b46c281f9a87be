"""Folders for a while: none is left behind for good, however its process ended."""

from __future__ import annotations

import contextlib
import os
import re
import signal

import pytest
from rich.console import Console

from shardwright import run
from shardwright.arguments.training import TrainingArguments
from shardwright.errors import TERMINATED, Terminated
from shardwright.files.scratch import scratch_folder
from shardwright.hosts.output_streams import exit_code
from shardwright.xla.stop_requests import unwinding
from tests.support.fork_server import run as run_program
from tests.support.paths import ROOT


def test_what_a_dead_process_left_is_removed_by_the_next_and_what_a_living_one_has_is_not(tmp_path):
    left = tmp_path / "scratch-dead"
    (left / "documents").mkdir(parents=True)
    (left / "documents" / "train.arrow").write_bytes(bytes(1000))
    (left / ".alive").write_text("")  # the kernel frees its lock with the process
    (tmp_path / "scratch-mine").mkdir()  # another program's
    with scratch_folder(tmp_path, "scratch-") as living:
        assert not left.exists()
        (living / "file").write_text("")
        with scratch_folder(tmp_path, "scratch-") as other:
            assert (living / "file").exists()
            assert other != living
    assert [path.name for path in tmp_path.iterdir()] == ["scratch-mine"]


KILLED = """
import os, signal, sys
from pathlib import Path
from shardwright.files.scratch import scratch_folder
with scratch_folder(Path(sys.argv[1]), "scratch-"):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_one_that_was_killed_leaves_it_to_the_next(tmp_path):
    assert run_program("-c", KILLED, tmp_path).returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 1
    with scratch_folder(tmp_path, "scratch-") as mine:
        assert list(tmp_path.iterdir()) == [mine]


def test_no_other_folder_for_a_while_is_made_where_it_would_stay():
    """The system's folder for temporary files is the system's to empty; ours have a sweeper."""
    made = re.compile(r"TemporaryDirectory\([^)]*dir=|mkdtemp\([^)]*dir=")
    found = [path for path in (ROOT / "trainer").rglob("*.py") if made.search(path.read_text())]
    assert found == [ROOT / "trainer/files/scratch.py"]


# ---- SIGTERM before there is anything to save ----


def test_sigterm_while_the_data_are_read_leaves_nothing_and_ends_with_143(tmp_path, monkeypatch, capsys):
    cache = tmp_path / "cache"
    cache.mkdir()

    def reads(*asked: object) -> None:
        with scratch_folder(cache, "scratch-") as scratch:
            (scratch / "train.arrow").write_bytes(bytes(1000))
            os.kill(os.getpid(), signal.SIGTERM)
            pytest.fail("the run went on")

    monkeypatch.setattr(run, "load_corpus", reads)
    args = TrainingArguments(recipe="llama_fsdp", output_dir=str(tmp_path / "out"), report_to="none")

    def main() -> None:
        run.train(args, Console(quiet=True))

    assert exit_code(main) == TERMINATED == 128 + signal.SIGTERM
    assert list(cache.iterdir()) == []
    assert list(tmp_path.iterdir()) == [cache] or not list((tmp_path / "out").iterdir()), "not even a lock"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert "terminated" in capsys.readouterr().err


def test_a_sigterm_that_a_library_catches_is_not_lost():
    def caught() -> None:
        with unwinding(), contextlib.suppress(BaseException):
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Terminated):
        caught()


def test_who_listens_to_sigterm_already_goes_on():
    def listener(number: int, frame: object) -> None: ...

    signal.signal(signal.SIGTERM, listener)
    try:
        with unwinding():
            assert signal.getsignal(signal.SIGTERM) is listener
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
