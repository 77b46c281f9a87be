"""Optimizers: one file each. The file's name is what ``--optim`` takes.

An entry has a title, its numbers, its state of a parameter and its update rule. It imports torch inside its functions:
a command line's choices and help are made of the entries.
"""

from __future__ import annotations

import importlib
import pkgutil

from shardwright.optimizers.optimizer import Optimizer


def entries() -> dict[str, type[Optimizer]]:
    """The classes with a title that the folder's files define, by the names of the files."""
    found = {}
    for name in sorted(module.name for module in pkgutil.iter_modules(__path__)):
        module = importlib.import_module(f"{__name__}.{name}")
        for kind in vars(module).values():
            if isinstance(kind, type) and kind.__module__ == module.__name__ and "title" in vars(kind):
                found[name] = kind
    return found


OPTIMIZERS = entries()  # --optim → its entry
