"""Modules with some methods other than their class's, such as a forward that XLA can run."""

import functools
from typing import Any

from torch import nn


def swap_methods(module: nn.Module, mixin: type, **attributes: Any) -> None:
    """Give ``module``, in place, the methods of ``mixin`` before those of its class, and class ``attributes``."""
    original: Any = type(module)  # for mypy: a class is no hashable value to it
    module.__class__ = _with(mixin, original, **attributes)


@functools.cache
def _with(mixin: type, original: Any, **attributes: Any) -> Any:
    """The class ``original`` with the methods of ``mixin``, made once, so that layers stay equal."""
    return type(original.__name__, (mixin, original), attributes)
