"""Distillation from what a teacher says of the next token: GKD's divergences (arXiv:2306.13649) on given texts.

The teacher's K likeliest tokens are buckets of their own, and all others together are one more. A divergence of such
buckets is never above that of the whole vocabulary, in either direction, and with K = V it is that one.

Shape legend: B rows, S tokens in a row, V vocabulary, K tokens that the teacher finds likeliest.
"""

from collections.abc import Mapping
from typing import ClassVar

from shardwright.objectives.objective import Batch, Number, Objective, RecordShape, Tensor, labels, torch
from shardwright.objectives.sft import SHAPES

TEACHER = "teacher"  # a row's column: at each position K ids, their log-probabilities, and that of all others
IDS, LOGPS = "teacher_ids", "teacher_logprobs"  # columns of records
FLOOR = -87.0  # log of float32's smallest normal number: of less than that the divergence would be 0 * inf
_GIVEN = SHAPES[-1]
TAUGHT = RecordShape(
    f"input_ids with {IDS}",
    (*_GIVEN.required, IDS, LOGPS),
    _GIVEN.optional,
    "what the teacher says of the next token",
    words=f"{', '.join(_GIVEN.required)}, {IDS} and {LOGPS}; or, with --teacher, any that sft reads",
    refused=_GIVEN.refused,
)


class Distillation(Objective):
    """The generalised Jensen-Shannon divergence between teacher and student, a mean over scored targets; in nats."""

    title = "distillation"
    learns = "a teacher's distribution of the next token"
    shapes = (TAUGHT, *SHAPES)
    teacher = TEACHER
    parts = ("distill_loss",)
    options: ClassVar = {
        "beta": Number(
            0.5,
            "Of distill, 0 for the forward KL divergence from the teacher, 1 for the reverse, and between them GKD's "
            "mixture of both.",
            lambda value: 0 <= value <= 1,
            "it weighs the teacher in a mixture with the student",
        ),
        "temperature": Number(
            1.0,
            "Divide the logits of teacher and student by it in distill's loss.",
            lambda value: value > 0,
            "it is a divisor",
        ),
        "teacher_top_k": Number(
            64,
            "How many of the teacher's likeliest tokens distill keeps for each target; all others are one bucket.",
            lambda value: value >= 1,
            "it counts tokens",
        ),
        "lmbda": Number(
            0.0,
            "GKD's share of batches that the student writes itself; 0 is all there is.",
            lambda value: value == 0,
            "answers of the student would be generated between steps, and a step is one compiled computation on given "
            "rows: let an inference engine write them, round by round, and give them as --dataset",
        ),
    }
    refuses: ClassVar = {
        "streaming": "what a teacher says of a row, in a pass or in the records, is stored beside it, and of a stream "
        "no rows are stored"
    }

    @property
    def top(self) -> int:
        """K."""
        return int(self.numbers["teacher_top_k"])

    @property
    def columns(self) -> Mapping[str, tuple[int, ...]]:
        """At the position of each scored target the ids [K], exact in float32 below 2^24, and K + 1 log-shares."""
        return {TEACHER: (self.length, width(self.top))}

    def counts(self, batch: Batch) -> Tensor:
        """The scored targets, [1]."""
        return labels.scored_tokens(batch["labels"]).view(1)

    def loss(self, logits: Tensor, batch: Batch, counts: Tensor) -> dict[str, Tensor]:
        ids, theirs = batch[TEACHER].split((self.top, self.top + 1), -1)
        ours = self._log_shares(logits, ids.to(torch.int64))
        found = self._divergence(ours, theirs[..., : ours.shape[-1]])
        scored = labels.targets(batch["labels"]) != labels.IGNORE
        return {"distill_loss": torch.where(scored, found, 0.0).sum() / counts[0]}

    def refer(self, logits: Tensor, batch: Batch) -> Tensor:
        """The values of column :attr:`teacher` by the teacher's logits: [B, S, 2K + 1]."""
        scores, ids = logits.to(torch.float32).topk(self.top, -1)
        shares = self._log_shares(logits, ids)
        rest = shares[..., :0] if shares.shape[-1] > self.top else torch.full_like(scores[..., :1], FLOOR)
        return torch.cat([ids.to(torch.float32), shares.clamp(min=FLOOR), rest], -1)

    def _log_shares(self, logits: Tensor, ids: Tensor) -> Tensor:
        """The log-probabilities of ``ids`` [B, S, K], and of all other tokens together if there are any."""
        from shardwright.models.ops.token_buckets import bucket_logits

        return bucket_logits(logits, ids, self.numbers["temperature"]).log_softmax(-1)

    def _divergence(self, ours: Tensor, theirs: Tensor) -> Tensor:
        """The divergence [B, S] of log-shares [B, S, buckets], as trl 1.16 computes it of the whole vocabulary's."""
        beta = self.numbers["beta"]
        if beta == 0:
            return _kl(theirs, ours)
        if beta == 1:
            return _kl(ours, theirs)
        weights = torch.tensor([1 - beta, beta], device=ours.device).log()
        mixed = torch.logsumexp(torch.stack([ours, theirs], -1) + weights, -1)
        return beta * _kl(theirs, mixed) + (1 - beta) * _kl(ours, mixed)


def width(top: int) -> int:
    """The numbers that column :data:`TEACHER` has at a position: K ids and K + 1 log-shares."""
    return 2 * top + 1


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p ‖ q) [B, S] of log-shares."""
    return (p.exp() * (p - q)).sum(-1)
