"""The loss: the model on one micro-batch, its parameters cast and laid out just before use."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from models import partial_gradients, randomness, side_outputs
from models.attention.interface import masks_without_reads
from models.calls import LoopChanged
from models.experts.routing import DROPPED, LOAD, RouterLosses
from models.local_ops import LocalOps
from models.partial_gradients import Tensors
from trainer.errors import UserError
from trainer.step.preference import REFERENCE
from trainer.step.reduction import PartialGradient

CORRECT = "correct_tokens"


class Objective(Protocol):
    """What stands in the place of the model's own loss of tokens."""

    def __call__(self, logits: torch.Tensor, batch: Tensors, counts: torch.Tensor, /) -> tuple[torch.Tensor, Tensors]:
        """The loss of ``logits`` [rows, S, V] on ``batch``, and what else is logged, by name."""
        ...


class Loss:
    """The model's loss on one micro-batch.

    Args:
        prepare: (name, parameter) → what the forward uses, by name. It is called for the parameters outside the layer
            stack; the stack prepares its own.
        inside: names of the parameters that the layer stack prepares.
        partials: name → partial gradient, for parameters whose gradient is reduced once a step.
        router_loss: add the model's own load-balancing loss (``router_aux_loss_coef``) while training.
        router_losses: what is added besides, to the routers that :func:`models.experts.routing.watch` watches.
        objective: what stands in the place of the mean cross entropy; None: nothing.

    Attributes:
        draws: whether the model has drawn random numbers in training so far.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        prepare: Callable[[str, torch.Tensor], Tensors],
        inside: frozenset[str],
        partials: Mapping[str, PartialGradient],
        router_loss: bool,
        router_losses: RouterLosses = RouterLosses(),  # noqa: B008  (it is frozen)
        objective: Objective | None = None,
    ) -> None:
        self.model, self.prepare, self.inside, self.partials = model, prepare, inside, partials
        self.router_loss, self.router_losses, self.objective = router_loss, router_losses, objective
        self.draws = False
        self._known: set[bool] = set()  # of training and evaluation, those that are known to draw from the key alone

    def __call__(
        self,
        parameters: Tensors,
        batch: Tensors,
        tokens: torch.Tensor,
        *,
        training: bool,
        random_key: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Tensors]:
        """The loss, and by name what else is logged: the router losses, and of the experts what `count` records; and
        what the objective adds.

        In evaluation without one also, as :data:`CORRECT`, how many targets were met.

        Args:
            parameters: name → parameter, and the leaves of the partial gradients that are wanted.
            batch: name → tensor [rows, S].
            tokens: what the sum over scored targets is divided by, a 0-d tensor; or the objective's counts.
            training: whether dropout, capacities and the load-balancing loss apply.
            random_key: what everything random is drawn from; None: nothing may be random.

        Raises:
            UserError: the model draws random numbers in a way that can't be made a function of a key.
        """
        self.model.train(training)
        prepared: Tensors = {}
        for name, parameter in parameters.items():
            prepared |= {name: parameter} if name in self.inside else self.prepare(name, parameter)
        inputs: dict[str, Any] = {name: tensor for name, tensor in batch.items() if name != REFERENCE}
        inputs |= {"num_items_in_batch": tokens, "use_cache": False}
        if hasattr(self.model.config, "output_router_logits"):
            inputs["output_router_logits"] = self.router_loss and training
        packed = "segment_ids" in batch
        if (
            self.router_loss and training and packed
        ):  # the load-balancing loss leaves out what this mask marks as padding
            inputs["attention_mask"] = batch["segment_ids"].clamp(max=1)

        real = _real_tokens(batch, always=self.router_losses.any) if training else None

        measured: Tensors = {}

        def run() -> tuple[Any, dict[str, list[torch.Tensor]]]:
            with (
                self._with_objective(batch, tokens, measured),
                side_outputs.given(real),
                randomness.drawing(random_key) as draws,
                LocalOps(),
                masks_without_reads(batch.get("segment_ids")),
                side_outputs.joined(*([] if packed else ["router_logits"])),
            ):
                found = side_outputs.collect_metrics(
                    lambda: partial_gradients.functional_call(self.model, prepared, kwargs=inputs)
                )
            self.draws |= draws.drawn
            return found

        output, recorded = self._checked(run, training)
        logged = {name: sum(v[1:], v[0]).detach() for name, v in recorded.items() if name.endswith((LOAD, DROPPED))}
        logged |= {name: value.detach() for name, value in measured.items()}
        if not training and self.objective is None:
            logged[CORRECT] = correct_tokens(output.logits, batch["labels"])
        if not (self.router_losses.any and training and real is not None):
            return output.loss, logged
        added = self.router_losses.values(recorded, real)
        loss = output.loss + self.router_losses.z * added["z"] + self.router_losses.balance * added["balance"]
        return loss, logged | {f"router_{name}_loss": value.detach() for name, value in added.items()}

    @contextlib.contextmanager
    def _with_objective(self, batch: Tensors, counts: torch.Tensor, measured: Tensors) -> Iterator[None]:
        """Inside, the model computes the objective where it would compute the loss of tokens; its own router loss it
        adds as ever. What the objective measures goes to ``measured``.

        Raises:
            UserError: the model has a loss that can't be replaced.
        """
        if self.objective is None:
            yield
            return
        objective, calls = self.objective, 0

        def loss(logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            nonlocal calls
            calls += 1
            value, found = objective(logits, batch, counts)
            measured.update(found)
            return value

        # semi-private: the slot of `PreTrainedModel.loss_function`, transformers/modeling_utils.py, transformers 5.23
        before = self.model.__dict__.get("_loss_function")
        self.model.loss_function = loss
        try:
            yield
        finally:
            del self.model._loss_function
            if before is not None:
                self.model.loss_function = before
        if calls != 1:
            raise UserError(
                asked=f"another objective than sft with {type(self.model).__name__}",
                found=f"a forward that calls its loss function {calls} times",
                why="its loss can't be replaced",
                instead="a model such as llama or mixtral, or --objective sft",
            )

    def _checked(self, run: Callable[[], Any], training: bool) -> Any:
        """What ``run`` returns; the first time, with a look whether it drew from anything but the key."""
        watch = None if training in self._known else randomness.OtherDraws()
        try:
            result = run()
            if watch is not None:
                watch.check()
        except randomness.UnknownDraw as error:
            raise UserError(
                asked=f"to {'train' if training else 'evaluate'} {type(self.model).__name__}",
                found=str(error),
                why="it must be the same where the backward computes it again, and in a run that is resumed",
                instead="a config that switches it off (its rate 0), or a model that draws by dropout or `uniform_`",
            ) from error
        except LoopChanged as error:
            raise UserError(
                asked=f"to run the layers of {type(self.model).__name__} in one go where they repeat",
                found=str(error),
                why="tried without data, its decoder did something else",
                instead="--compute scan=False, with which they run one by one",
            ) from error
        self._known.add(training)
        return result


def _real_tokens(batch: Tensors, *, always: bool) -> torch.Tensor | None:
    """1 for a token and 0 for padding, [rows, S]; None if ``batch`` has no padding, unless it is ``always`` wanted."""
    if "segment_ids" in batch:
        return (batch["segment_ids"] > 0).to(torch.float32)
    return torch.ones_like(batch["input_ids"], dtype=torch.float32) if always else None


def scored_tokens(labels: torch.Tensor) -> torch.Tensor:
    """How many targets of ``labels`` [..., S] are scored, as a 0-d float: not the first, and none that is -100."""
    return (labels[..., 1:] != -100).to(torch.float32).sum()


def correct_tokens(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """How many scored targets of ``labels`` [rows, S] have the highest of ``logits`` [rows, S, V]; a 0-d float.

    Reductions over V alone, which a device does for its part of a vocabulary that is cut; an argmax, or a lookup of the
    target's logit, could have it gathered.
    """
    targets = torch.nn.functional.pad(labels[..., 1:], (0, 1), value=-100).unsqueeze(-1)
    vocabulary = torch.arange(logits.shape[-1], device=logits.device)
    own = torch.where(vocabulary == targets, logits, -torch.inf).amax(-1)
    return ((own >= logits.amax(-1)) & (targets.squeeze(-1) != -100)).to(torch.float32).sum()
