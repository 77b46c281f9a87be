"""A context variable that has another value for a while."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TypeVar

Value = TypeVar("Value")


@contextlib.contextmanager
def during(variable: ContextVar[Value], value: Value) -> Iterator[Value]:
    """Inside, ``variable`` is ``value``."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)
