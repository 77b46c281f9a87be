"""Progress bars, shown only on a terminal."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich import progress
from rich.console import Console

T = TypeVar("T")


def step_bar(console: Console) -> progress.Progress:
    """A bar of steps, the task's text ``numbers``, and the time gone and left; its owner starts it."""
    return progress.Progress(
        progress.TextColumn("step"),
        progress.MofNCompleteColumn(),
        progress.BarColumn(bar_width=None),
        progress.TextColumn("{task.fields[numbers]}", markup=False),
        progress.TimeElapsedColumn(),
        progress.TextColumn("gone,"),
        progress.TimeRemainingColumn(),
        progress.TextColumn("left"),
        console=console,
        disable=not console.is_terminal,
        expand=True,
    )


def tracked(console: Console, what: str, items: Iterable[T], total: int) -> Iterator[T]:
    with progress.Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        yield from bar.track(items, total=total, description=what)


@contextmanager
def byte_bar(console: Console, what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Shows how many of ``total`` bytes are done, and bytes/s. Yields a function that adds to the count."""
    with progress.Progress(
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.DownloadColumn(binary_units=True),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)
