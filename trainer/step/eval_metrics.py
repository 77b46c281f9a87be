"""Metrics of an evaluation beside the loss: token accuracy, and those of a user's own function.

Each is a sum over a device's part that adds up over devices and batches; no logit leaves a device.

Shape legend: B rows, S tokens a row, V tokens that the model knows.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwright.errors import UserError, a_type, in_short
from shardwright.models.ops.labels import IGNORE, targets
from shardwright.models.ops.partial_gradients import Tensors
from shardwright.step.loss import CORRECT

IDS, LOG_PROBS = "ids", "log_probs"
OWN = "metric "  # begins a user's metric among the values of a graph, whatever its name


class Predictions(NamedTuple):
    """A model's logits of one batch and their targets, on the devices.

    Args:
        logits: [B, S, V]. Those at position t are of the token at t + 1.
        labels: int64 [B, S]: the token that the logits at the same position are scored against, already shifted; -100
            where nothing is scored.
        mask: bool [B, S]: where something is scored.
    """

    logits: Tensor
    labels: Tensor
    mask: Tensor


TAKEN = ("loss", "perplexity")  # no metric of one's own has these names; one called accuracy replaces that of tokens

# name → (sum, count), two 0-d tensors; the metric is the sum of all sums over the sum of all counts
ComputeMetrics = Callable[[Predictions], Mapping[str, tuple[Tensor, Tensor | int]]]


@dataclass(frozen=True)
class Measures:
    """Logits and labels of a batch → sums by name: token accuracy, and the ``names`` of a user's own function."""

    compute: ComputeMetrics | None = None
    names: tuple[str, ...] = ()

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensors:
        """Each measure's sum and count, [2]; of :data:`CORRECT` the sum alone, 0-d."""
        predictions = predictions_of(logits, labels)
        found = {CORRECT: correct_tokens(predictions)}
        if self.compute is not None:
            pairs = self.compute(predictions)
            for name in self.names:
                both = [torch.as_tensor(n, device=logits.device).to(torch.float32) for n in pairs[name]]
                found[OWN + name] = torch.stack(both)
        return found


def predictions_of(logits: Tensor, labels: Tensor) -> Predictions:
    targets_BS = targets(labels)
    return Predictions(logits, targets_BS, targets_BS != IGNORE)


def correct_tokens(predictions: Predictions) -> Tensor:
    """The number of scored targets that have the highest logit; a 0-d float.

    It reduces over V alone, which each device does for its part of a split vocabulary; an argmax, or a lookup of the
    target's logit, could have the vocabulary gathered.
    """
    logits_BSV = predictions.logits
    own_BS = torch.where(_is_target(predictions), logits_BSV, -torch.inf).amax(-1)
    return ((own_BS >= logits_BSV.amax(-1)) & predictions.mask).to(torch.float32).sum()


def token_values(logits: Tensor, labels: Tensor) -> Tensors:
    """For each position [B, S] the likeliest token, int32, and its target's log-probability, 0 where there is none."""
    predictions = predictions_of(logits, labels)
    logits_BSV = logits.to(torch.float32)
    vocabulary = torch.arange(logits.shape[-1], device=logits.device, dtype=torch.int32)
    highest = logits_BSV >= logits_BSV.amax(-1, keepdim=True)
    ids = torch.where(highest, vocabulary, logits.shape[-1]).amin(-1)
    own = torch.where(_is_target(predictions), logits_BSV, 0.0).sum(-1)
    log_probs = torch.where(predictions.mask, own - torch.logsumexp(logits_BSV, -1), 0.0)
    return {IDS: ids.to(torch.int32), LOG_PROBS: log_probs}


def _is_target(predictions: Predictions) -> Tensor:
    vocabulary = torch.arange(predictions.logits.shape[-1], device=predictions.logits.device)
    return vocabulary == predictions.labels.unsqueeze(-1)


def metric_names(compute: ComputeMetrics | None, rows: int, length: int, vocabulary: int) -> tuple[str, ...]:
    """The names of the metrics of ``compute``, found by a call with meta tensors; UserError if it can't be traced."""
    if compute is None:
        return ()
    labels = torch.full((rows, length), IGNORE, device="meta")
    try:
        pairs: Any = compute(predictions_of(torch.empty(rows, length, vocabulary, device="meta"), labels))
    except Exception as error:  # of many types: it is anybody's function
        raise _refused(f"tried on tensors without values, it raised {in_short(error)}") from error
    if not isinstance(pairs, Mapping) or not pairs:
        raise _refused(f"it returned {pairs!r:.200}, {a_type(pairs)}")
    for name, pair in pairs.items():
        if not isinstance(name, str) or not name:
            raise _refused(f"the name {name!r:.80}, {a_type(name)}")
        if name in TAKEN:
            raise _taken(name)
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise _refused(f"{name!r} is {a_type(pair)}", pair)
        for what, value in zip(("sum", "count"), pair, strict=True):
            if not (isinstance(value, int | float) or (isinstance(value, Tensor) and value.dim() == 0)):
                raise _refused(f"the {what} of {name!r} is {a_type(value)}", value)
    return tuple(pairs)


def _taken(name: str) -> UserError:
    return UserError(
        asked="compute_metrics",
        found=f"a metric with the name {name!r}",
        why=f"eval_{name} is the evaluation's own: it would be replaced, and with it what `best` means",
        instead=f'another name, such as "own_{name}"; compute_loss_func is for a loss of your own',
    )


def _refused(found: str, value: Any = None) -> UserError:
    shape = f" of shape {list(value.shape)}" if isinstance(value, Tensor) else ""
    return UserError(
        asked="compute_metrics",
        found=found + shape,
        why="it is traced into the evaluation's graph, which adds sums up over devices and batches; no logit leaves a "
        "device, so there are no values to look at, and no shape may depend on one",
        instead='a function of (logits, labels, mask) that returns {"name": (sum, count)}, such as '
        '{"top5": (hit.sum(), mask.sum())}: two tensors of no dimension; the metric is sum / count',
    )
