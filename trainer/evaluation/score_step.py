"""ScoreStep: how likely each row's targets are, and whether greedy decoding gives them; one graph for each shape."""

from collections.abc import Iterable, Iterator

import torch

from shardwright.models.ops.labels import IGNORE
from shardwright.models.ops.partial_gradients import Tensors
from shardwright.step.compile_guard import CompileGuard
from shardwright.step.placed_model import PlacedModel
from shardwright.xla import sharding
from shardwright.xla.batch import own_rows, place_batch


class ScoreStep:
    """Scores rows; no logit leaves a device. ``guards``: (rows, S) → the guard of that shape's graph."""

    def __init__(self, placed: PlacedModel) -> None:
        self.placed = placed
        self.guards: dict[tuple[int, ...], CompileGuard] = {}

    @property
    def compiles(self) -> int:
        return sum(guard.compiles for guard in self.guards.values())

    def __call__(self, batches: Iterable[Tensors]) -> Iterator[torch.Tensor]:
        """Yields for each batch [rows, 2]: the sum of its targets' log-probabilities, and 1 if all are greedy.

        A batch is read once the next one has been started, so that the devices don't wait for the host.

        Args:
            batches: ``input_ids`` [rows, S], and ``targets`` [rows, S], the token that follows each; -100: not scored.
                A row without a target scores 0 and 1.
        """
        waiting = None
        for batch in batches:
            shape = tuple(batch["input_ids"].shape)
            guard = self.guards.setdefault(shape, CompileGuard(f"scoring step of {shape[0]} × {shape[1]}", expected=1))
            values = guard.run(batch, lambda batch: {"values": self.trace(batch)})["values"]
            if waiting is not None:
                yield waiting.cpu()
            waiting = values
        if waiting is not None:
            yield waiting.cpu()

    def trace(self, batch: Tensors) -> torch.Tensor:
        """Build the graph of what a call yields for ``batch``, and run nothing."""
        mesh = self.placed.mesh
        axes = self.placed.batch_axes
        inputs = place_batch(own_rows(batch, mesh, axes), mesh, axes)
        with torch.no_grad():
            logits = self.placed.loss.logits(self.placed.parameters, {"input_ids": inputs["input_ids"]})
            return sharding.constrain(row_scores(logits, inputs["targets"]), mesh, (None, None))


def row_scores(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """[rows, 2], as :class:`ScoreStep` yields it, of ``logits`` [rows, S, V] and ``targets`` [rows, S].

    The first of several tokens with the highest logit is the greedy one, as argmax has it. It reduces over V alone, as
    `correct_tokens` does.
    """
    logits = logits.to(torch.float32)
    vocabulary = torch.arange(logits.shape[-1], device=logits.device)
    scored = targets != IGNORE
    own = torch.where(vocabulary == targets.unsqueeze(-1), logits, -torch.inf).amax(-1)
    greedy = torch.where(logits == logits.amax(-1, keepdim=True), vocabulary, logits.shape[-1]).amin(-1)
    total = torch.where(scored, own - logits.logsumexp(-1), 0.0).sum(-1)
    hit = torch.where(scored, (greedy == targets).to(torch.float32), 1.0).amin(-1)
    return torch.stack([total, hit], dim=-1)
