"""Progress bars."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

T = TypeVar("T")


def tracked(console: Console, what: str, items: Iterable[T], total: int) -> Iterator[T]:
    """``items``, with a bar on a terminal while they are gone through."""
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        yield from progress.track(items, total=total, description=what)


@contextmanager
def byte_bar(console: Console, what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar of ``total`` bytes and of bytes/s on a terminal; what it gives is called with each count of bytes."""
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)
