"""The versions of everything that a run's numbers depend on: packages, and Shardwright's own code."""

import hashlib
import importlib.metadata
from pathlib import Path

from shardwright import models


def versions() -> dict[str, str]:
    """Package → version."""
    return {name: importlib.metadata.version(name) for name in ("shardwright", "torch", "torch_xla", "transformers")}


def code_digest() -> str:
    """A checksum of every module of trainer and models on this host's disk."""
    found = hashlib.sha256()
    for folder in (Path(__file__).parents[1], Path(models.__file__).parent):
        for path in sorted(folder.rglob("*.py")):
            found.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return found.hexdigest()[:16]
