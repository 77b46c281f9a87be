"""Labels of tokens: which targets the loss is on, and how likely a model finds them.

Shape legend: B rows, S tokens in a row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

IGNORE = -100  # torch's cross entropy, and so every transformers model, leaves out targets of this label


def targets(labels: torch.Tensor) -> torch.Tensor:
    """What each position of ``labels`` [..., S] predicts, the label of the next one; -100 where that is not scored."""
    return F.pad(labels[..., 1:], (0, 1), value=IGNORE)


def segment_targets(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """As :func:`targets`, but every token of a segment is a target, its prompt too. [..., S]"""
    tokens, segments = batch["input_ids"], batch["segment_ids"]
    follows = (segments[..., 1:] == segments[..., :-1]) & (segments[..., 1:] > 0)
    return F.pad(torch.where(follows, tokens[..., 1:], IGNORE), (0, 1), value=IGNORE)


def scored_tokens(labels: torch.Tensor) -> torch.Tensor:
    """How many targets of ``labels`` [..., S] are scored, as a 0-d float: not the first, and none that is -100."""
    return (labels[..., 1:] != IGNORE).to(torch.float32).sum()


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
