"""Where what is dear to make is kept between runs: tokenizers, packed rows, compiled steps."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from trainer.errors import UserError


def cache_root(cache_dir: Path | None = None) -> Path:
    """``cache_dir``, else ``$SHARDWRIGHT_CACHE``, else ``shardwright`` in the user's cache folder; made if need be.

    Raises:
        UserError: it can't be written.
    """
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    root = Path(cache_dir or os.environ.get("SHARDWRIGHT_CACHE") or Path(home, "shardwright")).expanduser()
    try:
        root.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=root).close()
    except OSError as error:
        raise UserError(
            asked=f"the cache folder {root}",
            found=str(error),
            why="tokenizers, packed rows and compiled steps are kept there",
            instead="SHARDWRIGHT_CACHE=/a/folder/that/can/be/written",
        ) from error
    return root
