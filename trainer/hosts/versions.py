"""The versions of everything that a run's numbers depend on: packages, and Shardwright's own code."""

import functools
import hashlib
import importlib.metadata
from pathlib import Path
from typing import Any

from shardwright import models


def versions() -> dict[str, str]:
    """Package → version, and a checksum of Shardwright's code."""
    packages = ("shardwright", "torch", "torch_xla", "transformers")
    return {**{name: importlib.metadata.version(name) for name in packages}, "Shardwright's code": code_digest()}


def other_versions(saved: Any) -> list[str]:
    """A line for each that differs from those of a checkpoint, which may lack some; none for what is no record."""
    found = saved if isinstance(saved, dict) else {}
    return [
        f"{name} {now} (it was {before[:80]})"
        for name, now in versions().items()
        if isinstance(before := found.get(name), str) and before != now
    ]


@functools.cache
def code_digest() -> str:
    """A checksum of every module of trainer and models on this host's disk, when it was first asked for."""
    found = hashlib.sha256()
    for folder in (Path(__file__).parents[1], Path(models.__file__).parent):
        for path in sorted(folder.rglob("*.py")):
            found.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return found.hexdigest()[:16]
