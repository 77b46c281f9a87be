"""The cache of results that are slow to make: tokenizers, packed rows, compiled steps."""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from shardwright.errors import UserError
from shardwright.report.lines import Terminal, say

T = TypeVar("T")
SUMS = "checksums.json"  # file → its size and checksum, in each published folder


class CacheRefusal(UserError):
    """The cache can't be written, whatever was to be kept there."""


def cached(folder: Path, scratch: Path, *, build: Callable[[Path], None], load: Callable[[Path], T]) -> T:
    """Returns ``load(folder)``. Without a whole one, ``build`` makes it anew in ``scratch`` and it is published.

    Raises UserError if it can't be written.
    """
    if is_whole(folder):
        return load(folder)
    made = scratch / folder.name
    with written_to_cache(folder):
        made.mkdir()
        build(made)
        publish(made, folder)
    return load(folder)


@contextlib.contextmanager
def written_to_cache(path: Path) -> Iterator[None]:
    """Turns an error of the disk inside the ``with``, which writes ``path`` into the cache, into a CacheRefusal."""
    try:
        yield
    except OSError as error:
        raise CacheRefusal(
            asked=f"the cache folder {path}",
            found=str(error),
            why="tokenizers, packed rows and compiled steps are kept there",
            instead="SHARDWRIGHT_CACHE=/a/folder/that/can/be/written",
        ) from error


def is_whole(folder: Path) -> bool:
    """Whether the published ``folder`` is there with each file as it was written; a damaged one is named and removed.

    Reads all of it, at the speed of the disk.
    """
    if not folder.exists():  # else a folder that another process publishes meanwhile could be removed
        return False
    try:
        written = json.loads((folder / SUMS).read_text())
        wrong = [name for name, checksum in written.items() if _checksum(folder / name) != checksum]
        found = f"{wrong[0]} has changed since it was written" if wrong else ""
    except (OSError, ValueError, AttributeError) as error:
        found = f"{type(error).__name__}: {error}"
    if found:
        say(Terminal(stderr=True), f"cache:   {folder} is damaged ({found}): it is made anew")
        shutil.rmtree(folder, ignore_errors=True)
    return not found


def publish(made: Path, folder: Path) -> None:
    """Renames the finished folder ``made`` to ``folder``, in one piece, with checksums and once it lies on the disk.

    Another process's folder, of equal content, stays.
    """
    files = [path for path in sorted(made.rglob("*")) if path.is_file() and path != made / SUMS]  # of an earlier try
    (made / SUMS).write_text(json.dumps({str(path.relative_to(made)): _checksum(path) for path in files}))
    for path in (*made.rglob("*"), made):
        _sync(path)
    folder.parent.mkdir(exist_ok=True)
    try:
        made.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
    _sync(folder.parent)  # until then a power cut may undo the rename


def _checksum(path: Path) -> list[int | str]:
    with path.open("rb") as file:
        return [hashlib.file_digest(file, xxhash.xxh3_64).hexdigest(), file.tell()]


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def cache_path(cache_dir: Path | None = None) -> Path:
    """``cache_dir``, else ``$SHARDWRIGHT_CACHE``, else ``shardwright`` in the user's cache folder; not made."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(cache_dir or os.environ.get("SHARDWRIGHT_CACHE") or Path(home, "shardwright")))


def cache_root(cache_dir: Path | None = None) -> Path:
    """:func:`cache_path`, made if need be. Raises UserError if it is not writable."""
    root = cache_path(cache_dir)
    with written_to_cache(root):
        root.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=root).close()
    return root


def digest(content: Sequence[Any]) -> str:
    """A hash of JSON-able ``content``, equal in every process: 32 hexadecimal digits."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]
