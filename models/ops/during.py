"""A context variable that has another value for a while."""

import contextlib
from collections.abc import Iterator
from typing import Any, TypeVar

Value = TypeVar("Value")


@contextlib.contextmanager
def during(variable: Any, value: Value) -> Iterator[Value]:
    """Inside, ``variable``, a `ContextVar` or transformers' own kind of one, is ``value``."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)
