"""Lines on the terminal, escaped, and without markup: rich would take a path such as ``exp[lr=1e-3]`` for it."""

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import IO, Any

from rich.console import Console
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from shardwright.report.escapes import escaped
from shardwright.report.units import duration

_WIDE = 1000  # columns of a pipe or a file, where nothing needs to be wrapped
_MINUTE = 60.0  # seconds


class Terminal(Console):
    """A rich console whose texts are escaped and have no markup, and nothing of its own.

    A pipe or a file is as wide as the lines are, unless COLUMNS or ``width`` says otherwise.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)
        if not (self.is_terminal or self.is_jupyter or options.get("width") or "COLUMNS" in os.environ):
            self.width = _WIDE

    def print(self, *objects: Any, **how: Any) -> None:
        """As rich's; a table that is too wide is folded, where rich would cut its cells."""
        for column in (column for each in objects if isinstance(each, Table) for column in each.columns):
            column.overflow = "fold"
        super().print(*objects, **how)

    def _past_escapes(self) -> IO[str]:
        # a stream that escapes everything takes what is escaped already by this attribute (hosts.output_streams)
        file = Console.file.fget(self)  # type: ignore[attr-defined]
        return getattr(file, "unescaped", file)

    file = property(_past_escapes, Console.file.fset)  # type: ignore[assignment,attr-defined]

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:  # semi-private: rich/console.py, rich 14.1 to 15.0
        return super()._render_buffer(
            part if part.control else Segment(escaped(part.text), part.style) for part in buffer
        )


def say(console: Console, text: str) -> None:
    """Print ``text`` unchanged and unwrapped: a terminal breaks its own lines, and a file keeps them whole."""
    console.print(Text(text), soft_wrap=True)


def say_table(console: Console, header: Sequence[Column | str], rows: Iterable[Sequence[str]], **look: Any) -> None:
    """Print ``rows`` of texts, unchanged, under a ``header``, if that has any words; ``look``: of rich's table."""
    table = Table(*header, show_header=any(header), box=None, pad_edge=False, **look)
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)


def waiting(console: Console, text: str) -> AbstractContextManager[Any]:
    """A context that shows ``text`` with a spinner on a terminal; elsewhere it says so after each minute."""
    return console.status(Text(text)) if console.is_terminal else _said_each_minute(console, text)


@contextlib.contextmanager
def _said_each_minute(console: Console, text: str) -> Iterator[None]:
    done, began = threading.Event(), time.monotonic()

    def tell() -> None:
        while not done.wait(_MINUTE):
            say(console, f"still: {text} ({duration(time.monotonic() - began)})")

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()
