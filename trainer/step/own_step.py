"""OwnStep: the train step in the pieces that a loop of one's own calls: forward, backward, clipping, update.

Each piece adds to one lazy graph on the mesh, with the layouts of the job's plan; `settle` runs what has come together.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
import torch_xla
from torch import Tensor

from shardwright.errors import UserError
from shardwright.models.ops import random_bits, scopes
from shardwright.models.ops.labels import IGNORE
from shardwright.models.ops.partial_gradients import Tensors
from shardwright.step.placed_model import PlacedModel
from shardwright.step.train_step import TrainStep
from shardwright.xla import sharding
from shardwright.xla.runtime import program_count

_JUDGED, _MOST = 20, 0.75  # forwards after which compiles are judged, and how many there may be for each


class OwnStep(TrainStep):
    """A train step in pieces.

    ``decays`` has the weight decay of each parameter of the model, by the model's own names; ``recompiled`` is told, as
    numbers of compiles and of forwards, while nearly every forward makes something compile.
    """

    def __init__(
        self, placed: PlacedModel, decays: Mapping[str, float], recompiled: Callable[[int, int], None]
    ) -> None:
        super().__init__(placed)
        decay = max(decays.values(), default=0.0)
        self.optimizer = replace(self.optimizer, weight_decay=decay, decay=_decayed(placed, decays))
        self.gradients: Tensors = {}  # of the backward passes since they were last cleared, by parameter
        self._leaves: Tensors = {}
        self._forwards, self._updates, self._first_program = 0, 0, program_count()
        self._pending, self._recompiled = False, recompiled

    def forward(self, batch: Tensors, *, training: bool) -> tuple[Tensor, Tensor]:
        """The model's loss of ``batch``, tensors [rows, S] on the mesh, and its logits [rows, S, V].

        Without ``labels`` the loss means nothing. Inside ``torch.no_grad`` nothing is kept for a backward pass.
        """
        if not self._leaves:  # else a step is under way, whose values would all be results of a program
            self.settle()
        self._forwards += 1
        compiles = program_count() - self._first_program
        if self._forwards >= _JUDGED and compiles > _MOST * self._forwards:
            self._recompiled(compiles, self._forwards)
        labels = batch.get("labels")
        batch = {**batch, "labels": torch.full_like(batch["input_ids"], IGNORE) if labels is None else labels}
        tokens = self.loss.objective.counts(batch).clamp(min=1)
        words = torch.tensor(random_bits.key_of(f"{self.seed}/{self._forwards}"), dtype=torch.int32)
        key = sharding.place("random key", words, self.mesh, (None,)) if training else None
        seen: list[Tensor] = []

        def keep(logits: Tensor, labels: Tensor) -> Tensors:
            seen.append(logits)
            return {}

        loss, _ = self.loss(self._current(), batch, tokens, training=training, random_key=key, measure=keep)
        self._pending = True
        return loss, seen[-1]

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of ``loss``, laid out as their parameters, to :attr:`gradients`."""
        wanted = {name: leaf for name, leaf in self._leaves.items() if leaf.requires_grad}
        # on this thread, since each has its own scopes
        with torch.autograd.set_multithreading_enabled(False), scopes.scope("gradients"):
            found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
        for name, gradient in zip(wanted, found, strict=True):
            if gradient is not None:
                before = self.gradients.get(name)
                added = self._where_trained(name, gradient) + (0 if before is None else before)
                self.gradients[name] = self._constrain_gradient(name, added)

    def clip_norm(self, limit: float) -> Tensor:
        """Scale :attr:`gradients` as `torch.nn.utils.clip_grad_norm_` does; returns their norm before."""
        squares = [gradient.float().pow(2).sum() for gradient in self.gradients.values()]
        norm = torch.sqrt(torch.stack(squares).sum())
        factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
        self.gradients = {name: gradient * factor for name, gradient in self.gradients.items()}
        return norm

    def clip_value(self, limit: float) -> None:
        """Clamp each number of :attr:`gradients` to ``limit`` either way."""
        self.gradients = {name: gradient.clamp(-limit, limit) for name, gradient in self.gradients.items()}

    def update(self, learning_rate: float) -> None:
        """Update the parameters by :attr:`gradients`, which are dropped, and run it all."""
        self._updates += 1
        scalars = sharding.place("scalars", torch.tensor([learning_rate, float(self._updates)]), self.mesh, (None,))
        rate, step = scalars.unbind()
        with torch.no_grad(), scopes.scope("optimizer"):
            self._update_parameters(self.gradients, torch.zeros_like(rate), torch.ones_like(rate) > 0, (rate, step))
        # before it runs: what is held then is a result of the program
        self._leaves, self.gradients, self._pending = {}, {}, True
        self.settle()

    def settle(self) -> None:
        """Run what the pieces have put together, with all that the loop still holds of it."""
        if self._pending:
            torch_xla.sync()
            self._pending = False

    def _current(self) -> Tensors:
        if not torch.is_grad_enabled():
            return self.parameters
        if not self._leaves:
            learning = {name: self._learns(name) for name in self.parameters}
            self._leaves = {k: p.detach().requires_grad_(learning[k]) for k, p in self.parameters.items()}
        return self._leaves


def _decayed(placed: PlacedModel, decays: Mapping[str, float]) -> frozenset[str]:
    """The stored parameters that decay; UserError if some layers of a stack do and others don't."""
    stored, whole, found = placed.job.stored, placed.job.facts.names_in_whole, set()
    for entry in stored.parameters if decays else ():
        members = {name: decays[whole.get(name, name)] for name in stored.members(entry.name)}
        if len(set(members.values())) > 1:
            raise UserError(
                asked="an optimizer of groups with and without weight_decay",
                found=", ".join(f"{decay} of {name}" for name, decay in list(members.items())[:4]),
                why="these layers are one stack, which is updated at once",
                instead="the same weight_decay for all layers; or no stacks, TrainingArguments(compute='scan=False')",
            )
        if any(members.values()):
            found.add(entry.name)
    return frozenset(found)
