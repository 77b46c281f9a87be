"""The lock of a run's output folder: one run at a time writes there.

On a disk the kernel keeps it (flock), and frees it however its holder dies. Stores and some network mounts have no such
lock. There it is a file with the holder's token, rewritten every few seconds; one that has stopped changing is a dead
run's, and is taken over. Whoever wants it watches it, so no two machines' clocks are compared.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from rich.console import Console

from shardwright.errors import UserError
from shardwright.files.folder import Folder, StorageError, StorageRefusal, UnwrittenFolder, as_json, errors
from shardwright.report.lines import say

LOCK = ".lock"
RENEWAL = 15.0  # seconds from one renewal to the next
PATIENCE = 90.0  # seconds without a renewal after which the holder is taken for dead
LOOK = 5.0  # seconds between two looks at another's lock
TRIES = 20  # for the kernel's lock, a twentieth of a second apart: another's look at it holds it for a moment
CAREFULLY = os.O_NOFOLLOW | os.O_NONBLOCK  # neither write a link's target nor wait for a pipe
NOT_OFFERED = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}  # flock's errors on mounts without it


class TakenOver(StorageRefusal):
    """Another run has the folder by now."""


class FolderLock(contextlib.AbstractContextManager["FolderLock"]):
    """One run's hold on a folder, a reentrant context manager; ``console`` is for a message while it waits.

    The folder is made when the lock is taken. An :class:`UnwrittenFolder` is never locked: another process does. On
    entering it raises UserError if a living run holds the folder, and StorageError if it can't be written.
    """

    def __init__(
        self, folder: Folder, console: Console | None = None, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.folder = folder
        self._lease = _Lease(folder, console or Console(quiet=True), sleep)
        self._lock: _Kernel | _Lease = self._lease if folder.remote else _Kernel(folder, sleep)
        self._depth = 0

    def check_free(self) -> None:
        """Raises UserError if a living run holds the folder; writes nothing, and waits where that must be watched."""
        self._do(lambda lock: lock.check_free())

    def check_held(self) -> None:
        """Raises TakenOver if another run has the folder: this process had stood still, or its lock was removed."""
        if self._depth:
            self._do(lambda lock: lock.check_held())

    def __enter__(self) -> FolderLock:
        if not self._depth:
            self._do(lambda lock: lock.take())
        self._depth += 1
        return self

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._do(lambda lock: lock.release())

    def _do(self, act: Callable[[_Kernel | _Lease], None]) -> None:
        if isinstance(self.folder, UnwrittenFolder):
            return
        try:
            act(self._lock)
        except StorageError as error:
            if not (isinstance(error.__cause__, OSError) and error.__cause__.errno in NOT_OFFERED):
                raise
            self._lock = self._lease  # the mount has no kernel's lock
            act(self._lock)


class _Kernel:
    """A file that the kernel keeps locked as long as this process has it open."""

    def __init__(self, folder: Folder, sleep: Callable[[float], None]) -> None:
        self.folder, self.path, self.sleep = folder, os.path.join(str(folder), LOCK), sleep
        self.handle = -1

    def check_free(self) -> None:
        with errors("read", self.path):
            try:
                handle = os.open(self.path, os.O_RDONLY | CAREFULLY)
            except (FileNotFoundError, NotADirectoryError):
                return
            try:
                if not _flock(handle, fcntl.LOCK_SH):
                    raise _held(self.folder)
            finally:
                os.close(handle)

    def take(self) -> None:
        with errors("write", self.path):
            os.makedirs(str(self.folder), exist_ok=True)
            for _ in range(TRIES):
                handle = os.open(self.path, os.O_RDWR | os.O_CREAT | CAREFULLY, 0o644)
                try:
                    # a holder that ends removes its file, and the lock on a removed file is worth nothing
                    if _flock(handle, fcntl.LOCK_EX) and self._is_there(handle):
                        os.ftruncate(handle, 0)
                        os.write(handle, as_json(_holder_now()))
                        self.handle, handle = handle, -1
                        return
                finally:
                    if handle >= 0:
                        os.close(handle)
                self.sleep(0.05)
        raise _held(self.folder)

    def check_held(self) -> None:
        with errors("look for", self.path):
            try:
                there = os.stat(self.path)
            except (FileNotFoundError, NotADirectoryError):
                return
        if not os.path.samestat(os.fstat(self.handle), there):  # the file was removed, and a run came
            raise _lost(self.folder)

    def release(self) -> None:
        handle, self.handle = self.handle, -1
        with contextlib.suppress(OSError):
            if self._is_there(handle):
                os.remove(self.path)
        os.close(handle)

    def _is_there(self, handle: int) -> bool:
        try:
            return os.path.samestat(os.fstat(handle), os.stat(self.path))
        except FileNotFoundError:
            return False


class _Lease:
    """A file that a thread rewrites as long as this process holds the folder."""

    def __init__(self, folder: Folder, console: Console, sleep: Callable[[float], None]) -> None:
        self.folder, self.console, self.sleep = folder, console, sleep
        self.token = uuid.uuid4().hex
        self.renewals = 0
        self.dead: bytes | None = None  # another's lock that has not changed while it was watched
        self.ended = threading.Event()
        self.thread: threading.Thread | None = None

    def check_free(self) -> None:
        found = self._read()
        if found is None or found == self.dead or "token" not in _parsed(found):
            return
        say(self.console, f"{self.folder} was in use: looking for {PATIENCE:.0f} s whether that run still lives …")
        for _ in range(int(PATIENCE / LOOK)):
            self.sleep(LOOK)
            now = self._read()
            if now is None:
                return
            if now != found:
                raise _held(self.folder)
        self.dead = found

    def take(self) -> None:
        self.check_free()
        self._write()
        self.ended.clear()
        self.thread = threading.Thread(target=self._renew_until_the_end, name="lock", daemon=True)
        self.thread.start()

    def renew(self) -> None:
        self.check_held()
        self._write()

    def check_held(self) -> None:
        found = self._read()
        if found is not None and _parsed(found).get("token", self.token) != self.token:
            raise _lost(self.folder)

    def release(self) -> None:
        self.ended.set()
        if self.thread is not None:
            self.thread.join(RENEWAL)
        with contextlib.suppress(UserError):  # a lock that stays behind costs the next run a wait
            self.check_held()
            self.folder.remove_file(LOCK)

    def _renew_until_the_end(self) -> None:
        while not self.ended.wait(RENEWAL):
            with contextlib.suppress(UserError):  # a store that is away for a moment; the next write will tell
                self.renew()

    def _read(self) -> bytes | None:
        try:
            return self.folder.read(LOCK) if self.folder.exists(LOCK) else None
        except StorageError:
            if self.folder.exists(LOCK):
                raise
            return None  # removed in between

    def _write(self) -> None:
        self.renewals += 1
        self.folder.write(LOCK, as_json({**_holder_now(), "token": self.token, "renewals": self.renewals}))


def _flock(handle: int, kind: int) -> bool:
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder_now() -> dict[str, Any]:
    since = datetime.now(UTC).isoformat(sep=" ", timespec="seconds")
    return {"host": socket.gethostname(), "process": os.getpid(), "since": since}


def _parsed(data: bytes) -> dict[str, Any]:
    """The content of a lock; empty where it is cut short, or no lock at all."""
    with contextlib.suppress(ValueError):
        if isinstance(found := json.loads(data), dict):
            return found
    return {}


def _holder(folder: Folder) -> str:
    try:
        holder = {"process": "?", "host": "?", "since": "?"} | _parsed(folder.read(LOCK))
    except StorageError:  # it ended a moment ago
        return "one that has just ended"
    return "process {process} on {host}, since {since}".format_map(holder)


def _held(folder: Folder) -> UserError:
    return UserError(
        asked=f"--output_dir {folder}",
        found=f"a run that writes there: {_holder(folder)}",
        why="two runs in one folder would remove and replace each other's checkpoints",
        instead="another --output_dir, or the same command once that run has ended",
    )


def _lost(folder: Folder) -> TakenOver:
    return TakenOver(
        asked=f"to write into {folder}",
        found=f"another run has taken it over: {_holder(folder)}",
        why=f"this run's lock had gone, or had not been renewed for {PATIENCE:.0f} s, as if it were dead",
        instead="the same command, once the other run has ended",
    )
