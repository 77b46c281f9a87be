"""Folders for a while, which no process leaves behind for good: what a killed one left, the next one removes.

The kernel keeps a lock on a folder's file as long as its process lives, whichever host of a shared disk that is on.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_LOCK = ".alive"


@contextlib.contextmanager
def scratch_folder(root: Path, prefix: str) -> Iterator[Path]:
    """A new folder in ``root`` inside the ``with``; those of dead processes, of the same ``prefix``, are removed."""
    for lock in root.glob(f"{prefix}*/{_LOCK}"):
        with contextlib.suppress(OSError), open(lock, "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its process lives
            shutil.rmtree(lock.parent)
    with tempfile.TemporaryDirectory(dir=root, prefix=prefix) as name, open(Path(name, "new"), "w") as file:
        with contextlib.suppress(OSError):  # on a mount without locks none is there to be found
            fcntl.flock(file, fcntl.LOCK_EX)
            os.rename(file.name, Path(name, _LOCK))  # found only once it is locked
        yield Path(name)
