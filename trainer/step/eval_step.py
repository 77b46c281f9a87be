"""EvalStep: loss, token accuracy and a person's own metrics over held-out batches, in one graph and one transfer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from models.partial_gradients import Tensors
from trainer.step.compile_guard import CompileGuard
from trainer.step.loss import Loss, scored_tokens
from trainer.step.measures import CORRECT, IDS, LOG_PROBS, Measures, token_values
from trainer.step.placed import Placed
from trainer.xla import sharding
from trainer.xla.batch import place_batch
from trainer.xla.runtime import run_now


@dataclass(frozen=True)
class Evaluation:
    """What held-out rows came to.

    Args:
        loss: mean cross entropy over the scored targets, in nats a token, without the auxiliary loss; NaN if there is
            none. With a loss function of one's own, the mean of that.
        accuracy: the share of them that no other token was given a higher score than; NaN likewise.
        metrics: of a person's own, by name.
        is_entropy: whether the loss is the cross entropy, and so has a perplexity.
    """

    loss: float
    accuracy: float
    metrics: dict[str, float] = field(default_factory=dict)
    is_entropy: bool = True

    @property
    def perplexity(self) -> float:
        """e to the loss."""
        return math.exp(self.loss) if self.loss < 700 else self.loss * math.inf

    @property
    def entries(self) -> dict[str, float]:
        """As log entries, under transformers' kind of names."""
        return self.named("eval")

    def named(self, prefix: str) -> dict[str, float]:
        """As log entries whose names begin with ``prefix``."""
        perplexity = {"perplexity": self.perplexity} if self.is_entropy else {}
        found = {"loss": self.loss, **perplexity, "accuracy": self.accuracy, **self.metrics}
        return {f"{prefix}_{name}": value for name, value in found.items()}


class EvalStep:
    """Evaluates batches; no logit leaves a device.

    Args:
        measures: what is measured beside the loss.
    """

    def __init__(self, loss: Loss, placed: Placed, measures: Measures | None = None) -> None:
        self.loss, self.placed, self.measures = loss, placed, measures or Measures()
        self.guard = CompileGuard("evaluation step", expected=1)
        self.predict_guard = CompileGuard("prediction step", expected=1)

    def __call__(self, batches: Iterable[Tensors]) -> Evaluation:
        """What ``batches`` (host tensors of [rows, S]) come to together."""
        sums = self.begin()
        for batch in batches:
            self.guard.before(batch)
            self.trace(batch, sums)
            run_now([sums])
            self.guard.after()
        return self._read(sums)

    def predict(self, batches: Iterable[Tensors]) -> tuple[Evaluation, np.ndarray, np.ndarray]:
        """What ``batches`` come to, and of each position the most likely token and the target's log-probability.

        Both are [all rows, S]; the graph is another than that of an evaluation, and is compiled once too.
        """
        sums = self.begin()
        kept: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
        for batch in batches:
            self.predict_guard.before(batch)
            values = self.trace(batch, sums, values=True)
            run_now([sums, *values])
            self.predict_guard.after()
            for column, value in zip(kept, values, strict=True):
                column.append(value.cpu().numpy())
        ids, log_probs = map(np.concatenate, kept)
        return self._read(sums), ids, log_probs

    def begin(self) -> torch.Tensor:
        """The sums before the first batch, placed: of the losses, of the scored targets, of those met, and of each
        metric its sum and count.
        """
        return sharding.place("sums", torch.zeros(3 + 2 * len(self.measures.names)), self.placed.mesh, (None,))

    def trace(self, batch: Tensors, sums: torch.Tensor, *, values: bool = False) -> Sequence[torch.Tensor]:
        """Build the graph that adds ``batch`` to ``sums``, and run nothing; returns what each token came to, if asked.

        That is what :meth:`predict` returns, [rows, S], laid out as the batch.
        """
        mesh = self.placed.mesh
        inputs = place_batch(batch, mesh, self.placed.batch_axes)

        def measure(logits: torch.Tensor, labels: torch.Tensor) -> Tensors:
            return {**self.measures(logits, labels), **(token_values(logits, labels) if values else {})}

        with torch.no_grad():
            scored = scored_tokens(inputs["labels"])
            # of a person's own loss it can't be told whether it is divided by what it is given, or is a mean by itself
            share = torch.ones((), device=sums.device) if self.loss.compute is None else scored.clamp(min=1)
            loss, recorded = self.loss(self.placed.parameters, inputs, share, training=False, measure=measure)
            total = loss.to(torch.float32) * (1 if self.loss.compute is None else scored)
            added = torch.cat(
                [
                    torch.stack([total, scored, recorded[CORRECT]]),
                    *(recorded[name] for name in self.measures.names),
                ]
            )
            sums.copy_(sharding.constrain(sums + added, mesh, (None,)))
            rows = (self.placed.batch_axes or None, None)
            return [sharding.constrain(recorded[name], mesh, rows) for name in (IDS, LOG_PROBS)] if values else []

    def _read(self, sums: torch.Tensor) -> Evaluation:
        total, tokens, correct, *pairs = sums.cpu().tolist()
        metrics = {
            name: pairs[2 * i] / pairs[2 * i + 1] if pairs[2 * i + 1] else math.nan
            for i, name in enumerate(self.measures.names)
        }
        loss, accuracy = (total / tokens, correct / tokens) if tokens else (math.nan, math.nan)
        return Evaluation(loss, accuracy, metrics, self.loss.compute is None)
