"""The loss: the model on one micro-batch, its parameters cast and laid out just before use."""

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from shardwright.errors import UserError, a_type
from shardwright.models.attention.attention_interface import masks_without_reads
from shardwright.models.experts.routing import DROPPED, LOAD, RouterLosses
from shardwright.models.layers import side_outputs
from shardwright.models.layers.embedding_noise import ROW_KEYS, noisy_embeddings
from shardwright.models.layers.layer_inputs import LoopChanged
from shardwright.models.layers.mtp_loss import predicting
from shardwright.models.ops import partial_gradients, randomness
from shardwright.models.ops.labels import IGNORE, targets, token_logps
from shardwright.models.ops.partial_gradients import Tensors
from shardwright.models.ops.token_loss import TokenTerms, token_loss, z_losses
from shardwright.models.ops.torch_overrides import LocalOps
from shardwright.objectives.objective import Objective
from shardwright.step.gradient_reduction import PartialGradient
from shardwright.step.split_rows import RowPieces

CORRECT = "correct_tokens"
MTP_LOSS, Z_LOSS = "mtp_loss", "z_loss"
# (the model's outputs, labels [rows, S], num_items_in_batch=scored targets) → a 0-d loss: transformers'
# `compute_loss_func`, called as it calls it
LossFunction = Callable[..., Tensor]


class _HeadInUse(Exception):
    """The model uses its head's output for more than the loss."""


@dataclass(eq=False)
class Loss:
    """The model's loss on one micro-batch."""

    model: PreTrainedModel
    prepare: Callable[[Tensors], Tensors]  # parameters → tensors for the forward, by name, outside the layer stack
    inside: frozenset[str]  # names of the parameters that the layer stack prepares by itself
    partials: Mapping[str, PartialGradient]  # by name, for parameters whose gradient is reduced once a step
    router_loss: bool  # add the model's own load-balancing loss (`router_aux_loss_coef`) while training
    objective: Objective  # a loss of its own replaces the mean cross entropy
    router_losses: RouterLosses  # further losses of the routers that `models.experts.routing.watch` watches
    compute: LossFunction | None  # the caller's own loss, in place of the model's; traced too
    mtp_weight: float | None  # of the loss of its MTP layers while training; None: it has none
    pieces: RowPieces | None  # how the tokens of a row lie on the devices that share it; None: they have whole rows
    noise: float = 0.0  # NEFTune's alpha, for batches with `embedding_noise.ROW_KEYS`

    def __post_init__(self) -> None:
        terms = self.objective.token_terms
        self.terms = TokenTerms(*terms) if any(terms) else None  # of the loss of tokens, while training
        self._in_chunks = False  # whether the loss of tokens is that of `models.ops.head_loss` right now
        self.draws = False  # whether the model has drawn random numbers in training so far
        self._plain_head = True  # False once the model is seen to use the logits for more than the loss
        self._known: set[bool] = set()  # modes (training or not) that draw from the key alone

    @property
    def logged(self) -> tuple[str, ...]:
        """Names of the values that are logged beside the loss: the objective's, the MTP layers' loss, the z-loss."""
        return self.logged_with(self.terms.z if self.terms else 0.0)

    def logged_with(self, z_loss: float) -> tuple[str, ...]:
        """:attr:`logged` of a run with another coefficient of the z-loss, which may change where a run goes on."""
        further = (MTP_LOSS, self.mtp_weight is not None), (Z_LOSS, z_loss)
        return self.objective.logged + tuple(name for name, has in further if has)

    def __call__(
        self,
        parameters: Tensors,
        batch: Tensors,
        tokens: Tensor,
        *,
        training: bool,
        random_key: Tensor | None = None,
        measure: Callable[[Tensor, Tensor], Tensors] | None = None,
        by_counts: bool = False,
    ) -> tuple[Tensor, Tensors]:
        """The loss of tensors [rows, S], and logged values: router and MTP losses, experts' load, the objective's.

        Args:
            parameters: the leaves of the partial gradients that are wanted, too.
            tokens: the objective's counts, by which the parts of the loss are divided.
            random_key: the source of all random numbers; None: nothing may be random.
            measure: (logits, labels) → further values to log, by name.
            by_counts: ``measure`` is wanted for :data:`CORRECT` alone, which needs no logits.

        Raises UserError if the model draws random numbers in a way that can't be made a function of a key, or the
        caller's loss returns no 0-d float tensor.
        """
        terms, keys = self.terms if training else None, batch.get(ROW_KEYS)
        inputs, real = self._inputs(batch, tokens, training=training)
        measured, counted, further = dict[str, Tensor](), dict[str, Tensor](), list[Tensor]()

        def forward() -> tuple[Any, dict[str, list[Tensor]]]:
            order = None if self.pieces is None else self.pieces.targets
            mtp: contextlib.AbstractContextManager[list[Tensor]] = contextlib.nullcontext([])
            if training and self.mtp_weight is not None:
                mtp = predicting(self.model, batch, tokens, order, self._cross_entropy)
            noise = contextlib.nullcontext() if keys is None else self._noisy(keys, batch["input_ids"])
            with self._with_objective(batch, tokens, measured, terms), mtp as losses, noise:
                found = self._forward(parameters, inputs, real, random_key, training=training)
            further[:] = losses
            return found

        without_logits = by_counts or measure is None
        output, recorded = self._without_logits(forward, terms, counted, measured) if without_logits else forward()
        logged = {name: sum(v[1:], v[0]).detach() for name, v in recorded.items() if name.endswith((LOAD, DROPPED))}
        logged |= {name: value.detach() for name, value in measured.items()}
        if self.pieces is not None and not counted and (measure is not None or self.compute is not None):
            output.logits = self.pieces.restored(output.logits, batch["input_ids"].shape[1])
        if measure is not None:
            logged |= counted or measure(output.logits, batch["labels"])
        loss = output.loss if self.compute is None else self._own(output, batch["labels"], tokens)
        if further and self.mtp_weight is not None:
            mtp_loss = torch.stack(further).mean()
            loss, logged[MTP_LOSS] = loss + self.mtp_weight * mtp_loss, mtp_loss.detach()
        if not (self.router_losses.any and training and real is not None):
            return loss, logged
        added = self.router_losses.values(recorded, real)
        loss = loss + self.router_losses.z * added["z"] + self.router_losses.balance * added["balance"]
        return loss, logged | {f"router_{name}_loss": value.detach() for name, value in added.items()}

    def _inputs(self, batch: Tensors, tokens: Tensor, *, training: bool) -> tuple[dict[str, Any], Tensor | None]:
        """The model's arguments for ``batch``, and [rows, S] of 1 for a token and 0 for padding.

        The latter is for training, where there is padding or a router's loss that asks; else None.
        """
        batch = {name: tensor for name, tensor in batch.items() if name not in (ROW_KEYS, *self.objective.columns)}
        if self.pieces is not None:
            labels = batch.pop("labels")
            batch = self.pieces.inputs(batch, labels.shape[1])
            batch["labels"] = self.pieces.targets(targets(labels), IGNORE)
        inputs: dict[str, Any] = {**batch, "num_items_in_batch": tokens}
        if self.compute is not None:
            del inputs["labels"]
        if hasattr(self.model.config, "output_router_logits"):
            inputs["output_router_logits"] = self.router_loss and training
        packed = "segment_ids" in batch
        if self.router_loss and training and packed:  # the load-balancing loss leaves out padding by this mask
            inputs["attention_mask"] = self.objective.balanced(batch)
        if training and packed:
            return inputs, (batch["segment_ids"] > 0).to(torch.float32)
        if training and self.router_losses.any:
            return inputs, torch.ones_like(batch["input_ids"], dtype=torch.float32)
        return inputs, None

    def logits(self, parameters: Tensors, inputs: Mapping[str, Any]) -> Tensor:
        """The logits [rows, S, V] in evaluation of inputs such as ``input_ids`` [rows, S]; raises as a call."""
        pieces, length = self.pieces, inputs["input_ids"].shape[1]
        given = dict(inputs) if pieces is None else pieces.inputs(inputs, length)
        logits = self._forward(parameters, given, None, None, training=False)[0].logits
        return logits if pieces is None else pieces.restored(logits, length)

    def _forward(
        self,
        parameters: Tensors,
        inputs: dict[str, Any],
        real: Tensor | None,
        random_key: Tensor | None,
        *,
        training: bool,
    ) -> tuple[Any, dict[str, list[Tensor]]]:
        """The model's output, and by name what its modules recorded; the first time, checked to draw from the key."""
        self.model.train(training)
        inside = {name: parameter for name, parameter in parameters.items() if name in self.inside}
        prepared = inside | self.prepare({name: t for name, t in parameters.items() if name not in inside})
        segment_ids = inputs.get("segment_ids")
        inputs = {"use_cache": False, **inputs}
        watch = None if training in self._known else randomness.OtherDraws()
        try:
            with (
                side_outputs.given(real),
                randomness.drawing(random_key) as draws,
                LocalOps(),
                masks_without_reads(segment_ids),
                side_outputs.joined(*(["router_logits"] if segment_ids is None else [])),
            ):
                found = side_outputs.collect_metrics(
                    lambda: partial_gradients.functional_call(self.model, prepared, kwargs=inputs)
                )
            self.draws |= draws.drawn
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
        return found

    def _cross_entropy(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """The summed cross entropy of the head on ``hidden`` [rows, S, H], as the next token's is computed."""
        head: Any = self.model.get_output_embeddings()
        if self._in_chunks and self.pieces is not None:
            return self.pieces.head_loss(hidden, head.weight, labels, IGNORE, TokenTerms())[0]
        return -token_logps(head(hidden), labels).sum()

    def _own(self, output: Any, labels: Tensor, tokens: Tensor) -> Tensor:
        assert self.compute is not None
        loss = self.compute(output, labels, num_items_in_batch=tokens)
        if not isinstance(loss, Tensor) or loss.dim() or not loss.is_floating_point():
            shape = f" of shape {list(loss.shape)} and {loss.dtype}" if isinstance(loss, Tensor) else ""
            raise UserError(
                asked="compute_loss_func(outputs, labels, num_items_in_batch)",
                found=f"it returned {a_type(loss)}{shape}",
                why="it is traced into the step, whose gradients are of one number",
                instead="a tensor of no dimension, such as "
                "cross_entropy(logits, targets, reduction='sum') / num_items_in_batch",
            )
        return loss

    def _noisy(self, keys: Tensor, tokens: Tensor) -> contextlib.AbstractContextManager[None]:
        length = tokens.shape[1]
        places = torch.arange(length, device=tokens.device).expand(tokens.shape)
        places = places[:1] if self.pieces is None else self.pieces.places(places)
        return noisy_embeddings(self.model, self.noise, keys, places, length)

    @contextlib.contextmanager
    def _with_objective(
        self, batch: Tensors, counts: Tensor, measured: Tensors, terms: TokenTerms | None
    ) -> Iterator[None]:
        """Inside, the model computes the objective in place of the loss of tokens, and adds its router loss as ever.

        With rows in pieces the loss of tokens is replaced too: its labels are targets. Likewise with further ``terms``.
        The objective's values, and those of terms, go to ``measured``. Raises UserError if the model has a loss that
        can't be replaced.
        """
        objective, pieces, calls = self.objective, self.pieces, 0
        if self.compute is not None or not (objective.parts or pieces or terms):
            yield
            return
        own = self.model.loss_function

        def loss(logits: Tensor, labels: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            nonlocal calls
            calls += 1
            if not objective.parts:
                if terms is None or self._in_chunks:
                    return own(logits, labels, *args, **{**kwargs, "shift_labels": labels})
                found_loss, z_loss = token_loss(logits, targets(labels) if pieces is None else labels, counts, terms)
                measured.update({Z_LOSS: z_loss} if terms.z else {})
                return found_loss
            whole = logits if pieces is None else pieces.restored(logits, batch["labels"].shape[1])
            found = objective.loss(whole, batch, counts)
            measured.update(found)
            return functools.reduce(operator.add, (found[part] for part in objective.parts))

        with _loss_function(self.model, loss):
            yield
        if calls != 1:
            what, other = "split rows", "whole rows"
            if objective.parts:
                what, other = f"the loss of {objective.title}", "--objective sft"
            elif terms:
                what, other = "label smoothing or a z-loss", "no --label_smoothing_factor and no --z_loss"
            raise UserError(
                asked=f"{what} with {type(self.model).__name__}",
                found=f"a forward that calls its loss function {calls} times",
                why="its loss can't be replaced",
                instead=f"a model such as llama or mixtral, or {other}",
            )

    def _without_logits(
        self, forward: Callable[[], Any], terms: TokenTerms | None, counted: Tensors, measured: Tensors
    ) -> Any:
        """Run ``forward``; where rows are in pieces, compute the loss of tokens, with ``terms``, without whole logits.

        It can do so only if the model makes nothing but the loss of its logits, which the first trace tells. Then
        ``counted`` gets the number of scored targets with the highest logit, and ``measured`` the value of a term.
        """
        head = self.model.get_output_embeddings()
        plain = type(head) is torch.nn.Linear and head.bias is None and "forward" not in vars(head)
        if not plain or self.pieces is None or not self._plain_head or self.compute or self.objective.parts:
            return forward()
        assert isinstance(head, torch.nn.Linear)  # checked just above; for mypy
        own, pieces, given = self.model.loss_function, self.pieces, list[Tensor]()

        def keep(hidden: Tensor) -> Tensor:
            given.append(hidden)
            return hidden

        # semi-private: the arguments of the loss, transformers/loss/loss_utils.py, transformers 5.23
        def loss(logits: Tensor, labels: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            tokens = kwargs.get("num_items_in_batch")
            if own is not ForCausalLMLoss or tokens is None or len(given) != 1 or logits is not given[0]:
                raise _HeadInUse
            total, hits, logsumexps = pieces.head_loss(logits, head.weight, labels, IGNORE, terms or TokenTerms())
            counted[CORRECT] = hits
            if terms and terms.z:
                measured[Z_LOSS] = z_losses(logsumexps, labels).sum() / tokens
            return total / tokens

        vars(head)["forward"], self._in_chunks = keep, True
        try:
            with _loss_function(self.model, loss):
                return forward()
        except _HeadInUse:
            self._plain_head = False
        finally:
            del vars(head)["forward"]
            self._in_chunks = False
        return forward()


@contextlib.contextmanager
def _loss_function(model: PreTrainedModel, loss: Callable[..., Tensor]) -> Iterator[None]:
    # semi-private: the slot of `PreTrainedModel.loss_function`, transformers/modeling_utils.py, transformers 5.23
    before = model.__dict__.get("_loss_function")
    model.loss_function = loss
    try:
        yield
    finally:
        del model._loss_function
        if before is not None:
            model.loss_function = before
