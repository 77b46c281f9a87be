"""Token labels: the targets of the loss, and their log-probabilities.

Shape legend: B rows, S tokens in a row, V vocabulary.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100  # torch's cross entropy, and so every transformers model, leaves out targets of this label


def targets(labels: Tensor) -> Tensor:
    """Return the next token's label at each position of ``labels`` [..., S]; -100 where it is not scored."""
    return F.pad(labels[..., 1:], (0, 1), value=IGNORE)


def further_targets(batch: Mapping[str, Tensor], depth: int) -> Tensor:
    """Return the label ``depth`` tokens behind the next one's; -100 where it is not scored. [..., S]

    In rows with ``segment_ids`` it is of the same segment as the position.
    """
    labels, ahead = batch["labels"], min(depth + 1, batch["labels"].shape[-1])
    found = F.pad(labels[..., ahead:], (0, ahead), value=IGNORE)
    if (segments := batch.get("segment_ids")) is None:
        return found
    return torch.where(F.pad(segments[..., ahead:], (0, ahead)) == segments, found, IGNORE)


def segment_targets(batch: Mapping[str, Tensor]) -> Tensor:
    """Return the targets of a packed batch, where every token of a segment is one, its prompt included. [..., S]"""
    tokens, segments = batch["input_ids"], batch["segment_ids"]
    follows = (segments[..., 1:] == segments[..., :-1]) & (segments[..., 1:] > 0)
    return F.pad(torch.where(follows, tokens[..., 1:], IGNORE), (0, 1), value=IGNORE)


def scored_tokens(labels: Tensor) -> Tensor:
    """Count the scored targets of ``labels`` [..., S], as a 0-d float: neither the first token nor labels of -100."""
    return (labels[..., 1:] != IGNORE).to(torch.float32).sum()


def token_logps(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the float32 log-probability of each of ``targets`` [B, S] under ``logits`` [B, S, V]; 0 for -100."""
    # the operation of the token loss
    flat = logits.to(torch.float32).flatten(0, -2)
    flat = F.cross_entropy(flat, targets.flatten(), ignore_index=IGNORE, reduction="none")
    return -flat.view(targets.shape)


def segment_sums(values: Tensor, segments: Tensor, count: int) -> Tensor:
    """Sum ``values`` [..., S] over each of the segments 1 to ``count``. [..., count]"""
    numbers = torch.arange(1, count + 1, device=segments.device)
    return (values.unsqueeze(-1) * (segments.unsqueeze(-1) == numbers)).sum(-2)


def segment_ends(values: Tensor, batch: Mapping[str, Tensor], count: int, padding: int) -> Tensor:
    """Select of ``values`` [..., S, 1] those at the last token, not counting ``padding``, of segments 1 to ``count``.

    0 where a segment has no such token. [..., count]
    """
    tokens, segments = batch["input_ids"], batch["segment_ids"]
    numbers = torch.arange(1, count + 1, device=segments.device)
    places = torch.arange(segments.shape[-1], device=segments.device).unsqueeze(-1)
    own = (segments.unsqueeze(-1) == numbers) & (tokens != padding).unsqueeze(-1)
    last = torch.where(own, places, -1).amax(-2, keepdim=True)
    return torch.where(places == last, values, 0.0).sum(-2)
