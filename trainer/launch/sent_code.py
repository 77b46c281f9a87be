"""This package's code and the names of what it needs, to be sent to hosts that have neither."""

import importlib
import importlib.metadata
from pathlib import Path

# as they are imported: in a checkout they lie apart
_PACKAGES = ("shardwright", "shardwright.models", "shardwright.recipes", "shardwright.scripts")
_EXTRAS = ("tpu", "stores")  # what a host of a slice needs beside the dependencies: libtpu, and clients of stores


def sent_folders() -> dict[str, Path]:
    """The folder that each of the package's folders becomes, ``shardwright/models``, and where it lies."""
    return {name.replace(".", "/"): Path(str(importlib.import_module(name).__file__)).parent for name in _PACKAGES}


def requirements() -> str:
    """The requirements of a host of a TPU slice, a line each, as pip reads them from a file."""
    found = [line.partition(";") for line in importlib.metadata.requires("shardwright") or ()]
    wanted = [f'extra == "{name}"' for name in _EXTRAS]
    return "".join(f"{name.strip()}\n" for name, _, mark in found if not mark or mark.strip() in wanted)
