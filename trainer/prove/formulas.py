"""Losses as their papers have them, from the plain model's outputs, a text a row.

Shape legend: N rows, S tokens in a row, V vocabulary.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from shardwright.models.ops.labels import IGNORE
from shardwright.objectives.objective import MISMATCHED, Objective
from shardwright.prove.batches import Batch, bucketed


@dataclass(frozen=True)
class Said:
    """The plain model's output for rows of :func:`shardwright.prove.batches.apart`.

    Attributes:
        logits: [N, S, V], or a reward model's score of each text [N, 1].
        tokens: the divisor of a sum over scored targets; None: the number of them.
    """

    logits: Tensor
    rows: Batch
    goal: Objective
    tokens: Tensor | None = None

    @property
    def scored(self) -> Tensor:
        """Whether the token behind each position is scored. [N, S - 1]"""
        return self.rows["labels"][:, 1:] != IGNORE

    @property
    def logps(self) -> Tensor:
        """The log-probability of the token behind each position. [N, S - 1]"""
        targets = self.rows["input_ids"][:, 1:]
        return self.logits[:, :-1].log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1)

    @property
    def sums(self) -> Tensor:
        """The log-probability of each row's scored tokens. [N]"""
        return (self.logps * self.scored).sum(1)

    @property
    def gains(self) -> Tensor:
        """:attr:`sums` beyond what the starting weights said. [N]"""
        return self.sums - self.rows[str(self.goal.reference)]

    def mean(self, values: Tensor) -> Tensor:
        """The mean of values [N, S - 1] over scored targets."""
        return values[self.scored].sum() / (self.scored.sum() if self.tokens is None else self.tokens)


def mismatched(rows: Batch, goal: Objective) -> Tensor:
    """Whether a row is a prompt with another record's answer, on which no router's loss is. [N]"""
    places = (rows["segment"] - 1) % max(1, len(goal.segments))
    return places == goal.segments.index(MISMATCHED) if MISMATCHED in goal.segments else places < 0


def _sft(of: Said) -> Tensor:
    """Cross entropy with the terms that transformers' models do not have; smoothed as transformers' Trainer does."""
    smoothing, z = of.goal.token_terms
    logits = of.logits[:, :-1]
    even = -logits.log_softmax(-1).mean(-1)
    return of.mean(-(1 - smoothing) * of.logps + smoothing * even + z * logits.logsumexp(-1).square())


def _distill(of: Said) -> Tensor:
    numbers, top = of.goal.numbers, int(of.goal.numbers["teacher_top_k"])
    ids, theirs = of.rows[str(of.goal.teacher)].split((top, top + 1), -1)
    p = theirs.to(of.logits.dtype).exp()
    q = bucketed((of.logits / numbers["temperature"]).log_softmax(-1), ids.long()).exp()
    beta = numbers["beta"]
    mixed = beta * p + (1 - beta) * q
    if beta == 0:
        found = p * (p / q).log()
    elif beta == 1:
        found = q * (q / p).log()
    else:
        found = beta * p * (p / mixed).log() + (1 - beta) * q * (q / mixed).log()
    return of.mean(found.sum(-1)[:, :-1])


def _reward(of: Said) -> Tensor:
    chosen, rejected = of.logits[0::2, 0], of.logits[1::2, 0]
    centred = of.goal.numbers["center_rewards_coefficient"] * (chosen + rejected) ** 2
    return (centred - logsigmoid(chosen - rejected)).mean()


def _kto(of: Said) -> Tensor:
    numbers, gains = of.goal.numbers, of.gains
    places, apart = (of.rows["segment"] - 1) % len(of.goal.segments), mismatched(of.rows, of.goal)
    kl = gains[apart].detach().mean().clamp(min=0) if apart.any() else 0.0
    good = 1 - torch.sigmoid(numbers["beta"] * (gains[places == 0] - kl))
    bad = 1 - torch.sigmoid(numbers["beta"] * (kl - gains[places == 1]))
    return torch.cat([numbers["desirable_weight"] * good, numbers["undesirable_weight"] * bad]).mean()


def _dpo(of: Said) -> Tensor:
    return -logsigmoid(of.goal.numbers["beta"] * (of.gains[0::2] - of.gains[1::2])).mean()


def _ipo(of: Said) -> Tensor:
    ratios = of.gains / of.scored.sum(1)
    return ((ratios[0::2] - ratios[1::2] - 1 / (2 * of.goal.numbers["beta"])) ** 2).mean()


def _simpo(of: Said) -> Tensor:
    numbers, means = of.goal.numbers, of.sums / of.scored.sum(1)
    return -logsigmoid(numbers["beta"] * (means[0::2] - means[1::2]) - numbers["simpo_gamma"]).mean()


def _orpo(of: Said) -> Tensor:
    """With the cross entropy of chosen answers and their prompts."""
    means = of.sums / of.scored.sum(1)
    odds = means - torch.log1p(-means.exp())
    real = of.rows["attention_mask"][0::2, 1:] > 0
    return -(of.goal.numbers["beta"] * logsigmoid(odds[0::2] - odds[1::2])).mean() - of.logps[0::2][real].mean()


FORMULAS: Mapping[str, Callable[[Said], Tensor]] = {  # --objective → its loss
    "sft": _sft,
    "distill": _distill,
    "reward": _reward,
    "kto": _kto,
    "dpo": _dpo,
    "ipo": _ipo,
    "simpo": _simpo,
    "orpo": _orpo,
}
