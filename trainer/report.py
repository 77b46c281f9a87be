"""What a person sees of a run: the progress bar, the log lines, the loss curve, the closing table."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

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
from rich.table import Table
from transformers import TrainerCallback

T = TypeVar("T")

# log key -> how a person reads it
_FORMATS = {
    "loss": "loss {:.4f}",
    "eval_loss": "held-out loss {:.4f}",
    "learning_rate": "lr {:.3g}",
    "grad_norm": "grad norm {:.3f}",
    "tokens_per_second": "{:,.0f} tokens/s",
    "dropped_fraction": "dropped {:.2%}",
    "compiles": "{} compiles",
    "save_pause": "save pause {:.3f} s",
    "saved_step": "checkpoint-{} written",
    "save_bytes": "{:,} bytes",
    "save_seconds": "in {:.2f} s",
}


class ProgressCallback(TrainerCallback):
    """A live bar (step, loss, tokens/s, time left) on a terminal; a line at each logging step everywhere."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.progress: Progress | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
            expand=True,
        )
        self.task = self.progress.add_task(
            "train", total=state.max_steps, completed=state.global_step, numbers="compiling the step …"
        )
        self.first_step = state.global_step + 1
        self.progress.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.progress is not None:
            if state.global_step == self.first_step:  # compiled
                self.progress.update(self.task, numbers="")
            self.progress.update(self.task, completed=state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        logs = logs or {}
        text = "  ".join(form.format(logs[key]) for key, form in _FORMATS.items() if logs.get(key) is not None)
        self.console.print(f"step {state.global_step:>6}  {text}", highlight=False, soft_wrap=True)
        if self.progress is not None and "loss" in logs:
            numbers = f"loss {logs['loss']:.3f}  {logs['tokens_per_second']:,.0f} tokens/s"
            self.progress.update(self.task, numbers=numbers)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.progress is not None:
            self.progress.stop()


def tracked(console: Console, what: str, items: Iterable[T], total: int) -> Iterator[T]:
    """``items``, with a bar on a terminal while they are gone through."""
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        yield from progress.track(items, total=total, description=what)


def loss_curve(log_history: Sequence[dict[str, Any]], unigram: float | None) -> bytes:
    """Training and held-out loss (nats a token) against steps, drawn as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for key, label, style in (("loss", "training", "-"), ("eval_loss", "held out", "o")):
        points = [(entry["step"], entry[key]) for entry in log_history if key in entry]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label)
    if unigram is not None:
        axes.axhline(unigram, color="grey", linestyle=":", label="unigram model of the same tokens")
    axes.set(xlabel="step", ylabel="loss (nats a token)", title="Loss")
    axes.grid(alpha=0.3)
    axes.legend()
    image = io.BytesIO()
    figure.savefig(image, dpi=120, format="png")
    return image.getvalue()


def closing_table(rows: Sequence[tuple[str, str]]) -> Table:
    """Two columns: what, and how much."""
    table = Table(show_header=False, box=None, pad_edge=False)
    for what, value in rows:
        table.add_row(what, value)
    return table


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
