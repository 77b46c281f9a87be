"""Losses of pairs of answers as their papers have them, from the plain model's log-probabilities, an answer a row."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from shardwright.models.ops.labels import IGNORE
from shardwright.prove.batches import Batch


def pair_loss(logits: Tensor, rows: Batch, objective: str, numbers: Mapping[str, float], said: Tensor) -> Tensor:
    """The mean loss of pairs.

    Args:
        logits: of ``rows`` [2 × pairs, S], as :func:`shardwright.prove.batches.apart` makes them: chosen, rejected, …
        said: log-probabilities of the answers by the starting weights [2 × pairs].
    """
    targets, real = rows["input_ids"][:, 1:], rows["attention_mask"][:, 1:] > 0
    logps = logits[:, :-1].log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1)
    scored = (rows["labels"][:, 1:] != IGNORE) & real
    sums, lengths = (logps * scored).sum(1), scored.sum(1)
    loss = _LOSSES[objective](sums, lengths, said, numbers).mean()
    if objective == "orpo":  # and the cross entropy of chosen answers with their prompts
        loss = loss - (logps * real)[0::2].sum() / real[0::2].sum()
    return loss


def _dpo(sums: Tensor, lengths: Tensor, said: Tensor, numbers: Mapping[str, float]) -> Tensor:
    ratios = sums - said
    return -logsigmoid(numbers["beta"] * (ratios[0::2] - ratios[1::2]))


def _ipo(sums: Tensor, lengths: Tensor, said: Tensor, numbers: Mapping[str, float]) -> Tensor:
    ratios = (sums - said) / lengths
    return (ratios[0::2] - ratios[1::2] - 1 / (2 * numbers["beta"])) ** 2


def _simpo(sums: Tensor, lengths: Tensor, said: Tensor, numbers: Mapping[str, float]) -> Tensor:
    means = sums / lengths
    return -logsigmoid(numbers["beta"] * (means[0::2] - means[1::2]) - numbers["simpo_gamma"])


def _orpo(sums: Tensor, lengths: Tensor, said: Tensor, numbers: Mapping[str, float]) -> Tensor:
    means = sums / lengths
    odds = means - torch.log1p(-means.exp())
    return -numbers["beta"] * logsigmoid(odds[0::2] - odds[1::2])


_LOSSES: Mapping[str, Callable[[Tensor, Tensor, Tensor, Mapping[str, float]], Tensor]] = {
    "dpo": _dpo,
    "ipo": _ipo,
    "simpo": _simpo,
    "orpo": _orpo,
}
