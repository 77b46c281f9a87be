"""Attention over the outputs of earlier layers, at each position by itself; no token sees another by it."""

import torch
from torch import Tensor

# classes of transformers whose attention is such
CLASSES = {
    *("Inkling2BlockAttentionResidual", "Inkling2LoopBlockAttentionResidual", "Inkling2LoopMessageAttentionResidual"),
}


def across_layers(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """Map query ``BSQD``, of Q learned queries, and key and value ``BSND``, of N layers, to ``BQSD``.

    Where attention functions have heads, this has positions. N is small: plain products, which the partitioner splits
    along the positions.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores_BSQN = (query @ key.transpose(2, 3)).float() * scale
    return (torch.softmax(scores_BSQN, -1).to(query.dtype) @ value).transpose(1, 2)
