"""Losses of which of two answers is preferred, from the log-probabilities of segments of packed rows.

A row's pairs are numbered as its segments are: the chosen answer of pair k, behind its prompt, is segment 2k - 1, and
the rejected one 2k. DPO: arXiv:2305.18290. IPO: arXiv:2310.12036, per token, as its authors run it. ORPO:
arXiv:2403.07691, whose first term is, as in its authors' code, on the chosen answer's prompt too. SimPO:
arXiv:2405.14734. trl 1.16 computes the same.

Shape legend: B rows, S tokens in a row, V vocabulary, P pairs in a row at most.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from shardwright.models.ops.partial_gradients import Tensors

IGNORE = -100
REFERENCE = "reference"  # in a batch: what the starting weights say of each segment, float32 [B, 2P]
SEGMENTS = "segment_logps"
# what of each pair is logged, under trl's names; means over pairs
LOGGED = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/accuracies",
    "rewards/margins",
    "logps/chosen",
    "logps/rejected",
)
PAIR_LOSS, CHOSEN_LOSS = "pair_loss", "chosen_loss"  # the two parts of a loss, for evaluations


@dataclass(frozen=True)
class Preference:
    """One of the losses.

    Args:
        objective: dpo, ipo, orpo or simpo.
        pairs: P.
    """

    objective: str
    beta: float
    gamma: float
    pairs: int

    def counts(self, batch: Tensors) -> torch.Tensor:
        """What the two parts of the loss are divided by: pairs, and the targets of chosen answers; float [2].

        Args:
            batch: tensors [..., S].
        """
        scored = _next(batch["labels"]) != IGNORE
        real = self._both(segment_sums(scored.to(torch.float32), batch["segment_ids"], 2 * self.pairs))
        targets = segment_sums((_targets(batch) != IGNORE).to(torch.float32), batch["segment_ids"], 2 * self.pairs)
        return torch.stack([real.sum(), (targets[..., 0::2] * real).sum()])

    def __call__(self, logits: torch.Tensor, batch: Tensors, counts: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
        """The loss of a micro-batch; and :data:`LOGGED`, detached, with the two parts of the loss.

        Args:
            logits: [B, S, V].
            counts: of :meth:`counts`, whatever micro-batches they are of.
        """
        targets = _targets(batch) if self.objective == "orpo" else _next(batch["labels"])
        logps = token_logps(logits, targets)
        scored = (_next(batch["labels"]) != IGNORE).to(logps.dtype)
        sums = segment_sums(logps * scored, batch["segment_ids"], 2 * self.pairs)
        lengths = segment_sums(scored, batch["segment_ids"], 2 * self.pairs)
        real = self._both(lengths)
        losses, rewards, said = self._of_pairs(sums, lengths, batch.get(REFERENCE))
        pair_loss = (losses * real).sum() / counts[0]
        chosen_loss = torch.zeros_like(pair_loss)
        if self.objective == "orpo":
            every = segment_sums(logps, batch["segment_ids"], 2 * self.pairs)[..., 0::2]
            chosen_loss = -(every * real).sum() / counts[1]
        chosen, rejected = rewards
        values = (chosen, rejected, (chosen > rejected).to(logps.dtype), chosen - rejected, *said)
        logged = {name: (v.detach() * real).sum() / counts[0] for name, v in zip(LOGGED, values, strict=True)}
        logged |= {PAIR_LOSS: pair_loss.detach(), CHOSEN_LOSS: chosen_loss.detach()}
        return pair_loss + chosen_loss, logged

    def _of_pairs(
        self, sums: torch.Tensor, lengths: torch.Tensor, reference: torch.Tensor | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
        """Of each pair, also those that are none: the loss; both rewards; both log-probabilities. All [B, P]."""
        if self.objective in ("dpo", "ipo"):
            assert reference is not None
            ratios = sums - reference
            chosen, rejected = ratios[..., 0::2], ratios[..., 1::2]
            if self.objective == "dpo":
                losses = -F.logsigmoid(self.beta * (chosen - rejected))
            else:
                means = ratios / lengths.clamp(min=1)
                losses = (means[..., 0::2] - means[..., 1::2] - 1 / (2 * self.beta)).square()
            said = sums[..., 0::2], sums[..., 1::2]
        else:
            # of no tokens -1, since the odds of a certain answer are infinite
            means = torch.where(lengths > 0, sums / lengths.clamp(min=1), -torch.ones_like(sums))
            chosen, rejected = said = means[..., 0::2], means[..., 1::2]
            if self.objective == "simpo":
                losses = -F.logsigmoid(self.beta * (chosen - rejected) - self.gamma)
            else:
                losses = -self.beta * F.logsigmoid(_log_odds(chosen) - _log_odds(rejected))
        return losses, (self.beta * chosen, self.beta * rejected), said

    def _both(self, lengths: torch.Tensor) -> torch.Tensor:
        """1 where both answers of a pair have scored targets, else 0. [..., P]"""
        return ((lengths[..., 0::2] > 0) & (lengths[..., 1::2] > 0)).to(torch.float32)


@dataclass(frozen=True)
class SegmentLogps:
    """No loss: what is said of each segment, as :data:`SEGMENTS` [B, 2P].

    Args:
        pairs: P.
    """

    pairs: int

    def __call__(self, logits: torch.Tensor, batch: Tensors, counts: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
        """Zero, and the sums of the scored targets' log-probabilities; ``counts`` is not read."""
        logps = token_logps(logits, _next(batch["labels"]))
        return logps.sum() * 0, {SEGMENTS: segment_sums(logps, batch["segment_ids"], 2 * self.pairs)}


def token_logps(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The log-probability of each of ``targets`` [B, S] by ``logits`` [B, S, V], in float32; 0 where it is -100.

    By the very operation that the loss of tokens is made of.
    """
    flat = F.cross_entropy(
        logits.to(torch.float32).flatten(0, -2), targets.flatten(), ignore_index=IGNORE, reduction="none"
    )
    return -flat.view(targets.shape)


def segment_sums(values: torch.Tensor, segments: torch.Tensor, count: int) -> torch.Tensor:
    """The sum of ``values`` [..., S] over each of the segments 1 to ``count``. [..., count]"""
    numbers = torch.arange(1, count + 1, device=segments.device)
    return (values.unsqueeze(-1) * (segments.unsqueeze(-1) == numbers)).sum(-2)


def _next(labels: torch.Tensor) -> torch.Tensor:
    """What each place's logits are to meet; a segment's first token is nobody's target. [..., S]"""
    return F.pad(labels[..., 1:], (0, 1), value=IGNORE)


def _targets(batch: Tensors) -> torch.Tensor:
    """As :func:`_next`, but every token of a segment is a target, its prompt too."""
    tokens, segments = batch["input_ids"], batch["segment_ids"]
    follows = (segments[..., 1:] == segments[..., :-1]) & (segments[..., 1:] > 0)
    return F.pad(torch.where(follows, tokens[..., 1:], IGNORE), (0, 1), value=IGNORE)


def _log_odds(logps: torch.Tensor) -> torch.Tensor:
    """log(p / (1 - p)) of log p, which is kept a rounding away from 0."""
    below = logps.clamp(max=-1e-7)
    return below - torch.log(-torch.expm1(below))
