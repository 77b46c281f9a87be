"""KTO (arXiv:2402.01306), and APO's zero loss of answers one by one (arXiv:2408.06266).

A row's segments are numbered by record and place: an answer behind its prompt has the first place of its record if it
is a good one and the second if it is bad, and its prompt with another record's answer the third.

Shape legend: B rows, S tokens in a row, V vocabulary, K records in a row at most, P places of a record.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from shardwright.objectives.objective import (
    BAD,
    GOOD,
    KTO,
    MEDIA,
    MISMATCHED,
    Batch,
    Choice,
    Number,
    RecordShape,
    Tensor,
    labels,
    torch,
)
from shardwright.objectives.pairs import BETA, PAIRS
from shardwright.objectives.segment_objective import SegmentObjective, scored

_TRAINED, _RENDERED = "each answer, by whether it is a good one", ("tools", "chat_template_kwargs")
LABELLED = tuple(
    RecordShape(
        *("/".join((*asked, label)), (*asked, label), _RENDERED, _TRAINED),
        answers=asked[1:],
        unit="example",
        words=f"{', '.join(asked)} and {label}, which is true for a good answer and false for a bad one",
        refused=MEDIA,
        label=label,
    )
    for asked, label in itertools.product((("prompt", "completion"), ("messages",)), KTO)
)


def _weight(which: str) -> Number:
    words = f"The weight of {which} answers, where they are more or fewer than the others."
    return Number(1.0, words, lambda value: value >= 0, "it is a weight")


class KahnemanTversky(SegmentObjective):
    """A good answer shall become likelier than by the starting weights, a bad one less likely.

    Each is compared with how far the model is from them altogether: the mean over mismatched answers, of a micro-batch
    on all devices, and 0 at least. APO's loss compares with 0. Logged values bear trl's names, and trl 1.16 computes
    the same.
    """

    title = "KTO"
    learns = "which answers are good ones and which are bad"
    shapes = (*LABELLED, replace(PAIRS, trained=_TRAINED, unit="example"))
    options: ClassVar = {
        "beta": BETA,
        "desirable_weight": _weight("good"),
        "undesirable_weight": _weight("bad"),
        "loss_type": Choice(
            ("kto", "apo_zero_unpaired"),
            "Of kto: kto, which compares with what mismatched answers gain, or apo_zero_unpaired, which does not.",
        ),
    }
    parts = ("kto_loss",)
    logged = ("rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected", "kl")
    further = 2
    reference = "reference"
    refuses: ClassVar = {
        **SegmentObjective.refuses,
        "text_column": "plain text is no answer to anything",
        "train_on_prompt": "a prompt is neither good nor bad",
        "overflow": "of a part of an answer nobody said whether it is good",
    }

    @property
    def segments(self) -> tuple[str, ...]:
        return (GOOD, BAD, MISMATCHED) if self.words["loss_type"] == ("kto",) else (GOOD, BAD)

    @property
    def places(self) -> int:
        return len(self.segments)

    def counts(self, batch: Batch) -> Tensor:
        """Answers, good ones, and bad ones; float [3]."""
        real = self._by_place(scored(batch), batch) > 0
        good, bad = real[..., 0].sum(), real[..., 1].sum()
        return torch.stack([good + bad, good, bad]).to(torch.float32)

    def loss(self, logits: Tensor, batch: Batch, counts: Tensor) -> dict[str, Tensor]:
        goal = labels.targets(batch["labels"])
        logps = self._by_place(labels.token_logps(logits, goal), batch)
        real = (self._by_place((goal != labels.IGNORE).to(logps.dtype), batch) > 0).to(logps.dtype)
        gains = logps - batch[self.reference].unflatten(-1, logps.shape[-2:])
        kl = torch.zeros_like(counts[0])
        if MISMATCHED in self.segments:
            apart, gained = real[..., 2], gains[..., 2].detach()
            kl = ((gained * apart).sum() / apart.sum().clamp(min=1)).clamp(min=0)
        beta, good, bad = self.numbers["beta"], real[..., 0], real[..., 1]
        # 1 - σ(x) is σ(-x)
        desirable = (torch.sigmoid(beta * (kl - gains[..., 0])) * good).sum() * self.numbers["desirable_weight"]
        undesirable = (torch.sigmoid(beta * (gains[..., 1] - kl)) * bad).sum() * self.numbers["undesirable_weight"]
        reward, other, said, said_of_other = (
            (values[..., place].detach() * real[..., place]).sum() / counts[1 + place]
            for values in (beta * gains, logps)
            for place in (0, 1)
        )
        distance = kl * (good.sum() + bad.sum()) / counts[0]  # so that micro-batches weigh as much as they have answers
        values = (reward, other, reward - other, said, said_of_other, distance)
        logged = dict(zip(self.logged, values, strict=True))
        return {"kto_loss": (desirable + undesirable) / counts[0], **logged}

    def means(self, sums: Mapping[str, float], counts: Sequence[float]) -> dict[str, float]:
        every, good, bad = (count or math.nan for count in counts)
        by = {"chosen": good, "rejected": bad}
        found = {name: sums[name] / by.get(name.rpartition("/")[2], every) for name in self.logged}
        return {**found, "rewards/margins": found["rewards/chosen"] - found["rewards/rejected"]}

    def balanced(self, batch: Batch) -> Tensor:
        """Mismatched answers are left out: trl runs them by themselves, and for their log-probabilities alone."""
        segments = batch["segment_ids"]
        if MISMATCHED not in self.segments:
            return super().balanced(batch)
        return ((segments % self.places) != 0).to(segments.dtype)

    def _by_place(self, values: Tensor, batch: Batch) -> Tensor:
        """Sums of ``values`` [..., S] by record and place. [..., K, P]"""
        return self.sums(values, batch).unflatten(-1, (-1, self.places))
