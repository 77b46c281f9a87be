"""Progress bars, shown only on a terminal and in a notebook; each names the time elapsed and the time left."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich import progress
from rich.console import Console
from rich.table import Column
from rich.text import Text

from shardwright.report.notebook import live_progress
from shardwright.report.units import duration

T = TypeVar("T")


def times(elapsed: float | None, left: float | None) -> str:
    """Seconds elapsed and left in words; None: not known."""
    return f"{duration(elapsed)} elapsed, {duration(left)} left"


class TimesColumn(progress.ProgressColumn):
    """The time elapsed and the time left, as one text."""

    max_refresh = 0.5  # seconds

    def render(self, task: progress.Task) -> Text:
        return Text(times(task.elapsed, task.time_remaining), style="progress.remaining", no_wrap=True)


class _StepColumn(progress.ProgressColumn):
    """The step, the times and the task's text ``numbers`` in one text, of which a narrow window cuts the end."""

    def render(self, task: progress.Task) -> Text:
        text = Text(f"step {task.completed:.0f}/{task.total:.0f}  ", no_wrap=True, overflow="ellipsis")
        text.append(times(task.elapsed, task.fields["left"]), style="progress.remaining")
        return text.append(f"  {task.fields['numbers']}")


def step_bar(console: Console) -> progress.Progress:
    """A bar of steps with the time elapsed; a task's fields are ``numbers``, a text, and the seconds ``left``, or None.

    Its owner starts it.
    """
    text = _StepColumn(table_column=Column(no_wrap=True))
    return live_progress(text, progress.BarColumn(bar_width=None), console=console, expand=True)


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
