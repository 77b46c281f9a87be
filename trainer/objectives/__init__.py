"""Objectives: the losses a run can learn by, one file each. A file of this folder without a title is a helper.

An entry has its record shapes, their packing into rows, its options, and its loss of a model's logits. It imports torch
inside its functions: a command line's choices and help are made of the entries.
"""

from __future__ import annotations

import importlib
import pkgutil

from shardwright.objectives.objective import Objective

DEFAULT = "sft"


def _entries() -> dict[str, type[Objective]]:
    found = {}
    for name in sorted(module.name for module in pkgutil.iter_modules(__path__)):
        module = importlib.import_module(f"{__name__}.{name}")
        for kind in vars(module).values():
            if isinstance(kind, type) and kind.__module__ == module.__name__ and "title" in vars(kind):
                found[name] = kind
    return found


OBJECTIVES = _entries()  # --objective → its entry
