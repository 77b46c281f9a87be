"""EvalStep: loss and token accuracy over held-out batches, in one graph and one transfer to the host."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from models.partial_gradients import Tensors
from trainer.step.compile_guard import CompileGuard
from trainer.step.loss import CORRECT, Loss, scored_tokens
from trainer.step.placed import Placed
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


class EvalStep:
    """Evaluates batches; no logit leaves a device."""

    def __init__(self, loss: Loss, placed: Placed) -> None:
        self.loss, self.placed = loss, placed
        self.guard = CompileGuard("evaluation step", expected=1)

    def __call__(self, batches: Iterable[Tensors]) -> Evaluation:
        """What ``batches`` (host tensors of [rows, S]) come to together."""
        sums = self.begin()
        for batch in batches:
            self.guard.before(batch)
            self.trace(batch, sums)
            run_now([sums])
            self.guard.after()
        total, tokens, correct = sums.cpu().tolist()
        return Evaluation(total / tokens, correct / tokens) if tokens else Evaluation(math.nan, math.nan)

    def begin(self) -> torch.Tensor:
        """The sums before the first batch, placed: of the losses, of the scored targets, and of those met."""
        return sharding.place("sums", torch.zeros(3), self.placed.mesh, (None,))

    def trace(self, batch: Tensors, sums: torch.Tensor) -> None:
        """Build the graph that adds ``batch`` to ``sums``, and run nothing."""
        mesh = self.placed.mesh
        inputs = place_batch(batch, mesh, self.placed.batch_axes)
        with torch.no_grad():
            one = torch.ones((), device=sums.device)
            loss, recorded = self.loss(self.placed.parameters, inputs, one, training=False)
            added = torch.stack([loss.to(torch.float32), scored_tokens(inputs["labels"]), recorded[CORRECT]])
            sums.copy_(sharding.constrain(sums + added, mesh, (None,)))
