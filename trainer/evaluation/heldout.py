"""Evaluations of a run: the held-out rows set by set, in batches of one shape, and what is told of them."""

import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np
from rich.console import Console

from shardwright.data.corpus import Corpus
from shardwright.data.rows.batches import Batch, heldout_batches
from shardwright.data.rows.rows import StoredRows
from shardwright.job import Job
from shardwright.report.bars import tracked
from shardwright.report.lines import say
from shardwright.step.eval_step import EvalStep, prefix_of
from shardwright.xla.stop_requests import StopRequests


class Evaluator:
    """Evaluates each set of a corpus's held-out rows, the same rows each time."""

    def __init__(
        self,
        job: Job,
        corpus: Corpus,
        step: EvalStep,
        share: tuple[int, int],  # this process's number, and how many there are; they share each batch
        console: Console,
        stop: StopRequests,
        event: Callable[..., None],  # tells the callbacks of an event by its name
        tell: Callable[[dict[str, float]], None],  # called with the log entries of each set
    ) -> None:
        self._most = job.args.max_eval_rows
        self.sets: Mapping[str, StoredRows] = {n: rows.spread(self._most) for n, rows in corpus.heldout_sets.items()}
        names = [f"{prefix_of(name)}_loss" for name in self.sets]
        self.first_loss, self.last_loss = names[0], names[-1]
        self.step, self._rows, self._share = step, job.evaluation_rows, share
        self._console, self._stop, self._event, self._tell = console, stop, event, tell

    @property
    def first(self) -> StoredRows:
        return next(iter(self.sets.values()))

    def __call__(
        self, sets: Mapping[str, StoredRows] | None = None, prefix: str = "eval", *, stoppable: bool = False
    ) -> dict[str, float]:
        """Evaluate ``max_eval_rows`` of each held-out set, or of ``sets``; returns log entries, and tells each set's.

        If ``stoppable``, a signal ends it within a batch, and nothing is told of the set that it cut short.
        """
        entries: dict[str, float] = {}
        for name, given in (self.sets if sets is None else sets).items():
            rows = given.spread(self._most)
            if len(rows) < len(given):  # for its own sets the run has said so at its start
                say(self._console, f"eval:    {len(rows):,} of {len(given):,} rows evaluated (--max_eval_rows)")
            found = self.step(self._batches(rows, stoppable)).named(prefix_of(name, prefix))
            if stoppable and self._stop.any:
                break
            self._tell(found)
            entries |= found
        return entries

    def predict(self, rows: StoredRows, prefix: str = "test") -> tuple[dict[str, float], np.ndarray, np.ndarray]:
        """Evaluate ``rows``; also returns the tokens and log-probabilities of `EvalStep.predict`, a row each."""
        found, ids, log_probs = self.step.predict(self._batches(rows, False))
        metrics = found.named(prefix)
        self._event("on_predict", metrics=metrics)
        return metrics, ids[: len(rows)], log_probs[: len(rows)]

    def _batches(self, rows: StoredRows, stoppable: bool) -> Iterator[Batch]:
        batches = heldout_batches(rows, self._rows, *self._share)
        for batch in tracked(self._console, "held-out rows", batches, math.ceil(len(rows) / self._rows)):
            if stoppable and self._stop.any:
                return
            yield batch
            self._event("on_prediction_step")
