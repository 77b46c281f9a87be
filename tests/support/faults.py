"""Operations of a disk and of a store, counted, of which one fails."""

from __future__ import annotations

import builtins
import errno
import functools
import os
import shutil
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractFileSystem

from shardwright.files import folder as folder_module

Operation = tuple[str, str, int]  # its name, the path from its root on, and which of several on that path it is

ERRORS = {"EIO": errno.EIO, "ESTALE": errno.ESTALE, "ENOSPC": errno.ENOSPC, "EACCES": errno.EACCES}
DONE = "EIO once it was done"
ABSENT, LATE = "404", "a late listing"
# the system's functions; of a file that is open, the first reading, writing or fsync
ASKS = {"stat", "lstat", "listdir", "info", "ls", "find", "open rb", "read", "readinto"}
CHANGES = {"rename", "replace", "remove", "rmtree", "pipe_file", "rm_file", "rm", "cp_file"}
OF_A_DISK = ("stat", "lstat", "listdir", "makedirs", "open", "fsync", "replace", "rename", "remove")
OF_A_STORE = ("info", "ls", "find", "open", "pipe_file", "makedirs", "rm_file", "rm", "cp_file")


def faults_of(operation: Operation, *errors: str) -> list[str]:
    """The faults that the operation may have, on a disk or in a store: these ``errors``, and all others."""
    (name, path, _), found = operation, [*errors]
    if name in CHANGES:
        found.append(DONE)
    if name in ASKS and not path.startswith("/"):
        found.append(ABSENT)
    if name in ("ls", "find"):
        found.append(LATE)
    return found


class Faults:
    """Counts the operations below ``roots``, folders on disk or in memory, inside :meth:`watching`; one may fail.

    Those that another one is made of count if a store may fail between them.
    """

    def __init__(self, roots: Sequence[str], patch: pytest.MonkeyPatch) -> None:
        self.roots, self.seen = roots, Counter[tuple[str, str]]()
        self._at: Operation | None = None
        self._fault, self._watches, self.failed = "", False, False
        self._lock, self._inside = threading.Lock(), threading.local()
        patch.setattr(os, "fsync", lambda handle: None)  # no power fails here, and it takes its time
        for name in OF_A_DISK:
            patch.setattr(os, name, self._counted(name, getattr(os, name)))
        patch.setattr(shutil, "rmtree", self._counted("rmtree", shutil.rmtree))
        patch.setattr(folder_module, "open", self._counted("open", builtins.open), raising=False)
        for name in OF_A_STORE:
            patch.setattr(MemoryFileSystem, name, self._counted(name, getattr(MemoryFileSystem, name), store=True))
        patch.setattr(MemoryFileSystem, "exists", AbstractFileSystem.exists)  # as most stores have it

    @contextmanager
    def watching(self, at: Operation | None = None, fault: str = "") -> Iterator[None]:
        self.seen.clear()
        self._at, self._fault, self._watches, self.failed = at, fault, True, False
        try:
            yield
        finally:
            self._watches = False

    def operations(self) -> list[Operation]:
        """The operations seen, in a fixed order."""
        return [(*key, nth) for key, count in sorted(self.seen.items()) for nth in range(count)]

    def meet(self, name: str, path: str) -> str:
        """Counts an operation; the fault that it has, if any."""
        root = next((root for root in self.roots if root in path), None)
        if not self._watches or root is None:
            return ""
        with self._lock:
            key = (name, path[path.index(root) :])
            nth, self.seen[key] = self.seen[key], self.seen[key] + 1
            self.failed |= (met := (*key, nth) == self._at)
        if not met:
            return ""
        if self._fault in ERRORS:
            raise OSError(ERRORS[self._fault], os.strerror(ERRORS[self._fault]), path)
        if self._fault == ABSENT:
            raise FileNotFoundError(path)
        return self._fault

    def _counted(self, name: str, real: Any, store: bool = False) -> Any:
        @functools.wraps(real)
        def counted(*given: Any, **more: Any) -> Any:
            where = given[1] if store else given[0]
            if (getattr(self._inside, "depth", 0) and not store) or not isinstance(where, str | int):
                return real(*given, **more)
            path = f"/proc/self/fd/{where}" if isinstance(where, int) else where
            path = os.readlink(path) if isinstance(where, int) else path
            mode = next((value for value in given[1:] if value in ("rb", "wb")), more.get("mode", ""))
            fault = self.meet(f"{name} {mode}".strip(), path)
            self._inside.depth = 1
            try:
                if fault == DONE and name == "rmtree":  # half done
                    for each in sorted(os.listdir(where))[::2]:
                        os.remove(os.path.join(where, each))
                else:
                    result = real(*given, **more)
            finally:
                self._inside.depth = 0
            if fault == DONE:
                raise OSError(errno.EIO, os.strerror(errno.EIO), path)
            if fault == LATE:
                return sorted(result, key=lambda each: _created(given[0], each))[:-1]
            return _File(result, path, self) if name == "open" and mode else result

        return counted


def _created(store: Any, path: str) -> Any:
    return max((str(file.created) for name, file in store.store.items() if name.startswith(path)), default="")


class _File:
    """An open file whose first reading or writing may fail."""

    def __init__(self, real: Any, path: str, faults: Faults) -> None:
        self._real, self._path, self._faults, self._met = real, path, faults, set[str]()

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *error: object) -> None:
        self._real.close()

    def __getattr__(self, name: str) -> Any:
        if name in ("read", "readinto", "write") and name not in self._met:
            self._met.add(name)
            self._faults.meet(name, self._path)
        return getattr(self._real, name)
