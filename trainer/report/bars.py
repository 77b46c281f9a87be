"""Progress bars, shown only on a terminal and in a notebook; each names the time elapsed and the time left."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich import progress
from rich.console import Console
from rich.text import Text

from shardwright.report.notebook import live_progress
from shardwright.report.units import duration

T = TypeVar("T")


def times(elapsed: float | None, left: float | None) -> str:
    """Seconds elapsed and left in words; None: not known."""
    return f"{duration(elapsed)} elapsed, {duration(left)} left"


class TimesColumn(progress.ProgressColumn):
    """The time elapsed and left as one text, so that no narrow window tears a number from its name.

    A task's field ``left`` gives the seconds left, where its owner knows better than the bar's own guess.
    """

    max_refresh = 0.5  # seconds

    def render(self, task: progress.Task) -> Text:
        left = task.fields.get("left", task.time_remaining)
        return Text(times(task.elapsed, left), style="progress.remaining", no_wrap=True)


def step_bar(console: Console) -> progress.Progress:
    """A bar of steps, the task's text ``numbers``, and the time elapsed and ``left``; its owner starts it."""
    return live_progress(
        progress.TextColumn("step"),
        progress.MofNCompleteColumn(),
        progress.BarColumn(bar_width=None),
        progress.TextColumn("{task.fields[numbers]}", markup=False),
        TimesColumn(),
        console=console,
        expand=True,
    )


def tracked(console: Console, what: str, items: Iterable[T], total: int) -> Iterator[T]:
    columns = progress.BarColumn(), progress.TaskProgressColumn(), TimesColumn()
    with live_progress(progress.TextColumn(what), *columns, console=console, transient=True) as bar:
        yield from bar.track(items, total=total)


@contextmanager
def byte_bar(console: Console, what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Shows how many of ``total`` bytes are done, and bytes/s. Yields a function that adds to the count."""
    with live_progress(
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.DownloadColumn(binary_units=True),
        progress.TransferSpeedColumn(),
        TimesColumn(),
        console=console,
        transient=True,
    ) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)
