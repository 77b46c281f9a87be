"""SegmentObjective: a loss of answers, each a segment of a packed row, from the log-probabilities of its tokens.

Shape legend: B rows, S tokens in a row, V vocabulary, N segments in a row at most.
"""

from collections.abc import Mapping
from typing import ClassVar

from shardwright.objectives.objective import Batch, Objective, Tensor, labels, torch

_TOKENS_A_RECORD, _MOST_RECORDS = 16, 64


class SegmentObjective(Objective):
    """A loss of segments."""

    refuses: ClassVar[Mapping[str, str]] = {
        "split_special_tokens": "answers are taken as the tokenizer takes them, and only plain text is ever spelt out",
    }

    @property
    def places(self) -> int:
        """Segments of a record."""
        return 2

    @property
    def groups(self) -> int:
        return min(_MOST_RECORDS, max(1, self.length // _TOKENS_A_RECORD))

    @property
    def columns(self) -> Mapping[str, tuple[int, ...]]:
        """The starting weights' log-probability of each segment [N], where the loss compares with them."""
        return {self.reference: (self.groups * self.places,)} if self.reference else {}

    def sums(self, values: Tensor, batch: Batch) -> Tensor:
        """The sum of ``values`` [..., S] over each segment. [..., N]"""
        return labels.segment_sums(values, batch["segment_ids"], self.groups * self.places)

    def refer(self, logits: Tensor, batch: Batch) -> Tensor:
        """The log-probability of each segment's scored targets, summed. [B, N]"""
        return self.sums(labels.token_logps(logits, labels.targets(batch["labels"])), batch)


def scored(batch: Batch) -> Tensor:
    """1 for a position with a scored target, else 0; float32 [..., S]."""
    return (labels.targets(batch["labels"]) != labels.IGNORE).to(torch.float32)
