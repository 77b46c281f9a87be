"""PairObjective: the preferred one of two answers, learned from log-probabilities of segments of packed rows.

A row's pairs are numbered as its segments are: the chosen answer of pair k, behind its prompt, is segment 2k - 1, and
the rejected one 2k; so in a row's values [..., 2P] the even places are the chosen answers'.

Shape legend: B rows, S tokens in a row, V vocabulary, P pairs in a row at most.
"""

from collections.abc import Mapping
from typing import ClassVar

from shardwright.objectives.objective import MEDIA, Batch, Number, Objective, RecordShape, Tensor

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


class PairObjective(Objective):
    """A loss of pairs. Its logged values bear trl's names, and trl 1.16 computes the same.

    Attributes:
        on_chosen: the cross entropy of the chosen answers, their prompts' too, is added: the second part of the loss.
        per_token: :meth:`losses` compares an answer's score a token.
    """

    learns = "which of two answers is preferred"
    shapes = (PAIRS,)
    options: ClassVar = {"beta": BETA}
    parts: ClassVar[tuple[str, ...]] = ("pair_loss", "chosen_loss")
    on_chosen = per_token = False
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

    def losses(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """The loss of each pair [B, P], empty pairs included, from both answers' scores [B, P].

        A score is an answer's log-probability minus that by the starting weights; without a reference, the mean
        log-probability of its scored tokens.
        """
        raise NotImplementedError

    def counts(self, batch: Batch) -> Tensor:
        """Pairs, and the targets of chosen answers, their prompts' too; float [2]."""
        import torch

        from shardwright.models.ops.labels import IGNORE, segment_sums, segment_targets, targets

        scored, segments, count = targets(batch["labels"]) != IGNORE, batch["segment_ids"], 2 * self.groups
        real = _real(segment_sums(scored.to(torch.float32), segments, count))
        lengths = segment_sums((segment_targets(batch) != IGNORE).to(torch.float32), segments, count)
        return torch.stack([real.sum(), (lengths[..., 0::2] * real).sum()])

    def loss(self, logits: Tensor, batch: Batch, counts: Tensor) -> dict[str, Tensor]:
        import torch

        from shardwright.models.ops.labels import IGNORE, segment_sums, segment_targets, targets, token_logps

        segments, count = batch["segment_ids"], 2 * self.groups
        logps = token_logps(logits, segment_targets(batch) if self.on_chosen else targets(batch["labels"]))
        scored = (targets(batch["labels"]) != IGNORE).to(logps.dtype)
        sums = segment_sums(logps * scored, segments, count)
        lengths = segment_sums(scored, segments, count)
        real = _real(lengths)
        if self.reference:
            scores = sums - batch[self.reference]
        else:
            # an answer of no tokens scores -1, since the odds of a certain answer are infinite
            scores = torch.where(lengths > 0, sums / lengths.clamp(min=1), -torch.ones_like(sums))
        both = _halves(scores)
        losses = self.losses(*(_halves(scores / lengths.clamp(min=1)) if self.per_token else both))
        pair_loss = (losses * real).sum() / counts[0]
        chosen_loss = torch.zeros_like(pair_loss)
        if self.on_chosen:
            every = segment_sums(logps, segments, count)[..., 0::2]
            chosen_loss = -(every * real).sum() / counts[1]
        chosen, rejected = (self.numbers["beta"] * half for half in both)
        rewards = (chosen, rejected, (chosen > rejected).to(logps.dtype), chosen - rejected)
        values = (*rewards, *(_halves(sums) if self.reference else both))
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


def _halves(values: Tensor) -> tuple[Tensor, Tensor]:
    """The values of the chosen and of the rejected answers: from [..., 2P] each [..., P]."""
    return values[..., 0::2], values[..., 1::2]


def _real(lengths: Tensor) -> Tensor:
    """1 where both answers of a pair have scored targets, else 0: from their numbers [..., 2P], float [..., P]."""
    import torch

    chosen, rejected = _halves(lengths)
    return ((chosen > 0) & (rejected > 0)).to(torch.float32)
