"""A run's log, and the speed of its steps."""

import functools
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from transformers import TrainerState

from shardwright.checkpoint.write import SaveResult
from shardwright.job import Job
from shardwright.monitoring import messages
from shardwright.monitoring.run_page import RunPage
from shardwright.report.expert_load import log_entries
from shardwright.report.lines import say
from shardwright.step import spikes
from shardwright.step.compile_guard import COMPILED
from shardwright.step.step_metrics import StepMetrics
from shardwright.step.train_step import TrainStep
from shardwright.xla.program_cache import KEPT
from shardwright.xla.runtime import chip


class RunLog:
    """Reads and times steps; each entry goes to ``state.log_history``, the callbacks (by ``event``) and the page."""

    def __init__(
        self,
        job: Job,
        step: TrainStep,
        state: TrainerState,
        watch: RunPage,
        console: Console,
        event: Callable[..., None],
    ) -> None:
        self.job, self.state, self.watch, self.console, self.event = job, state, watch, console, event
        self._step, self._least_of = step, functools.cache(self._least_seconds)
        # of the steps since the last reading
        self._last, self._tokens, self._least = state.global_step, 0, list[float | None]()
        self._loss_sum, self._steps = 0.0, 0  # of the run
        self.begin()

    def begin(self) -> None:
        """Starts the clock of the run and of its next entry."""
        self._clock = self._began = time.perf_counter()

    def leave_out(self, seconds: float) -> None:
        self._clock += seconds

    def stepped(self, length: int) -> None:
        """Counts a step on rows of ``length`` tokens, padding included."""
        self._tokens += self.job.rows * length
        self.state.num_input_tokens_seen += self.job.rows * length
        self._least.append(self._least_of(length))

    def write(self, logs: dict[str, Any]) -> None:
        """Logs, and updates the page."""
        self.note(logs)
        self.watch.update()

    def note(self, logs: dict[str, Any]) -> None:
        """Logs without the page, which belongs to the run alone."""
        logs = {**logs, "epoch": self.state.epoch}
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.event("on_log", logs=logs)

    def steps(self, learning_rate: float) -> None:
        """Reads and logs the metrics of the steps since the last such entry; UserError for one that ended the run."""
        if self.state.global_step != self._last:
            metrics, now = self._step.read_metrics(), time.perf_counter()
            logs = self._entry(metrics, learning_rate, now - self._clock)
            self.watch.loads = metrics.expert_load
            self._clock, self._last, self._tokens = now, self.state.global_step, 0
            self._least.clear()
            self._loss_sum, self._steps = self._loss_sum + metrics.loss * metrics.steps, self._steps + metrics.steps
            messages.check_good(metrics, self.state, self.job.args)
            self.write(logs)
        self.programs()

    def saved(self, saved: SaveResult | None) -> None:
        if saved is not None:
            self.write({"saved_step": saved.step, "save_bytes": saved.bytes, "save_seconds": saved.seconds})

    def programs(self) -> None:
        """Says which programs were kept for the next run, or found."""
        for line in KEPT.news():
            say(self.console, line)

    def summary(self) -> None:
        """Logs the seconds since :meth:`begin`, the mean loss of the steps read, if any, and where time went."""
        loss = {"train_loss": self._loss_sum / self._steps} if self._steps else {}
        self.write({"train_runtime": time.perf_counter() - self._began, **loss, **self.watch.spent()})

    def _entry(self, metrics: StepMetrics, learning_rate: float, seconds: float) -> dict[str, Any]:
        logs = {
            "loss": metrics.loss,
            "learning_rate": learning_rate,
            "grad_norm": metrics.grad_norm,
            "tokens_per_second": self._tokens / seconds,
            "compiles": sum(COMPILED[guard.what] for guard in self._step.guards.values()),
        }
        if least := [known for known in self._least if known is not None]:
            logs["mfu"] = sum(least) / seconds
        if metrics.dropped_fraction is not None:
            logs["dropped_fraction"] = metrics.dropped_fraction
        if metrics.unscored_steps:
            logs["unscored_steps"] = metrics.unscored_steps
        if metrics.spike is not None:
            logs |= spikes.log_entries(metrics.spike, since=self._last)
        return {**logs, **metrics.logged, **metrics.router_losses, **log_entries(metrics.expert_load)}

    def _least_seconds(self, length: int) -> float | None:
        """Seconds of a step's model FLOPs, on rows of ``length`` tokens, at all devices' peak; None: not known."""
        kind, flops = chip(), self.job.training_flops(length)
        return None if kind is None or flops is None else flops / (self.job.devices * kind.flops)
