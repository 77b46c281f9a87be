"""A package's public names, each imported when it is first asked for, so that importing the package stays cheap."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any


def lazy_names(package: str, **where: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns the ``__getattr__`` and the ``__dir__`` of ``package`` (PEP 562).

    Args:
        package: the package's ``__name__``.
        where: public name → the module of the package that defines it.
    """

    def get(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{package}.{where[name]}"), name)
        setattr(sys.modules[package], name, value)  # the next look-up finds it there
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *where})

    return get, names
