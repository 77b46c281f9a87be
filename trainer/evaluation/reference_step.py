"""ReferenceStep: the starting weights' values of rows, in one graph."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import torch

from shardwright.models.adapters.lora import B
from shardwright.models.ops.partial_gradients import Tensors
from shardwright.objectives.objective import Objective
from shardwright.step.compile_guard import CompileGuard
from shardwright.step.placed_model import PlacedModel
from shardwright.xla import sharding
from shardwright.xla.batch import batch_spec, place_batch

REFERENCE_PASS = "reference pass"


class _Referring(Objective):
    """An objective without a loss, which records the reference values of ``objective``."""

    title, parts = "the reference pass", ("nothing",)

    def __init__(self, objective: Objective) -> None:
        super().__init__({}, objective.length)
        self.objective = objective

    def loss(self, logits: torch.Tensor, batch: Mapping[str, torch.Tensor], counts: torch.Tensor) -> Tensors:
        """Zero, and the values by the name of their column; ``counts`` is not read."""
        values = self.objective.refer(logits, batch)
        return {"nothing": values.sum() * 0, str(self.objective.reference): values}


class ReferenceStep:
    """Computes the reference column with the current weights, an adapter's left out."""

    def __init__(self, placed: PlacedModel) -> None:
        self.placed, self.loss = placed, copy.copy(placed.loss)
        self.column = str(placed.loss.objective.reference)
        self.loss.objective = _Referring(placed.loss.objective)
        self.guard = CompileGuard(REFERENCE_PASS, expected=1)

    def __call__(self, batches: Iterable[Tensors]) -> Iterator[np.ndarray]:
        """Yields each batch's column values, float32 [rows, ...]; ``batches`` are host tensors of [rows, S]."""
        for batch in batches:
            found = self.guard.run(batch, lambda batch: {"values": self.trace(batch)})
            yield sharding.fetch(found["values"]).numpy()

    def trace(self, batch: Tensors) -> torch.Tensor:
        mesh, specs = self.placed.mesh, self.placed.specs
        inputs = place_batch(batch, mesh, self.placed.batch_axes)
        with torch.no_grad():
            parameters = {
                name: sharding.constrain(torch.zeros_like(p), mesh, specs[name]) if name.endswith(B) else p
                for name, p in self.placed.parameters.items()
            }
            one = torch.ones((), device=inputs["labels"].device)
            _, recorded = self.loss(parameters, inputs, one, training=False)
            values = recorded[self.column]
            return sharding.constrain(values, mesh, batch_spec(values.dim(), self.placed.batch_axes))
