"""PairObjective: the preferred one of two answers, learned from log-probabilities of segments of packed rows.

A row's pairs are numbered as its segments are: the chosen answer of pair k, behind its prompt, is segment 2k - 1, and
the rejected one 2k; so in a row's values [..., 2P] the even places are the chosen answers'.

Shape legend: B rows, S tokens in a row, V vocabulary, P pairs in a row at most.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from shardwright.objectives.objective import MEDIA, Batch, Choice, Number, RecordShape, Tensor, labels, torch
from shardwright.objectives.segment_objective import SegmentObjective, scored

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


class PairObjective(SegmentObjective):
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
        **SegmentObjective.refuses,
        "text_column": "plain text has no two answers",
        "train_on_prompt": "both answers have the same prompt, which says nothing of which is preferred",
        "overflow": "a part of an answer is preferred to nothing",
    }

    @property
    def chosen_weight(self) -> float:
        """The weight of the second part of the loss, the mean cross entropy of :meth:`chosen_targets`; 0: none."""
        return 0.0

    def chosen_targets(self, batch: Batch) -> Tensor:
        """The targets [B, S] of that part, in chosen answers and others: here their prompts' too."""
        return labels.segment_targets(batch)

    def score(self, ratios: Tensor) -> Tensor:
        """``ratios`` of answers as the loss takes them."""
        return ratios

    def losses(self, pairs: Pairs) -> Tensor:
        """The loss of each pair [B, P], empty pairs included."""
        raise NotImplementedError

    def counts(self, batch: Batch) -> Tensor:
        """Pairs, and the :meth:`chosen_targets` of chosen answers; float [2]."""
        there = real(self.sums(scored(batch), batch)).to(torch.float32)
        lengths = self.sums((self.chosen_targets(batch) != labels.IGNORE).to(torch.float32), batch)
        return torch.stack([there.sum(), (halves(lengths)[0] * there).sum()])

    def loss(self, logits: Tensor, batch: Batch, counts: Tensor) -> dict[str, Tensor]:
        weight = self.chosen_weight
        logps = labels.token_logps(logits, self.chosen_targets(batch) if weight else labels.targets(batch["labels"]))
        counted = scored(batch)
        sums, lengths = self.sums(logps * counted, batch), self.sums(counted, batch)
        there = real(lengths).to(torch.float32)
        if self.reference:
            before = batch[self.reference]
            ratios = sums - before
        else:
            before = torch.zeros_like(sums)
            # an answer of no tokens scores -1, since the odds of a certain answer are infinite
            ratios = torch.where(lengths > 0, sums / lengths.clamp(min=1), -torch.ones_like(sums))
        pairs = Pairs(sums, before, lengths, ratios, there, self.score)
        pair_loss = (self.losses(pairs) * there).sum() / counts[0]
        chosen_loss = torch.zeros_like(pair_loss)
        if weight:
            chosen_loss = -(halves(self.sums(logps, batch))[0] * there).sum() / counts[1]
            chosen_loss = chosen_loss if weight == 1 else weight * chosen_loss
        chosen, rejected = (self.numbers["beta"] * half for half in pairs.answers)
        rewards = (chosen, rejected, (chosen > rejected).to(logps.dtype), chosen - rejected)
        values = (*rewards, *(halves(sums) if self.reference else pairs.answers))
        logged = {name: (v.detach() * there).sum() / counts[0] for name, v in zip(self.logged, values, strict=True)}
        return {"pair_loss": pair_loss, "chosen_loss": chosen_loss, **logged}


def log_sigmoid(margins: Tensor) -> Tensor:
    """log σ(x), without the loss of precision of its parts."""
    return torch.nn.functional.logsigmoid(margins)


def halves(values: Tensor) -> tuple[Tensor, Tensor]:
    """The values of the chosen and of the rejected answers: from [..., 2P] each [..., P]."""
    return values[..., 0::2], values[..., 1::2]


def real(lengths: Tensor) -> Tensor:
    """Whether both answers of a pair have scored targets, whose numbers are [..., 2P]: bool [..., P]."""
    chosen, rejected = halves(lengths)
    return (chosen > 0) & (rejected > 0)
