"""EvalStep: loss and token accuracy over held-out batches, in one graph and one transfer to the host."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from models.partial_gradients import Tensors
from trainer.step.compile_guard import CompileGuard
from trainer.step.loss import CORRECT, Loss, scored_tokens
from trainer.step.placed import Placed
from trainer.step.preference import CHOSEN_LOSS, LOGGED, PAIR_LOSS, Preference
from trainer.xla import sharding
from trainer.xla.batch import place_batch
from trainer.xla.runtime import run_now


@dataclass(frozen=True)
class Evaluation:
    """What held-out rows came to.

    Args:
        loss: mean cross entropy over the scored targets, in nats a token, without the auxiliary loss; NaN if there is
            none.
        accuracy: the share of them that no other token was given a higher score than; NaN likewise.
    """

    loss: float
    accuracy: float

    @property
    def perplexity(self) -> float:
        """e to the loss."""
        return math.exp(self.loss) if self.loss < 700 else self.loss * math.inf

    @property
    def entries(self) -> dict[str, float]:
        """As log entries, under transformers' kind of names."""
        return {"eval_loss": self.loss, "eval_perplexity": self.perplexity, "eval_accuracy": self.accuracy}


@dataclass(frozen=True)
class PreferenceEvaluation:
    """What held-out pairs came to.

    Args:
        loss: the objective's, without the auxiliary loss; NaN if there are no pairs.
        means: what else is logged, under trl's names.
    """

    loss: float
    means: Mapping[str, float]

    @property
    def entries(self) -> dict[str, float]:
        """As log entries, under transformers' kind of names."""
        return {"eval_loss": self.loss, **{f"eval_{name}": value for name, value in self.means.items()}}


class EvalStep:
    """Evaluates batches; no logit leaves a device."""

    size = 3  # of the sums

    def __init__(self, loss: Loss, placed: Placed) -> None:
        self.loss, self.placed = loss, placed
        self.guard = CompileGuard("evaluation step", expected=1)

    def __call__(self, batches: Iterable[Tensors]) -> Evaluation | PreferenceEvaluation:
        """What ``batches`` (host tensors of [rows, S]) come to together."""
        sums = self.begin()
        for batch in batches:
            self.guard.before(batch)
            self.trace(batch, sums)
            run_now([sums])
            self.guard.after()
        return self.found(sums.cpu().tolist())

    def found(self, sums: Sequence[float]) -> Evaluation | PreferenceEvaluation:
        """What ``sums`` over all batches mean."""
        total, tokens, correct = sums
        return Evaluation(total / tokens, correct / tokens) if tokens else Evaluation(math.nan, math.nan)

    def begin(self) -> torch.Tensor:
        """The sums before the first batch, placed: of the losses, of the scored targets, and of those met."""
        return sharding.place("sums", torch.zeros(self.size), self.placed.mesh, (None,))

    def trace(self, batch: Tensors, sums: torch.Tensor) -> None:
        """Build the graph that adds ``batch`` to ``sums``, and run nothing."""
        mesh = self.placed.mesh
        inputs = place_batch(batch, mesh, self.placed.batch_axes)
        with torch.no_grad():
            sums.copy_(sharding.constrain(sums + self.added(inputs), mesh, (None,)))

    def added(self, batch: Tensors) -> torch.Tensor:
        """What the placed ``batch`` adds to the sums."""
        one = torch.ones((), device=batch["labels"].device)
        loss, recorded = self.loss(self.placed.parameters, batch, one, training=False)
        return torch.stack([loss.to(torch.float32), scored_tokens(batch["labels"]), recorded[CORRECT]])


class PreferenceEvalStep(EvalStep):
    """Evaluates batches of pairs under a preference objective."""

    names = (PAIR_LOSS, CHOSEN_LOSS, *LOGGED)
    size = 2 + len(names)

    def __init__(self, loss: Loss, placed: Placed, objective: Preference) -> None:
        super().__init__(loss, placed)
        self.objective = objective

    def added(self, batch: Tensors) -> torch.Tensor:
        """The counts of ``batch``, and the sums of what is logged of its pairs."""
        counts = self.objective.counts(batch)
        _, recorded = self.loss(self.placed.parameters, batch, torch.ones_like(counts), training=False)
        return torch.cat([counts, torch.stack([recorded[name].to(torch.float32) for name in self.names])])

    def found(self, sums: Sequence[float]) -> PreferenceEvaluation:
        """The means of ``sums``."""
        pairs, targets, pair_loss, chosen_loss, *values = sums
        if not pairs:
            return PreferenceEvaluation(math.nan, dict.fromkeys(LOGGED, math.nan))
        means = {name: value / pairs for name, value in zip(LOGGED, values, strict=True)}
        return PreferenceEvaluation(pair_loss / pairs + chosen_loss / targets, means)
