"""The loss: the model on one micro-batch, its parameters cast and laid out just before use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from models import partial_gradients, randomness, side_outputs
from models.attention.interface import masks_without_reads
from models.calls import LoopChanged
from models.local_ops import LocalOps
from models.partial_gradients import Tensors
from trainer.errors import UserError
from trainer.step.reduction import PartialGradient


class Loss:
    """The model's loss on one micro-batch.

    Args:
        prepare: (name, parameter) → what the forward uses, by name. It is called for the parameters outside the layer
            stack; the stack prepares its own.
        inside: names of the parameters that the layer stack prepares.
        partials: name → partial gradient, for parameters whose gradient is reduced once a step.
        router_loss: add the model's own load-balancing loss (``router_aux_loss_coef``) while training.

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
    ) -> None:
        self.model, self.prepare, self.inside, self.partials = model, prepare, inside, partials
        self.router_loss = router_loss
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
        """The loss, and the mean of each metric that layers record.

        Args:
            parameters: name → parameter, and the leaves of the partial gradients that are wanted.
            batch: name → tensor [rows, S].
            tokens: what the sum over scored targets is divided by; a 0-d tensor.
            training: whether dropout, capacities and the load-balancing loss apply.
            random_key: what everything random is drawn from; None: nothing may be random.

        Raises:
            UserError: the model draws random numbers in a way that can't be made a function of a key.
        """
        self.model.train(training)
        prepared: Tensors = {}
        for name, parameter in parameters.items():
            prepared |= {name: parameter} if name in self.inside else self.prepare(name, parameter)
        inputs: dict[str, Any] = {**batch, "num_items_in_batch": tokens, "use_cache": False}
        if hasattr(self.model.config, "output_router_logits"):
            inputs["output_router_logits"] = self.router_loss and training
        packed = "segment_ids" in batch
        if (
            self.router_loss and training and packed
        ):  # the load-balancing loss leaves out what this mask marks as padding
            inputs["attention_mask"] = batch["segment_ids"].clamp(max=1)

        def run() -> tuple[Any, dict[str, list[torch.Tensor]]]:
            with (
                randomness.drawing(random_key) as draws,
                LocalOps(),
                masks_without_reads(),
                side_outputs.joined(*([] if packed else ["router_logits"])),
            ):
                found = side_outputs.collect_metrics(
                    lambda: partial_gradients.functional_call(self.model, prepared, kwargs=inputs)
                )
            self.draws |= draws.drawn
            return found

        output, recorded = self._checked(run, training)
        return output.loss, {name: torch.cat(values).mean() for name, values in recorded.items()}

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


def scored_tokens(labels: torch.Tensor) -> torch.Tensor:
    """How many targets of ``labels`` [..., S] are scored, as a 0-d float: not the first, and none that is -100."""
    return (labels[..., 1:] != -100).to(torch.float32).sum()
