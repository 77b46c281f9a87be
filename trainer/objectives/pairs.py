"""PairObjective: the preferred one of two answers, learned from log-probabilities of segments of packed rows.

A row's pairs are numbered as its segments are: the chosen answer of pair k, behind its prompt, is segment 2k - 1, and
the rejected one 2k; so in a row's values [..., 2P] the even places are the chosen answers'.

Shape legend: B rows, S tokens in a row, V vocabulary, P pairs in a row at most.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from shardwright.objectives.objective import MEDIA, Batch, Choice, Number, Objective, RecordShape, Tensor

_TOKENS_A_PAIR, _MOST_PAIRS = 16, 64
PAIRS = RecordShape(
    "chosen/rejected",
    ("chosen", "rejected"),
    ("prompt", "tools", "chat_template_kwargs"),
    trained="the chosen answer against the rejected",
    answers=("chosen", "rejected"),
    unit="pair",
    words="prompt, chosen and rejected, the answers as strings or as messages",
    refused=MEDIA,
)
BETA = Number(
    0.1,
    "Of dpo, how strongly the starting weights hold; ipo's tau, orpo's lambda, and the scale of simpo's rewards.",
    lambda value: value > 0,
    "it is a scale",
)


@dataclass(frozen=True)
class Pairs:
    """Values of the answers of a batch's pairs [B, 2P], empty pairs included; see :func:`halves`.

    Args:
        logps: log-probabilities of the answers, summed over their scored tokens.
        logps_before: the same by the starting weights, where the loss compares with them; else 0.
        lengths: numbers of scored tokens.
        ratios: ``logps - logps_before``; where the loss does not compare, the mean log-probabilities of tokens.
        real: 1 for a pair with scored tokens in both answers, else 0. [B, P]
        score: the function of a ratio that the loss takes in its place, of whatever shape.
    """

    logps: Tensor
    logps_before: Tensor
    lengths: Tensor
    ratios: Tensor
    real: Tensor
    score: Callable[[Tensor], Tensor] = lambda ratios: ratios

    @cached_property
    def answers(self) -> tuple[Tensor, Tensor]:
        """The ratios of the chosen answers and of the rejected ones, [B, P] each."""
        return halves(self.ratios)

    @property
    def margin(self) -> Tensor:
        """The chosen answers' scores minus the rejected ones'. [B, P]"""
        chosen, rejected = self.answers
        return self.score(chosen) - self.score(rejected)

    @property
    def margin_a_token(self) -> Tensor:
        chosen, rejected = halves(self.score(self.ratios) / self.lengths.clamp(min=1))
        return chosen - rejected


class PairObjective(Objective):
    """A loss of pairs. Its logged values bear trl's names, and trl 1.16 computes the same."""

    learns = "which of two answers is preferred"
    shapes = (PAIRS,)
    options: ClassVar[Mapping[str, Number | Choice]] = {"beta": BETA}
    parts: ClassVar[tuple[str, ...]] = ("pair_loss", "chosen_loss")
    logged: ClassVar[tuple[str, ...]] = (
        *("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins"),
        *("logps/chosen", "logps/rejected"),
    )
    refuses: ClassVar = {
        "text_column": "plain text has no two answers",
        "split_special_tokens": "answers are taken as the tokenizer takes them, and only plain text is ever spelt out",
        "train_on_prompt": "both answers have the same prompt, which says nothing of which is preferred",
        "overflow": "a part of an answer is preferred to nothing",
    }

    @property
    def groups(self) -> int:
        return min(_MOST_PAIRS, max(1, self.length // _TOKENS_A_PAIR))

    @property
    def columns(self) -> Mapping[str, tuple[int, ...]]:
        """The starting weights' log-probability of each segment [2P], where the loss compares with them."""
        return {self.reference: (2 * self.groups,)} if self.reference else {}

    @property
    def chosen_weight(self) -> float:
        """The weight of the second part of the loss, the mean cross entropy of :meth:`chosen_targets`; 0: none."""
        return 0.0

    def chosen_targets(self, batch: Batch) -> Tensor:
        """The targets [B, S] of that part, in chosen answers and others: here their prompts' too."""
        from shardwright.models.ops.labels import segment_targets

        return segment_targets(batch)

    def score(self, ratios: Tensor) -> Tensor:
        """``ratios`` of answers as the loss takes them."""
        return ratios

    def losses(self, pairs: Pairs) -> Tensor:
        """The loss of each pair [B, P], empty pairs included."""
        raise NotImplementedError

    def counts(self, batch: Batch) -> Tensor:
        """Pairs, and the :meth:`chosen_targets` of chosen answers; float [2]."""
        import torch

        from shardwright.models.ops.labels import IGNORE, segment_sums, targets

        scored, segments, count = targets(batch["labels"]) != IGNORE, batch["segment_ids"], 2 * self.groups
        real = _real(segment_sums(scored.to(torch.float32), segments, count))
        lengths = segment_sums((self.chosen_targets(batch) != IGNORE).to(torch.float32), segments, count)
        return torch.stack([real.sum(), (lengths[..., 0::2] * real).sum()])

    def loss(self, logits: Tensor, batch: Batch, counts: Tensor) -> dict[str, Tensor]:
        import torch

        from shardwright.models.ops.labels import IGNORE, segment_sums, targets, token_logps

        segments, count, weight = batch["segment_ids"], 2 * self.groups, self.chosen_weight
        logps = token_logps(logits, self.chosen_targets(batch) if weight else targets(batch["labels"]))
        scored = (targets(batch["labels"]) != IGNORE).to(logps.dtype)
        sums = segment_sums(logps * scored, segments, count)
        lengths = segment_sums(scored, segments, count)
        real = _real(lengths)
        if self.reference:
            before = batch[self.reference]
            ratios = sums - before
        else:
            before = torch.zeros_like(sums)
            # an answer of no tokens scores -1, since the odds of a certain answer are infinite
            ratios = torch.where(lengths > 0, sums / lengths.clamp(min=1), -torch.ones_like(sums))
        pairs = Pairs(sums, before, lengths, ratios, real, self.score)
        pair_loss = (self.losses(pairs) * real).sum() / counts[0]
        chosen_loss = torch.zeros_like(pair_loss)
        if weight:
            every = segment_sums(logps, segments, count)[..., 0::2]
            chosen_loss = -(every * real).sum() / counts[1]
            chosen_loss = chosen_loss if weight == 1 else weight * chosen_loss
        chosen, rejected = (self.numbers["beta"] * half for half in pairs.answers)
        rewards = (chosen, rejected, (chosen > rejected).to(logps.dtype), chosen - rejected)
        values = (*rewards, *(halves(sums) if self.reference else pairs.answers))
        logged = {name: (v.detach() * real).sum() / counts[0] for name, v in zip(self.logged, values, strict=True)}
        return {"pair_loss": pair_loss, "chosen_loss": chosen_loss, **logged}

    def refer(self, logits: Tensor, batch: Batch) -> Tensor:
        """The log-probability of each segment's scored targets, summed. [B, 2P]"""
        from shardwright.models.ops.labels import segment_sums, targets, token_logps

        logps = token_logps(logits, targets(batch["labels"]))
        return segment_sums(logps, batch["segment_ids"], 2 * self.groups)


def log_sigmoid(margins: Tensor) -> Tensor:
    """log σ(x), without the loss of precision of its parts."""
    from torch.nn.functional import logsigmoid

    return logsigmoid(margins)


def halves(values: Tensor) -> tuple[Tensor, Tensor]:
    """The values of the chosen and of the rejected answers: from [..., 2P] each [..., P]."""
    return values[..., 0::2], values[..., 1::2]


def _real(lengths: Tensor) -> Tensor:
    """1 where both answers of a pair have scored targets, else 0: from their numbers [..., 2P], float [..., P]."""
    import torch

    chosen, rejected = halves(lengths)
    return ((chosen > 0) & (rejected > 0)).to(torch.float32)
