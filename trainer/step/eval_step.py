"""EvalStep: the mean loss over held-out batches, in one graph and one transfer to the host."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from models.partial_gradients import Tensors
from trainer.step.compile_guard import CompileGuard
from trainer.step.loss import Loss, scored_tokens
from trainer.step.placed import Placed
from trainer.xla import sharding
from trainer.xla.batch import place_batch
from trainer.xla.runtime import run_now


class EvalStep:
    """Mean cross entropy over batches, in nats a token, without the auxiliary loss."""

    def __init__(self, loss: Loss, placed: Placed) -> None:
        self.loss, self.placed = loss, placed
        self.guard = CompileGuard("evaluation step", expected=1)

    def __call__(self, batches: Iterable[Tensors]) -> float:
        """The mean over all scored targets of ``batches`` (host tensors of [rows, S]); NaN if there is none."""
        sums = self.begin()
        for batch in batches:
            self.guard.before(batch)
            self.trace(batch, sums)
            run_now([sums])
            self.guard.after()
        total, tokens = sums.cpu().tolist()
        return total / tokens if tokens else math.nan

    def begin(self) -> torch.Tensor:
        """The sums before the first batch, placed: of the losses, and of the scored targets."""
        return sharding.place("sums", torch.zeros(2), self.placed.mesh, (None,))

    def trace(self, batch: Tensors, sums: torch.Tensor) -> None:
        """Build the graph that adds ``batch`` to ``sums``, and run nothing."""
        mesh = self.placed.mesh
        inputs = place_batch(batch, mesh, self.placed.batch_axes)
        with torch.no_grad():
            one = torch.ones((), device=sums.device)
            loss, _ = self.loss(self.placed.parameters, inputs, one, training=False)
            added = torch.stack([loss.to(torch.float32), scored_tokens(inputs["labels"])])
            sums.copy_(sharding.constrain(sums + added, mesh, (None,)))
