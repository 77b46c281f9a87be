"""One run at a time in a folder: a living holder is named, a dead one is no hindrance, on disk and in a store."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable

import pytest
from rich.console import Console

from shardwright.errors import UserError
from shardwright.files import lock
from shardwright.files.folder import Folder, StorageError
from shardwright.files.lock import LOCK, PATIENCE, FolderLock
from tests.support.paths import ROOT

HOLDER = """
import sys
from shardwright.files.lock import FolderLock
from shardwright.files.folder import Folder
with FolderLock(Folder(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def store() -> Folder:
    return Folder(f"memory://{uuid.uuid4()}/run")


class Sleeps:
    """Stands in for time: counts the seconds that were slept, and calls ``then`` after each sleep."""

    def __init__(self, then: Callable[[], None] = lambda: None) -> None:
        self.seconds, self.then = 0.0, then

    def __call__(self, seconds: float) -> None:
        self.seconds += seconds
        self.then()


def left_behind(folder: Folder) -> FolderLock:
    """A lock whose holder was killed: nothing renews it any more."""
    dead = FolderLock(folder)
    dead._lease._write()
    return dead


# ---- kept by the kernel ----


def test_a_living_holder_on_disk_is_named_and_a_killed_one_is_no_hindrance(tmp_path):
    folder = Folder(tmp_path / "run")
    command = [sys.executable, "-c", HOLDER, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        named = rf"process {holder.pid} on {socket.gethostname()}, since \d{{4}}-"
        with pytest.raises(UserError, match=named):
            FolderLock(folder).check_free()
        with pytest.raises(UserError, match=named), FolderLock(folder, sleep=Sleeps()):
            pass
        os.kill(holder.pid, signal.SIGKILL)
        assert holder.wait() == -signal.SIGKILL
    assert folder.names() == [LOCK]
    FolderLock(folder).check_free()
    with FolderLock(folder):
        assert json.loads(folder.read(LOCK))["process"] == os.getpid()
    assert folder.names() == []


def test_six_runs_in_one_process_one_after_the_other_and_never_two_at_once(tmp_path):
    folder = Folder(tmp_path)
    for _ in range(6):
        # the second time inside, as train() does
        with FolderLock(folder) as held, held, pytest.raises(UserError), FolderLock(folder, sleep=Sleeps()):
            pass
        FolderLock(folder).check_free()


def test_a_run_that_fails_lets_go(tmp_path, store):
    for folder in (Folder(tmp_path), store):
        with pytest.raises(ZeroDivisionError), FolderLock(folder):
            1 / 0  # noqa: B018
        assert folder.names() == []


def test_a_run_whose_lock_file_was_removed_goes_on_until_another_comes(tmp_path):
    folder = Folder(tmp_path)
    with FolderLock(folder) as first:
        (tmp_path / LOCK).unlink()
        first.check_held()
        with FolderLock(folder) as second:
            with pytest.raises(StorageError, match="another run has taken it over: process"):
                first.check_held()
            second.check_held()


def test_looking_writes_nothing(tmp_path):
    FolderLock(Folder(tmp_path / "run")).check_free()
    assert not (tmp_path / "run").exists()


def test_a_folder_that_can_not_be_written_is_a_storage_error(tmp_path):
    (tmp_path / "file").write_text("")
    FolderLock(Folder(tmp_path / "file")).check_free()
    with pytest.raises(StorageError, match="file"), FolderLock(Folder(tmp_path / "file")):
        pass


def test_a_lock_that_is_a_pipe_or_a_link_is_neither_waited_for_nor_followed(tmp_path):
    for name in ("pipe", "link"):
        (tmp_path / name).mkdir()
    os.mkfifo(tmp_path / "pipe" / LOCK)
    (tmp_path / "precious").write_text("work")
    (tmp_path / "link" / LOCK).symlink_to(tmp_path / "precious")
    for name in ("pipe", "link"):
        with pytest.raises(StorageError), FolderLock(Folder(tmp_path / name), sleep=Sleeps()):
            pass
    FolderLock(Folder(tmp_path / "pipe")).check_free()
    assert (tmp_path / "precious").read_text() == "work"


# ---- renewed ----


@pytest.fixture(params=["store", "no flock"])
def folder(request, store, tmp_path, monkeypatch) -> Folder:
    """Where the kernel keeps no locks."""
    if request.param == "store":
        return store

    def refuse(handle: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    return Folder(tmp_path / "run")


def test_a_holder_that_renews_its_lock_is_named(folder):
    with FolderLock(folder) as held:
        waits = Sleeps(held._lease.renew)
        with pytest.raises(UserError, match=rf"process {os.getpid()} on"), FolderLock(folder, sleep=waits):
            pass
        assert waits.seconds < PATIENCE
    assert folder.names() == []


def test_a_holder_that_no_longer_renews_it_is_waited_out_with_a_word_and_loses_the_folder(folder):
    dead, waits, console = left_behind(folder), Sleeps(), Console(file=io.StringIO())
    taker = FolderLock(folder, console, waits)
    taker.check_free()
    assert waits.seconds == PATIENCE
    assert "whether that run still lives" in console.file.getvalue()  # type: ignore[attr-defined]
    with taker:
        assert waits.seconds == PATIENCE  # it need not be watched again
        with pytest.raises(StorageError, match="another run has taken it over"):
            dead._lease.check_held()
        with pytest.raises(StorageError):
            dead._lease.renew()
        dead._lease.release()
        taker.check_held()
    assert folder.names() == []


def test_a_holder_that_ends_meanwhile_is_not_waited_for(folder):
    left_behind(folder)
    waits = Sleeps(lambda: folder.remove_file(LOCK))
    with FolderLock(folder, sleep=waits):
        assert waits.seconds == lock.LOOK


def test_a_lock_that_the_kernel_kept_elsewhere_says_nothing_where_it_keeps_none(folder):
    folder.write(LOCK, b"")
    waits = Sleeps()
    with FolderLock(folder, sleep=waits) as held:
        assert waits.seconds == 0
        held.check_held()


def test_the_thread_renews_it(store, monkeypatch):
    monkeypatch.setattr(lock, "RENEWAL", 0.001)
    with FolderLock(store) as held:
        while held._lease.renewals < 3:
            pass
    assert store.names() == []


def test_a_lock_of_which_the_disk_can_t_tell_is_an_error_and_not_held(tmp_path, monkeypatch):
    real = os.stat

    def fail(path: str, **more: bool) -> os.stat_result:
        if str(path).endswith(LOCK):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(path, **more)

    with FolderLock(Folder(tmp_path)) as held:
        held.check_held()
        with monkeypatch.context() as patch:
            patch.setattr(os, "stat", fail)
            with pytest.raises(StorageError, match=r"look for .*\.lock"):
                held.check_held()
        held.check_held()
