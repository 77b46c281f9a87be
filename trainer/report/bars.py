"""Progress bars, shown only on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

T = TypeVar("T")


def step_bar(console: Console) -> Progress:
    """A bar of steps, the task's text ``numbers``, and the time gone and left; its owner starts it."""
    return Progress(
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[numbers]}", markup=False),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        expand=True,
    )


def tracked(console: Console, what: str, items: Iterable[T], total: int) -> Iterator[T]:
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        yield from progress.track(items, total=total, description=what)


@contextmanager
def byte_bar(console: Console, what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Shows how many of ``total`` bytes are done, and bytes/s. Yields a function that adds to the count."""
    with Progress(
        TextColumn("{task.description}", markup=False),
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
