"""A run's log."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console
from transformers import TrainerState

from shardwright.arguments.training import TrainingArguments
from shardwright.checkpoint.write import Saved
from shardwright.monitoring import messages
from shardwright.monitoring.run_page import RunPage
from shardwright.monitoring.throughput import Meter
from shardwright.report.lines import say
from shardwright.xla.program_cache import KEPT


class RunLog:
    """Writes each entry to ``state.log_history``, the callbacks (by ``event``) and, except :meth:`note`, the page."""

    def __init__(
        self,
        state: TrainerState,
        meter: Meter,
        watch: RunPage,
        args: TrainingArguments,
        console: Console,
        event: Callable[..., None],
    ) -> None:
        self.state, self.meter, self.watch, self.args = state, meter, watch, args
        self.console, self.event = console, event

    def write(self, logs: dict[str, Any]) -> None:
        """Logs, and updates the page."""
        self.note(logs)
        self.watch.update(self.state, self.meter.expert_load)

    def note(self, logs: dict[str, Any]) -> None:
        """Logs without the page, which belongs to the run alone."""
        logs = {**logs, "epoch": self.state.epoch}
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.event("on_log", logs=logs)

    def steps(self, learning_rate: float) -> None:
        """Reads and logs the metrics of the steps since the last such entry.

        Raises:
            UserError: the loss became NaN or infinite.
        """
        if (read := self.meter.read(self.state.global_step, learning_rate)) is not None:
            metrics, logs = read
            messages.check_good(metrics, self.state, self.args)
            self.write(logs)
        self.programs()

    def saved(self, saved: Saved | None) -> None:
        """Logs a written checkpoint, if there is one."""
        if saved is not None:
            self.write({"saved_step": saved.step, "save_bytes": saved.bytes, "save_seconds": saved.seconds})

    def programs(self) -> None:
        """Says which programs were kept for the next run, or found."""
        for line in KEPT.news():
            say(self.console, line)
