"""The cache of results that are slow to make: tokenizers, packed rows, compiled steps."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from shardwright.errors import UserError

T = TypeVar("T")


def cached(folder: Path, scratch: Path, *, build: Callable[[Path], None], load: Callable[[Path], T]) -> T:
    """Returns ``load(folder)``. If that fails, ``build`` makes the folder anew in ``scratch`` and it is published.

    Raises UserError if it can't be written.
    """
    if folder.exists():  # else a folder that another process publishes meanwhile could be removed
        try:
            return load(folder)
        except Exception:  # corrupt: each file format raises errors of its own types
            shutil.rmtree(folder, ignore_errors=True)
    made = scratch / folder.name
    try:
        made.mkdir()
        build(made)
        publish(made, folder)
    except OSError as error:
        raise _unwritable(folder, error) from error
    return load(folder)


def publish(made: Path, folder: Path) -> None:
    """Renames the finished folder ``made`` to ``folder``, in one piece; another process's, of equal content, stays."""
    folder.parent.mkdir(exist_ok=True)
    try:
        made.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


def cache_root(cache_dir: Path | None = None) -> Path:
    """``cache_dir``, else ``$SHARDWRIGHT_CACHE``, else ``shardwright`` in the user's cache folder; made if need be.

    Raises UserError if it is not writable.
    """
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    root = Path(os.path.expanduser(cache_dir or os.environ.get("SHARDWRIGHT_CACHE") or Path(home, "shardwright")))
    try:
        root.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=root).close()
    except OSError as error:
        raise _unwritable(root, error) from error
    return root


def _unwritable(folder: Path, error: OSError) -> UserError:
    return UserError(
        asked=f"the cache folder {folder}",
        found=str(error),
        why="tokenizers, packed rows and compiled steps are kept there",
        instead="SHARDWRIGHT_CACHE=/a/folder/that/can/be/written",
    )


def digest(content: Sequence[Any]) -> str:
    """A hash of JSON-able ``content``, equal in every process: 32 hexadecimal digits."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]
