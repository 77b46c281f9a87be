"""The entries that lie in a folder, a file each: the optimizers, the objectives.

A command line's choices and help are made of them, before torch is imported: they take it, and its ``Tensor``, from
here.
"""

import importlib
import pkgutil
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any


class LateModule:
    """A module that is imported once something of it is asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)


if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch, Tensor = LateModule("torch"), object


def folder_entries(package: str, path: Iterable[str]) -> dict[str, Any]:
    """File name → the class with a title that the file defines; a file without one is a helper."""
    found = {}
    for name in sorted(module.name for module in pkgutil.iter_modules(path)):
        module = importlib.import_module(f"{package}.{name}")
        for kind in vars(module).values():
            if isinstance(kind, type) and kind.__module__ == module.__name__ and "title" in vars(kind):
                found[name] = kind
    return found
