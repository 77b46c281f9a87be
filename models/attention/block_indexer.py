"""An indexer that chooses blocks of keys, with static shapes: transformers' own loops over queries.

Shape suffixes: B batch, S queries, T keys (T = S), h the indexer's heads, D their width.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad


@torch.no_grad()
def chosen_keys(
    indexer: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor,
    past_key_values: None = None,
) -> Tensor:
    """Qwen4-Exp's indexer: the keys that each query attends to, ``[B, 1, S, T]``.

    They are those of its best blocks, and those behind its last full block. The keys that a query sees must be
    successive, and its blocks begin at the first of them. ``hidden_states`` are ``[B, S, width]``,
    ``position_embeddings`` cosine and sine, ``[B, S, rotated width]``, ``attention_mask`` is ``[B, 1, S, T]``, bool
    (whether a query sees a key) or added to its score.
    """
    size, D = indexer.compress_ratio, indexer.index_head_dim
    seen_BST = (attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0)[:, 0]
    (B, S, T), (cos, sin) = seen_BST.shape, position_embeddings
    query, key = indexer.index_qk_proj(hidden_states).split([indexer.index_n_heads * D, D], -1)
    query_BShD = _rotated(indexer.q_layernorm(query.reshape(B, S, -1, D)), cos.unsqueeze(2), sin.unsqueeze(2))
    # a block's score is that of the mean of its keys, here for blocks that begin at any key
    longer = pad(key.float(), (0, 0, 0, size - 1))
    mean_BTD = torch.stack([longer[:, i : i + T] for i in range(size)]).mean(0).to(key.dtype)
    block_BTD = _rotated(indexer.k_layernorm(mean_BTD), cos, sin)
    scores_BShT = torch.einsum("bshd,btd->bsht", query_BShD.float(), block_BTD.float())
    scores_BST = torch.relu(scores_BShT).sum(2) / math.sqrt(D)

    positions = torch.arange(T, device=seen_BST.device)
    first_BS1 = torch.where(seen_BST, positions, T).amin(-1, keepdim=True)
    full_BS1 = seen_BST.sum(-1, keepdim=True) // size * size  # keys in full blocks
    offset_BST = positions - first_BS1
    begins_BST = (offset_BST >= 0) & (offset_BST % size == 0) & (offset_BST < full_BS1)
    best = scores_BST.masked_fill(~begins_BST, -torch.inf).topk(min(indexer.block_topk, T), -1).indices
    chosen = torch.zeros_like(scores_BST).scatter(-1, best, 1.0) * begins_BST
    whole = sum(pad(chosen, (i, 0))[..., :T] for i in range(size))
    return (seen_BST & ((whole > 0) | (offset_BST >= full_BS1))).unsqueeze(1)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to as many of the first numbers of ``x`` as ``cos`` has."""
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, -1)
    return torch.cat([turned * cos + torch.cat([-second, first], -1) * sin, rest], -1)
