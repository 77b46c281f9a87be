"""EvalStep: loss, token accuracy and a person's own metrics over held-out batches, in one graph and one transfer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from shardwright.errors import UserError
from shardwright.models.ops.partial_gradients import Tensors
from shardwright.step.compile_guard import CompileGuard
from shardwright.step.eval_metrics import CORRECT, IDS, LOG_PROBS, Measures, token_values
from shardwright.step.loss import Loss, scored_tokens
from shardwright.step.objectives.preference import CHOSEN_LOSS, LOGGED, PAIR_LOSS, Preference
from shardwright.weights.placed_parameters import Placed
from shardwright.xla import sharding
from shardwright.xla.batch import place_batch


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


@dataclass(frozen=True)
class PreferenceEvaluation:
    """What held-out pairs came to.

    Args:
        loss: the objective's, without the auxiliary loss; NaN if there are no pairs.
        means: what else is logged, under trl's names.
    """

    loss: float
    means: Mapping[str, float]

    def named(self, prefix: str) -> dict[str, float]:
        """As log entries whose names begin with ``prefix``."""
        return {f"{prefix}_{name}": value for name, value in {"loss": self.loss, **self.means}.items()}


class EvalStep:
    """Evaluates batches; no logit leaves a device.

    Args:
        measures: what is measured beside the loss.
    """

    def __init__(self, loss: Loss, placed: Placed, measures: Measures | None = None) -> None:
        self.loss, self.placed, self.measures = loss, placed, measures or Measures()
        self.guard = CompileGuard("evaluation step", expected=1)
        self.predict_guard = CompileGuard("prediction step", expected=1)

    def __call__(self, batches: Iterable[Tensors]) -> Evaluation | PreferenceEvaluation:
        """What ``batches`` (host tensors of [rows, S]) come to together."""
        sums = self.begin()

        def trace(batch: Tensors) -> Tensors:
            self.trace(batch, sums)
            return {"sums": sums}

        for batch in batches:
            self.guard.run(batch, trace)
        return self._read(sums)

    def predict(self, batches: Iterable[Tensors]) -> tuple[Evaluation | PreferenceEvaluation, np.ndarray, np.ndarray]:
        """What ``batches`` come to, and of each position the most likely token and the target's log-probability.

        Both are [all rows, S]; the graph is another than that of an evaluation, and is compiled once too.
        """
        sums = self.begin()
        kept: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])

        def trace(batch: Tensors) -> Tensors:
            return {"sums": sums, **dict(zip((IDS, LOG_PROBS), self.trace(batch, sums, values=True), strict=True))}

        for batch in batches:
            found = self.predict_guard.run(batch, trace)
            for column, name in zip(kept, (IDS, LOG_PROBS), strict=True):
                column.append(found[name].cpu().numpy())
        ids, log_probs = map(np.concatenate, kept)
        return self._read(sums), ids, log_probs

    @property
    def size(self) -> int:
        """How many sums there are: of the losses, of the scored targets, of those met, and of each metric its sum and
        count.
        """
        return 3 + 2 * len(self.measures.names)

    def begin(self) -> torch.Tensor:
        """The sums before the first batch, placed."""
        return sharding.place("sums", torch.zeros(self.size), self.placed.mesh, (None,))

    def trace(self, batch: Tensors, sums: torch.Tensor, *, values: bool = False) -> Sequence[torch.Tensor]:
        """Build the graph that adds ``batch`` to ``sums``, and run nothing; returns what each token came to, if asked.

        That is what :meth:`predict` returns, [rows, S], laid out as the batch.
        """
        mesh = self.placed.mesh
        inputs = place_batch(batch, mesh, self.placed.batch_axes)
        with torch.no_grad():
            added, recorded = self._added(inputs, values)
            sums.copy_(sharding.constrain(sums + added, mesh, (None,)))
            rows = (self.placed.batch_axes or None, None)
            return [sharding.constrain(recorded[name], mesh, rows) for name in (IDS, LOG_PROBS)] if values else []

    def _added(self, batch: Tensors, values: bool) -> tuple[torch.Tensor, Tensors]:
        """What the placed ``batch`` adds to the sums; and by name what was recorded, each token's ``values`` too."""

        def measure(logits: torch.Tensor, labels: torch.Tensor) -> Tensors:
            return {**self.measures(logits, labels), **(token_values(logits, labels) if values else {})}

        scored = scored_tokens(batch["labels"])
        # of a person's own loss it can't be told whether it is divided by what it is given, or is a mean by itself
        share = torch.ones((), device=scored.device) if self.loss.compute is None else scored.clamp(min=1)
        counts = not values and self.measures.compute is None
        loss, recorded = self.loss(
            self.placed.parameters, batch, share, training=False, measure=measure, by_counts=counts
        )
        total = loss.to(torch.float32) * (1 if self.loss.compute is None else scored)
        counted = torch.stack([total, scored, recorded[CORRECT]])
        return torch.cat([counted, *(recorded[name] for name in self.measures.names)]), recorded

    def _read(self, sums: torch.Tensor) -> Evaluation | PreferenceEvaluation:
        total, tokens, correct, *pairs = sums.cpu().tolist()
        metrics = {
            name: pairs[2 * i] / pairs[2 * i + 1] if pairs[2 * i + 1] else math.nan
            for i, name in enumerate(self.measures.names)
        }
        loss, accuracy = (total / tokens, correct / tokens) if tokens else (math.nan, math.nan)
        return Evaluation(loss, accuracy, metrics, self.loss.compute is None)


class PreferenceEvalStep(EvalStep):
    """Evaluates batches of pairs under a preference objective. Of single tokens it says nothing."""

    names = (PAIR_LOSS, CHOSEN_LOSS, *LOGGED)

    def __init__(self, loss: Loss, placed: Placed, objective: Preference) -> None:
        super().__init__(loss, placed)
        self.objective = objective

    @property
    def size(self) -> int:
        """How many sums there are: both counts, and what is logged of pairs."""
        return 2 + len(self.names)

    def _added(self, batch: Tensors, values: bool) -> tuple[torch.Tensor, Tensors]:
        if values:
            raise UserError(
                asked=f"predictions with the objective {self.objective.objective}",
                found="rows of pairs, whose loss compares two answers",
                why="what is said of each token is said of one answer, and a record of pairs has two",
                instead="an evaluation; or the objective sft",
            )
        counts = self.objective.counts(batch)
        _, recorded = self.loss(self.placed.parameters, batch, torch.ones_like(counts), training=False)
        return torch.cat([counts, torch.stack([recorded[name].to(torch.float32) for name in self.names])]), recorded

    def _read(self, sums: torch.Tensor) -> PreferenceEvaluation:
        pairs, targets, pair_loss, chosen_loss, *values = sums.cpu().tolist()
        if not pairs:
            return PreferenceEvaluation(math.nan, dict.fromkeys(LOGGED, math.nan))
        means = {name: value / pairs for name, value in zip(LOGGED, values, strict=True)}
        return PreferenceEvaluation(pair_loss / pairs + chosen_loss / targets, means)


def prefix_of(name: str, first: str = "eval") -> str:
    """What the log entries of the held-out set ``name`` begin with, as transformers has it."""
    return f"{first}_{name}" if name else first
