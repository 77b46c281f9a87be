"""EvalStep: mean cross entropy over held-out batches, one graph, one transfer."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch_xla.distributed.spmd as xs

# Semi-private, pinned: the loop of torch_xla's `scan` without its autograd.
from trainer.step.compile_guard import CompileGuard
from trainer.step.loss import Loss, Tensors, scored_tokens
from trainer.xla import sharding
from trainer.xla.batch import place_batch
from trainer.xla.runtime import run_now


class EvalStep:
    """Mean cross entropy (nats a token, no auxiliary loss) over held-out batches: one graph, one transfer."""

    def __init__(self, loss: Loss, parameters: Tensors, mesh: xs.Mesh, batch_axes: tuple[str, ...]) -> None:
        self.loss, self.parameters, self.mesh, self.batch_axes = loss, parameters, mesh, batch_axes
        self.guard = CompileGuard("evaluation step", expected=1)

    def __call__(self, batches: Any) -> float:
        """The mean over all scored targets of ``batches`` (host tensors of [rows, S])."""
        sums = sharding.place("sums", torch.zeros(2), self.mesh, (None,))
        for batch in batches:
            self.guard.before(batch)
            placed = place_batch(batch, self.mesh, self.batch_axes)
            with torch.no_grad():
                loss, _ = self.loss(self.parameters, placed, torch.ones((), device=sums.device), training=False)
                added = torch.stack([loss.to(torch.float32), scored_tokens(placed["labels"])])
                sums.copy_(sharding.constrain(sums + added, self.mesh, (None,)))
            run_now([sums])
            self.guard.after()
        total, tokens = sums.cpu().tolist()
        return total / tokens if tokens else math.nan
