"""EvalStep: loss, token accuracy and a user's own metrics over held-out batches, in one graph and one transfer."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shardwright.errors import UserError
from shardwright.models.ops.labels import scored_tokens
from shardwright.models.ops.partial_gradients import Tensors
from shardwright.step.compile_guard import CompileGuard
from shardwright.step.eval_metrics import CORRECT, IDS, LOG_PROBS, OWN, Measures, token_values
from shardwright.step.placed_model import PlacedModel
from shardwright.xla import sharding
from shardwright.xla.batch import place_batch


@dataclass(frozen=True)
class Evaluation:
    """Loss and metrics of held-out rows; NaN if there is nothing to evaluate."""

    # without the auxiliary loss: the mean cross entropy of the scored targets, in nats a token, or the mean of a user's
    # own loss function, or the objective's
    loss: float
    # `accuracy` (the share of scored targets that no other token was given a higher score than) and a user's own
    # metrics, or the values that the objective logs
    means: Mapping[str, float]
    is_entropy: bool = True  # whether the loss is the cross entropy, and so has a perplexity

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else self.loss * math.inf

    def named(self, prefix: str) -> dict[str, float]:
        """Log entries whose names begin with ``prefix``, as transformers names them."""
        perplexity = {"perplexity": self.perplexity} if self.is_entropy else {}
        return {f"{prefix}_{name}": value for name, value in {"loss": self.loss, **perplexity, **self.means}.items()}


class EvalStep:
    """Evaluates batches; no logit leaves a device."""

    def __init__(self, placed: PlacedModel, measures: Measures | None = None) -> None:
        self.loss, self.placed, self.measures = placed.loss, placed, measures or Measures()
        self.guard = CompileGuard("evaluation step", expected=1)
        self.predict_guard = CompileGuard("prediction step", expected=1)

    def __call__(self, batches: Iterable[Tensors]) -> Evaluation:
        """Evaluate ``batches`` (host tensors of [rows, S]) together."""
        return self._evaluated(batches, self.guard, {})

    def predict(self, batches: Iterable[Tensors]) -> tuple[Evaluation, np.ndarray, np.ndarray]:
        """Evaluate ``batches``; also each position's likeliest token and target's log-probability, [all rows, S]."""
        columns: dict[str, list[np.ndarray]] = {IDS: [], LOG_PROBS: []}
        found = self._evaluated(batches, self.predict_guard, columns)
        return found, np.concatenate(columns[IDS]), np.concatenate(columns[LOG_PROBS])

    @property
    def size(self) -> int:
        """The number of sums: losses, scored targets, hits; and for each metric its sum and count."""
        return 3 + 2 * len(self.measures.names)

    def begin(self) -> Tensor:
        return sharding.place("sums", torch.zeros(self.size), self.placed.mesh, (None,))

    def trace(self, batch: Tensors, sums: Tensor, *, values: bool = False) -> Tensors:
        """Build the graph that adds ``batch`` to ``sums``; with ``values``, returns :meth:`predict`'s tensors."""
        mesh = self.placed.mesh
        inputs = place_batch(batch, mesh, self.placed.batch_axes)
        with torch.no_grad():
            added, recorded = self._added(inputs, values)
            sums.copy_(sharding.constrain(sums + added, mesh, (None,)))
            rows = (self.placed.batch_axes or None, None)
            return {name: sharding.constrain(recorded[name], mesh, rows) for name in (IDS, LOG_PROBS) if values}

    def _evaluated(
        self, batches: Iterable[Tensors], guard: CompileGuard, columns: Mapping[str, list[np.ndarray]]
    ) -> Evaluation:
        """Evaluate ``batches`` together; ``columns`` get the values of each, if any are named."""
        sums = self.begin()
        for batch in batches:
            found = guard.run(batch, lambda batch: {"sums": sums, **self.trace(batch, sums, values=bool(columns))})
            for name, column in columns.items():
                column.append(found[name].cpu().numpy())
        return self._read(sums)

    def _added(self, batch: Tensors, values: bool) -> tuple[Tensor, Tensors]:
        """The placed ``batch``'s addition to the sums; all records by name, with each token's ``values``."""

        def measure(logits: Tensor, labels: Tensor) -> Tensors:
            return {**self.measures(logits, labels), **(token_values(logits, labels) if values else {})}

        scored = scored_tokens(batch["labels"])
        # a user's own loss may divide by the number it is given or be a mean by itself: nobody can tell
        share = torch.ones((), device=scored.device) if self.loss.compute is None else scored.clamp(min=1)
        counts, parameters = not values and self.measures.compute is None, self.placed.parameters
        loss, recorded = self.loss(parameters, batch, share, training=False, measure=measure, by_counts=counts)
        total = loss.to(torch.float32) * (1 if self.loss.compute is None else scored)
        counted = torch.stack([total, scored, recorded[CORRECT]])
        return torch.cat([counted, *(recorded[OWN + name] for name in self.measures.names)]), recorded

    def _read(self, sums: Tensor) -> Evaluation:
        total, tokens, correct, *pairs = sums.cpu().tolist()
        both = zip(self.measures.names, pairs[::2], pairs[1::2], strict=True)
        metrics = {name: value / count if count else math.nan for name, value, count in both}
        loss, accuracy = (total / tokens, correct / tokens) if tokens else (math.nan, math.nan)
        return Evaluation(loss, {"accuracy": accuracy, **metrics}, self.loss.compute is None)


class ObjectiveEvalStep(EvalStep):
    """Evaluates batches under an objective with a loss of its own. It makes no predictions of tokens."""

    def __init__(self, placed: PlacedModel) -> None:
        super().__init__(placed)
        self.objective = placed.loss.objective
        self.names = (*self.objective.parts, *self.objective.logged)

    @property
    def size(self) -> int:
        """The number of sums: the counts, the parts of the loss, and the logged values."""
        return len(self.objective.parts) + self.objective.further + len(self.names)

    def _added(self, batch: Tensors, values: bool) -> tuple[Tensor, Tensors]:
        if values:
            raise UserError(
                asked=f"predictions with the objective {self.objective.title}",
                found=f"a loss of its own: {self.objective.learns}",
                why=self.objective.refusals()["predict"],
                instead="an evaluation; or the objective sft",
            )
        counts = self.objective.counts(batch)
        _, recorded = self.loss(self.placed.parameters, batch, torch.ones_like(counts), training=False)
        return torch.cat([counts, torch.stack([recorded[name].to(torch.float32) for name in self.names])]), recorded

    def _read(self, sums: Tensor) -> Evaluation:
        values, size = sums.cpu().tolist(), self.size - len(self.names)
        counts, named = values[:size], dict(zip(self.names, values[size:], strict=True))
        parts = zip(self.objective.parts, counts, strict=False)  # further counts are of logged values
        loss = sum(named[part] / count if count else 0.0 for part, count in parts)
        means = self.objective.means(named, counts)
        return Evaluation(loss if counts[0] else math.nan, means, is_entropy=False)


def prefix_of(name: str, first: str = "eval") -> str:
    """The prefix of the log entries of the held-out set ``name``, as transformers has it."""
    return f"{first}_{name}" if name else first
