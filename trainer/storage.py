"""Folders of files, on disk or in an object store: what a run writes and reads goes through here.

A path with a scheme (``gs://``, ``s3://``, ``memory://``) goes through fsspec, one without is on this machine's disk.
An object appears in a store when its upload ends, so a file written there is whole or absent; on disk a rename does it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import fsspec

from trainer.errors import UserError

TEMPORARY = ".tmp"  # the end of the name of a file that is being written


class StorageError(UserError):
    """A file could not be read or written, for a reason of the disk's or the store's."""


class Folder:
    """A folder of files, which need not exist; made when something is written into it.

    Args:
        path: a path on disk, or ``scheme://…`` of a store that fsspec knows.

    Raises:
        UserError: a scheme that fsspec does not know, or whose package is not installed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        text = os.fspath(path)
        self.remote = "://" in text and not text.startswith("file://")
        self._fs: Any = None
        if self.remote:
            scheme, _, rest = text.partition("://")
            self._path = text if not rest.strip("/") else text.rstrip("/")
            try:
                self._fs = fsspec.filesystem(scheme)
            except (ImportError, ValueError) as error:
                raise UserError(
                    asked=f"the folder {text}",
                    found=f"{error}",
                    why=f"files of {scheme}:// are read and written through fsspec's package for it",
                    instead="pip install gcsfs for gs://, s3fs for s3://; or a path on a mounted disk",
                ) from None
            except Exception as error:  # a client's own: no credentials, no network
                raise _storage_error("open", text, error) from error
        else:
            self._path = str(Path(text.removeprefix("file://")).expanduser())

    def __str__(self) -> str:
        return self._path

    def __repr__(self) -> str:
        return f"Folder({self._path!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Folder) and str(other) == str(self)

    def __hash__(self) -> int:
        return hash(self._path)

    def __truediv__(self, name: str) -> Folder:
        return Folder(self._join(name))

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self._path.rstrip("/").rpartition("/")[2]

    @property
    def parent(self) -> Folder:
        return Folder(self._path.rpartition("/")[0] if self.remote else str(Path(self._path).parent))

    def names(self) -> list[str]:
        """What lies in the folder, files and folders, sorted; empty if there is no folder."""
        with errors("list", self._path):
            if not self.remote:
                return sorted(os.listdir(self._path)) if os.path.isdir(self._path) else []
            self._fs.invalidate_cache()  # others write there too
            try:
                found = self._fs.ls(self._path, detail=False)
            except FileNotFoundError:
                return []
            names = {str(path).rstrip("/").rpartition("/")[2] for path in found}
            return sorted(names - {self.name, ""})  # some stores list the folder's own marker

    def exists(self, name: str) -> bool:
        with errors("look for", self._join(name)):
            return self._fs.exists(self._join(name)) if self.remote else os.path.exists(self._join(name))

    def size(self, name: str) -> int:
        """Bytes of a file."""
        with errors("read", self._join(name)):
            if self.remote:
                return int(self._fs.info(self._join(name))["size"])
            return os.path.getsize(self._join(name))

    def read(self, name: str) -> bytes:
        """The whole of a file."""
        with errors("read", self._join(name)), self._open(name, "rb") as file:
            return file.read()

    @contextlib.contextmanager
    def open(self, name: str, mode: str) -> Iterator[IO[bytes]]:
        """A file, ``rb`` or ``wb``; what is written is on the disk, or in the store, when the ``with`` ends.

        One that fails while it is written is removed where that can be done, but may stay behind, cut short, on a disk.
        """
        with errors("write" if "w" in mode else "read", self._join(name)):
            if "w" not in mode:
                with self._open(name, mode) as file:
                    yield file
                return
            self._make()
            file = self._open(name, mode)
            try:
                yield file
                if not self.remote:
                    file.flush()
                    os.fsync(file.fileno())
                file.close()
            except BaseException:
                self._discard(file, name)
                raise

    def write(self, name: str, data: bytes) -> None:
        """Write a file whole or not at all, in place of what was there."""
        if self.remote:
            with self.open(name, "wb") as file:
                file.write(data)
            return
        temporary = f".{name}{TEMPORARY}"
        with self.open(temporary, "wb") as file:
            file.write(data)
        with errors("write", self._join(name)):
            os.replace(self._join(temporary), self._join(name))
            self._sync()

    def remove_file(self, name: str) -> None:
        """Remove a file; one that is not there is no error."""
        with errors("remove", self._join(name)), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._join(name)) if self.remote else os.remove(self._join(name))

    def remove(self) -> None:
        """Remove the folder with all that lies in it; one that is not there is no error."""
        with errors("remove", self._path), contextlib.suppress(FileNotFoundError):
            self._fs.rm(self._path, recursive=True) if self.remote else shutil.rmtree(self._path)

    def _join(self, name: str) -> str:
        return posixpath.join(self._path, name) if self.remote else os.path.join(self._path, name)

    def _open(self, name: str, mode: str) -> IO[bytes]:
        return self._fs.open(self._join(name), mode) if self.remote else open(self._join(name), mode)

    def _make(self) -> None:
        if self.remote:
            self._fs.makedirs(self._path, exist_ok=True)
        else:
            os.makedirs(self._path, exist_ok=True)

    def _sync(self) -> None:
        """A rename outlives a power cut once its folder is on the disk."""
        handle = os.open(self._path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def _discard(self, file: IO[bytes], name: str) -> None:
        # fsspec's files upload what they hold when they are closed, unless told to throw it away
        with contextlib.suppress(Exception):
            if hasattr(file, "discard"):
                file.discard()
        with contextlib.suppress(Exception):
            file.close()
        with contextlib.suppress(Exception):
            self.remove_file(name)


@contextlib.contextmanager
def errors(action: str, path: str) -> Iterator[None]:
    """Turn what the disk or the store's client raises inside into a StorageError that names ``path``."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # each store's client has kinds of its own
        if isinstance(error, FileNotFoundError) and action == "remove":
            raise
        raise _storage_error(action, path, error) from error


def _storage_error(action: str, path: str, error: Exception) -> StorageError:
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return StorageError(
        asked=f"{action} {path}",
        found=f"{type(error).__name__}: {error}",
        why="the disk or the store did not do it",
        instead="more room there, or another --output_dir" if full else "a path that can be reached from this machine",
    )
