"""ReferenceStep: what the starting weights say of each segment of packed rows, in one graph."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator

import numpy as np
import torch

from shardwright.models.adapters.lora import B
from shardwright.models.ops.partial_gradients import Tensors
from shardwright.step.compile_guard import CompileGuard
from shardwright.step.loss import Loss
from shardwright.step.objectives.preference import SEGMENTS, SegmentLogps
from shardwright.weights.placed_parameters import Placed
from shardwright.xla import sharding
from shardwright.xla.batch import batch_spec, place_batch

REFERENCE_PASS = "reference pass"


class ReferenceStep:
    """Log-probabilities of segments by the weights as they are, an adapter's left out.

    Args:
        pairs: in a row at most.
    """

    def __init__(self, loss: Loss, placed: Placed, pairs: int) -> None:
        self.loss, self.placed = copy.copy(loss), placed
        self.loss.objective = SegmentLogps(pairs)
        self.guard = CompileGuard(REFERENCE_PASS, expected=1)

    def __call__(self, batches: Iterable[Tensors]) -> Iterator[np.ndarray]:
        """Of each of ``batches`` (host tensors of [rows, S]) the log-probabilities, float32 [rows, 2 x pairs]."""
        for batch in batches:
            found = self.guard.run(batch, lambda batch: {"logps": self.trace(batch)})
            yield sharding.fetch(found["logps"]).numpy()

    def trace(self, batch: Tensors) -> torch.Tensor:
        """Build the graph of ``batch``, and run nothing."""
        mesh, specs = self.placed.mesh, self.placed.specs
        inputs = place_batch(batch, mesh, self.placed.batch_axes)
        with torch.no_grad():
            parameters = {
                name: sharding.constrain(torch.zeros_like(p), mesh, specs[name]) if name.endswith(B) else p
                for name, p in self.placed.parameters.items()
            }
            one = torch.ones((), device=inputs["labels"].device)
            _, recorded = self.loss(parameters, inputs, one, training=False)
            return sharding.constrain(recorded[SEGMENTS], mesh, batch_spec(2, self.placed.batch_axes))
