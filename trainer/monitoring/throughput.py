"""Log entries of the steps since the last one: loss, rate, speed."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from shardwright.job import Job
from shardwright.report.expert_load import ExpertLoad, log_entries
from shardwright.step import spikes
from shardwright.step.step_metrics import StepMetrics
from shardwright.step.train_step import TrainStep
from shardwright.xla.chips import Chip
from shardwright.xla.runtime import compile_count


def least_seconds(job: Job, chip: Chip | None, length: int) -> float | None:
    """Seconds of a step's model FLOPs, on rows of ``length`` tokens, at all devices' peak; None: not known."""
    flops = job.facts.training_flops(job.rows, length)
    return None if chip is None or flops is None else flops / (job.devices * chip.flops)


class Meter:
    """Reads a step's metrics, and times the steps.

    Args:
        rows: rows a step.
        last: the step of the last reading.
        least_seconds: :func:`least_seconds` by the rows' length in tokens; None: no MFU.

    Attributes:
        expert_load: that of the last reading.
    """

    def __init__(self, step: TrainStep, rows: int, last: int, least_seconds: Callable[[int], float | None]) -> None:
        self._step, self._rows, self._last, self._least_of = step, rows, last, functools.cache(least_seconds)
        self._tokens, self._least = 0, list[float | None]()  # of the steps since the last reading
        self._clock = self._began = time.perf_counter()
        self._loss_sum, self._steps = 0.0, 0
        self.expert_load: tuple[ExpertLoad, ...] = ()

    def begin(self) -> None:
        """Starts the clock of the run and of its next log entry."""
        self._clock = self._began = time.perf_counter()

    def leave_out(self, seconds: float) -> None:
        """Leaves ``seconds`` out of the steps' time."""
        self._clock += seconds

    def stepped(self, length: int) -> int:
        """Counts a step on rows of ``length`` tokens; returns its tokens, padding included."""
        tokens = self._rows * length
        self._tokens += tokens
        self._least.append(self._least_of(length))
        return tokens

    def read(self, step: int, learning_rate: float) -> tuple[StepMetrics, dict[str, Any]] | None:
        """Metrics and log entry of the steps up to ``step``; None if they have been read before."""
        if step == self._last:
            return None
        metrics, now = self._step.read_metrics(), time.perf_counter()
        logs = {
            "loss": metrics.loss,
            "learning_rate": learning_rate,
            "grad_norm": metrics.grad_norm,
            "tokens_per_second": self._tokens / (now - self._clock),
            "compiles": compile_count(),
        }
        if least := [seconds for seconds in self._least if seconds is not None]:
            logs["mfu"] = sum(least) / (now - self._clock)
        if metrics.dropped_fraction is not None:
            logs["dropped_fraction"] = metrics.dropped_fraction
        if metrics.unscored_steps:
            logs["unscored_steps"] = metrics.unscored_steps
        if metrics.spike is not None:
            logs |= spikes.log_entries(metrics.spike, since=self._last)
        logs |= {**metrics.logged, **metrics.router_losses, **log_entries(metrics.expert_load)}
        self.expert_load = metrics.expert_load
        self._clock, self._last, self._tokens = now, step, 0
        self._least.clear()
        self._loss_sum, self._steps = self._loss_sum + metrics.loss * metrics.steps, self._steps + metrics.steps
        return metrics, logs

    def summary(self) -> dict[str, float]:
        """The seconds since :meth:`begin`, and the mean loss of the steps read, if any."""
        loss = {"train_loss": self._loss_sum / self._steps} if self._steps else {}
        return {"train_runtime": time.perf_counter() - self._began, **loss}
