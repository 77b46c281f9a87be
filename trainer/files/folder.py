"""Folders of files, on disk or in an object store, through which a run reads and writes all of its files.

A path with a scheme (``gs://``, ``s3://``, ``memory://``) goes through fsspec; one without is on this machine's disk.
A file appears whole or not at all: a store shows an object only after its upload, and on disk the file is written
under another name and then renamed.

What can't be told is an error, and never "not there": only the system's ENOENT and ENOTDIR mean that, and a store's
"not found" to which its listing agrees.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import glob
import json
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import fsspec

from shardwright.errors import BUG, LOST, TransientError, UserError, exit_code_of

TEMPORARY = ".tmp"  # suffix of a file that is being written
ABSENT = (FileNotFoundError, NotADirectoryError)


# the numbers of errors that a disk gives again; ENOSPC and EDQUOT: no room
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_LASTING = (*_NO_ROOM, errno.EFBIG, errno.EROFS, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL)
_LASTING_KINDS = (PermissionError, FileNotFoundError, FileExistsError)


class StorageError(TransientError):
    """A file could not be read or written, because of the disk or the store."""

    code = LOST


class StorageRefusal(StorageError):
    """A disk or a store refused, and would again: no permission, no such bucket, no room."""

    code = UserError.code


class Folder:
    """A folder of files on disk or in a store (``scheme://…``), made when something is written into it.

    Raises UserError if fsspec does not know the scheme, or its package is not installed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        text = os.fspath(path)
        self.remote = "://" in text and not text.startswith("file://")
        self._fs: Any = None
        if self.remote:
            scheme, _, rest = text.partition("://")
            self._path = text if not rest.strip("/") else text.rstrip("/")
            with errors("open", text):
                try:
                    self._fs = fsspec.filesystem(scheme)
                except (ImportError, ValueError) as error:
                    raise UserError(
                        asked=f"the folder {text}",
                        found=f"{error}",
                        why=f"files of {scheme}:// are read and written through fsspec's package for it",
                        instead="pip install gcsfs for gs://, s3fs for s3://; or a path on a mounted disk",
                    ) from None
        else:
            self._path = str(Path(os.path.expanduser(text.removeprefix("file://"))))

    def __str__(self) -> str:
        return self._path

    def __repr__(self) -> str:
        return f"Folder({self._path!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Folder) and other.absolute == self.absolute

    def __hash__(self) -> int:
        return hash(self.absolute)

    def __truediv__(self, name: str) -> Folder:
        return type(self)(self._join(name))

    @property
    def absolute(self) -> str:
        """The path from the root, links followed: the same for the same folder."""
        return self._path if self.remote else os.path.realpath(self._path)

    @property
    def name(self) -> str:
        return self._path.rstrip("/").rpartition("/")[2]

    @property
    def parent(self) -> Folder:
        return Folder(self._path.rpartition("/")[0] if self.remote else str(Path(self._path).parent))

    def names(self) -> list[str]:
        """The sorted names of its files and folders; none without the folder."""
        with errors("list", self._path):
            if not self.remote:
                with contextlib.suppress(*ABSENT):
                    return sorted(os.listdir(self._path))
                return []
            found = self._listing() or self._listing()  # a store that says "nothing" is asked again
            names = {str(path).rstrip("/").rpartition("/")[2] for path in found}
            return sorted(names - {self.name, ""})  # some stores list the folder's own marker

    def _listing(self) -> list[Any]:
        with contextlib.suppress(*ABSENT):
            return list(self._store.ls(self._path, detail=False))
        return []

    def exists(self, name: str) -> bool:
        """Whether there is such an entry; raises StorageError if that can't be told.

        fsspec's own `exists` is not asked: whatever goes wrong, most stores' says no.
        """
        path = self._join(name)
        with errors("look for", path), contextlib.suppress(*ABSENT):
            self._store.info(path) if self.remote else os.stat(path)
            return True
        folder, _, last = path.rpartition("/")
        return self.remote and last in Folder(folder).names()

    def is_file(self, name: str) -> bool:
        """Whether ``name``, perhaps in a subfolder, is a regular file: no link, folder, pipe or device."""
        with errors("look for", self._join(name)):
            if self.remote:
                found = self._fs.info(self._join(name)) if self.exists(name) else {}
                return found.get("type") == "file" and not found.get("islink")
            parents = [name[:i] for i, letter in enumerate(name) if letter == "/"]
            return all(stat.S_ISDIR(self._kind(parent)) for parent in parents) and stat.S_ISREG(self._kind(name))

    def _kind(self, name: str) -> int:
        """The type of the entry ``name`` on disk, links not followed; 0 without one."""
        try:
            return os.lstat(self._join(name)).st_mode
        except ABSENT:
            return 0

    def size(self, name: str) -> int:
        """The size of a file in bytes."""
        path = self._join(name)
        with errors("read", path):
            return int(self._store.info(path)["size"]) if self.remote else os.path.getsize(path)

    def read(self, name: str) -> bytes:
        with errors("read", self._join(name)), self._open(name, "rb") as file:
            return file.read()

    @contextlib.contextmanager
    def open(self, name: str, mode: str) -> Iterator[IO[bytes]]:
        """Opens a file for reading (``rb``) or writing (``wb``); after the ``with`` its bytes are stored.

        If writing fails, the file is removed, unless the disk refuses that too.
        """
        with errors("write" if "w" in mode else "read", self._join(name)):
            if "w" not in mode:
                with self._open(name, mode) as file:
                    yield file
                return
            (self._fs.makedirs if self.remote else os.makedirs)(self._path, exist_ok=True)
            file = self._open(name, mode)
            try:
                yield file
                if not self.remote:
                    file.flush()
                    os.fsync(file.fileno())
                file.close()
            except BaseException:
                # closing one of fsspec's files uploads its content, unless that is discarded first
                remove = functools.partial(self.remove_file, name)
                for undo in (getattr(file, "discard", file.close), file.close, remove):
                    with contextlib.suppress(Exception):
                        undo()
                raise

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[IO[bytes]]:
        """Opens a file for writing that replaces ``name``, whole, when the ``with`` ends, or not at all.

        If writing fails, on a disk the old file stays; a store may have lost it, unless :meth:`write` wrote.
        """
        temporary = name if self.remote else f".{name}{TEMPORARY}"
        with self.open(temporary, "wb") as file:
            yield file
        if self.remote:
            return
        with errors("write", self._join(name)):
            os.replace(self._join(temporary), self._join(name))
            handle = os.open(self._path, os.O_RDONLY)
            try:
                os.fsync(handle)  # until then a power cut may undo the rename
            finally:
                os.close(handle)

    def write(self, name: str, data: bytes) -> None:
        """Writes a file whole or not at all; if that fails, the old one stays."""
        if not self.remote:
            with self.writing(name) as file:
                file.write(data)
            return
        with errors("write", self._join(name)):
            self._fs.makedirs(self._path, exist_ok=True)
            self._store.pipe_file(self._join(name), data)  # one request: a stream that breaks off is removed

    def write_each(self, files: Mapping[str, bytes]) -> None:
        """Writes files, by their paths, one by one: each whole or not at all."""
        for path, data in files.items():
            place, _, name = path.rpartition("/")
            (self / place if place else self).write(name, data)

    @contextlib.contextmanager
    def filling(self) -> Iterator[Folder]:
        """A folder for files that come into this one, new or empty, when the ``with`` ends; after an error none does.

        On a disk it lies within this one, which may be a mount; what a kill leaves of it is removed the next time. A
        store has no renaming: there it is this one, which an error empties.
        """
        aside = self if self.remote else self / TEMPORARY
        if not self.remote:
            aside.remove()
        moved: list[str] = []
        try:
            yield aside
            with errors("write", self._path):
                # weights last: with them the folder passes for whole
                for name in [] if self.remote else sorted(aside.names(), key=lambda n: (".safetensors" in n, n)):
                    moved.append(name)
                    os.rename(aside._join(name), self._join(name))
        except BaseException:
            for name in moved:
                with contextlib.suppress(OSError):  # it did not come so far
                    os.rename(self._join(name), aside._join(name))
            with contextlib.suppress(StorageError):  # the user must hear of the other error
                aside.remove()
            raise
        if not self.remote:
            with contextlib.suppress(StorageError):  # empty by now
                aside.remove()

    def move(self, to: Folder) -> None:
        """Gives the folder the path of ``to``, which must not be there; in a store by copies, so not at once."""
        with errors("move", self._path):
            if not self.remote:
                os.rename(self._path, str(to))
                return
            files, own = self._store.find(self._path), len(self._fs._strip_protocol(self._path))
            self._fs.copy(files, [str(to) + file[own:] for file in files], on_error="raise")
            self.remove()

    def remove_file(self, name: str) -> None:
        """Removes a file if it exists."""
        with errors("remove", self._join(name)), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._join(name)) if self.remote else os.remove(self._join(name))

    def remove(self) -> None:
        """Removes the folder and its content, if it exists; of a link only the link."""
        with errors("remove", self._path), contextlib.suppress(FileNotFoundError):
            if self.remote:
                # rm takes a name with [, * or ? for a pattern, and would remove other folders
                self._fs.rm(glob.escape(self._path), recursive=True)
            else:
                os.remove(self._path) if self.is_link else shutil.rmtree(self._path)

    @property
    def is_link(self) -> bool:
        return not self.remote and os.path.islink(self._path)

    def _join(self, name: str) -> str:
        return os.path.join(self._path, name)

    def _open(self, name: str, mode: str) -> IO[bytes]:
        if self.remote:
            return self._store.open(self._join(name), mode)
        return open(self._join(name), mode, opener=None if "w" in mode else _open_file)

    @property
    def _store(self) -> Any:
        """The store's client, without the listings and sizes that it has seen: other processes write there too."""
        self._fs.invalidate_cache(self._path)
        return self._fs


class UnwrittenFolder(Folder):
    """A folder that another process fills: this one's writes and removals are dropped."""

    @contextlib.contextmanager
    def open(self, name: str, mode: str) -> Iterator[IO[bytes]]:
        with super().open(name, mode) if mode == "rb" else open(os.devnull, mode) as file:  # type: ignore[attr-defined]
            yield file

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[IO[bytes]]:
        with self.open(name, "wb") as file:
            yield file

    def write(self, name: str, data: bytes) -> None:
        pass

    def move(self, to: Folder) -> None:
        pass

    def remove_file(self, name: str) -> None:
        pass

    def remove(self) -> None:
        pass


def _open_file(path: str, flags: int) -> int:
    """Opens a file for reading; refuses a pipe rather than wait for a writer."""
    handle = os.open(path, flags | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return handle
    os.close(handle)
    raise OSError(errno.EINVAL, "no regular file", path)


@contextlib.contextmanager
def errors(action: str, path: str) -> Iterator[None]:
    """Turns errors of the disk or the store's client inside the ``with`` into a StorageError that names ``path``."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # each store's client raises its own types: no credentials, no network
        full = isinstance(error, OSError) and error.errno in _NO_ROOM
        reach = "a path that can be reached from this machine"
        raise (StorageRefusal if _lasts(error) else StorageError)(
            asked=f"{action} {path}",
            found=f"{type(error).__name__}: {error}",
            why="the disk or the store did not do it",
            instead="more room there, or another folder" if full else reach,
        ) from error


def _lasts(error: Exception) -> bool:
    """Whether a disk or a store would give the same error to the same command."""
    if isinstance(error, _LASTING_KINDS) or exit_code_of(error) == BUG or "Credentials" in type(error).__name__:
        return True
    # gcsfs/retry.py raises a bare OSError for 403
    return isinstance(error, OSError) and (error.errno in _LASTING or str(error).startswith("Forbidden"))


@contextlib.contextmanager
def suppress_damage(*kinds: type[Exception]) -> Iterator[None]:
    """Suppresses a UserError about what is damaged, and ``kinds``; not a StorageError, after which nothing is known."""
    try:
        yield
    except Exception as error:
        if isinstance(error, StorageError) or not isinstance(error, (UserError, *kinds)):
            raise


def as_json(value: Any) -> bytes:
    """``value`` as JSON; objects that JSON does not know become their ``str``."""
    return (json.dumps(value, indent=2, default=str) + "\n").encode()
