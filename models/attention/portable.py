"""Causal attention in plain tensor operations, for any platform, with memory linear in the sequence.

Blocks of queries meet all keys. The backward recomputes a block's scores, so at most ``[batch, heads, sequence,
block]`` of them exist at once (Rabe and Staats, "Self-attention does not need O(n^2) memory", 2021). On XLA the blocks
are one While loop, whose buffers are reused. AOTAutograd traces a scanned layer with fake tensors, which can't build a
While: so forward and backward are operations, which build their loops when they run.

No query sees a later key. So queries are first cut into a few bands, and each meets the keys up to its own end: four
bands compute 5/8 of the scores. Each is a loop of its own to compile; so they are few, and not short.

Scores are the largest tensor of a step, so passes over them are few: the product with the values is divided by their
total, not the scores themselves. They have a row for each key and a column for each query, so that sums and maxima over
keys run for many queries at a time, and products over keys read scores in memory order.

Shape suffixes: B batch, H query heads, K key and value heads, G query heads to a key head (H = K·G), S sequence, N
blocks of queries, C queries in a block, T keys (T = S, unless a mask covers more keys), D head dimension of query and
key, E that of value; b, k, g: B, K and G, or 1 where all share one.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from shardwright.models.ops.fusion_barrier import apart
from shardwright.models.ops.operation import kernel
from shardwright.models.ops.random_bits import keep_factors
from shardwright.models.ops.while_loop import run_turns

Parts = Sequence[Tensor]
# the carry of a loop's turn, and its results
TurnResults = tuple[list[Tensor], list[Tensor]]

# queries in a block
BLOCK = 512
# the least number of queries in a band, and the largest number of bands
BAND, BANDS = 64, 4
_MASKED = torch.finfo(torch.float32).min


@dataclass(frozen=True)
class Scoring:
    """The computation and masking of scores, the same for every head."""

    scale: float
    softcap: float | None  # scores become ``softcap * tanh(scores / softcap)``
    window: int | None = None  # how many positions a token sees, itself included; None: all
    chunk: int | None = None  # a token sees only positions of its own chunk of so many; None: all
    causal: bool = True  # a token sees none after it; if False, there is no window or chunk, and a bias decides
    dropout: float = 0.0  # the probability of dropping a weight; the others are divided by 1 minus it
    site: int = 0  # the number of the place that draws the dropped weights


def portable(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segment_ids: Tensor | None,
    s_aux: Tensor | None,
    scoring: Scoring,
    random_key: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Map query ``BHSD``, key ``BKTD``, value ``BKTE``, segments ``BS`` and sinks ``H`` or ``BHS1`` to ``BSHE``.

    ``bias``, ``[B or 1, H or 1, S, T]``, is added to the scores, and gets a gradient: memory quadratic in the sequence.
    Without it, or with segments, T = S. With dropout, ``random_key`` and the scoring's site draw the dropped weights,
    as :func:`shardwright.models.ops.random_bits.dropout` would for the weights as one tensor ``BHST``.
    """
    B, _, S, _ = query.shape
    T = key.shape[2]
    one = torch.ones(B, max(S, T), dtype=torch.int32, device=query.device)
    query_segments, segments = (one[:, :S], one[:, :T]) if segment_ids is None else (segment_ids, segment_ids)
    sinks = query.new_full((1, 1, 1, 1), -torch.inf) if s_aux is None else s_aux
    sinks = sinks.view(1, -1, 1, 1) if sinks.dim() == 1 else sinks
    keyed, biased = ([] if t is None else [t] for t in (random_key, bias))
    out_BSHE = []
    for start, end, seen in _bands(S, T, scoring, bias):
        own = slice(start, end)
        queries = [query[:, :, own], query_segments[:, own], sinks if sinks.shape[2] == 1 else sinks[:, :, own]]
        keys = [key[:, :, :seen], value[:, :, :seen], segments[:, :seen], *keyed]
        out_BSHE.append(_band([*queries, *biased], keys, start, scoring))
    # contiguous, as eager attention's is: some models take a view of it
    return torch.cat(out_BSHE, 1) if len(out_BSHE) > 1 else out_BSHE[0].contiguous()


def _bands(S: int, T: int, scoring: Scoring, bias: Tensor | None) -> list[tuple[int, int, int]]:
    """Cut queries into ``(first, end, keys)``; one band, if a bias is the mask or dropout draws for all weights."""
    if not scoring.causal or scoring.dropout or bias is not None:
        return [(0, S, T)]
    size = max(BAND, -(-S // BANDS))
    ends = [min(start + size, S) for start in range(0, S, size)]
    return [(start, end, end) for start, end in zip([0, *ends], ends, strict=False)]


def _band(queries: Parts, constants: Parts, start: int, scoring: Scoring) -> Tensor:
    """The output ``BSHE`` of queries that begin at position ``start``; with them are their segments, sinks and bias."""
    query, query_segments, sinks, *bias = queries
    (B, H, S, D), K, C = query.shape, constants[0].shape[1], min(BLOCK, query.shape[2])
    N = -(-S // C)
    rest = N * C - S  # padding of the last block
    query_NBKGCD = pad(query, (0, 0, 0, rest)).reshape(B, K, H // K, N, C, D).permute(3, 0, 1, 2, 4, 5)
    sinks = _blocks(sinks, K, N, C)
    positions_NC = torch.arange(start, start + N * C, dtype=torch.int32, device=query.device).view(N, C)
    segments_NBC = pad(query_segments, (0, rest)).view(B, N, C).transpose(0, 1)
    blocks = [query_NBKGCD, positions_NC, segments_NBC, sinks, *(_blocks(t, K, N, C) for t in bias)]
    out_NBKGCE = _attention([*constants, *blocks], scoring, any(t.requires_grad for t in bias))
    return out_NBKGCE.permute(1, 0, 4, 2, 3, 5).reshape(B, N * C, H, constants[1].shape[-1])[:, :S]


def _blocks(x: Tensor, K: int, N: int, C: int) -> Tensor:
    """Lay out a tensor like the scores, ``[B or 1, H or 1, S or 1, T or 1]``, as ``Nbk…gC``; C is 1 where S is 1."""
    b, heads, length, width = x.shape
    split = (b, *((1, 1) if heads == 1 else (K, heads // K)))
    if length == 1:
        x = x.reshape(*split, 1, 1, width).expand(*split, N, 1, width)
    else:
        x = pad(x, (0, 0, 0, N * C - length)).reshape(*split, N, C, width)
    return x.permute(3, 0, 1, 5, 2, 4)


def _split(tensors: Sequence[Any], scoring: Scoring) -> tuple[list[Any], list[Any]]:
    """The tensors that all blocks share, and those with one entry each."""
    # Shared are key BKTD, value BKTE, segments BT, and with dropout the random key; of each block query NBKGCD,
    # positions NC, query segments NBC, sinks Nbk1gC, and perhaps a bias NbkTgC.
    shared = 4 if scoring.dropout else 3
    return list(tensors[:shared]), list(tensors[shared:])


def _attention_like(tensors: Parts, scoring: Scoring, with_bias: bool) -> Tensor:
    (_, value, *_), (query, *_) = _split(tensors, scoring)
    return query.new_empty(*query.shape[:-1], value.shape[-1])


def _gradients(grad_out: Tensor, tensors: Parts, scoring: Scoring, with_bias: bool) -> list[Tensor | None]:
    found = _attention_backward([grad_out, *tensors], scoring, with_bias)
    grad_query, grad_key, grad_value, grad_sinks, *grad_bias = found
    constants, xs = _split(tensors, scoring)
    more = [*grad_bias, None][: len(xs) - 4]
    return [grad_key, grad_value, *[None] * (len(constants) - 2), grad_query, None, None, grad_sinks, *more]


def _flops(shapes: list[Sequence[int]], scoring: Scoring, with_bias: bool) -> int:
    """Every query's products with all keys and values: a block also computes what its mask hides."""
    (key, value, *_), (query_NBKGCD, *_) = _split(shapes, scoring)
    return 2 * math.prod(query_NBKGCD[:-1]) * key[2] * (key[3] + value[3])


# Reshaping stays outside the two ops: torch_xla 2.9 doesn't functionalize inside a custom op, where a slice of a slice,
# or of a permuted tensor, reads the wrong elements. Inside, take no view of a view, and none of a permuted tensor.
@kernel("attention", _attention_like, _gradients, flops=_flops)
def _attention(tensors: Parts, scoring: Scoring, with_bias: bool) -> Tensor:
    """``with_bias``: a bias gets a gradient."""
    constants, xs = _split(tensors, scoring)

    def body(constants: Parts, carry: Parts, x: Parts) -> TurnResults:
        weights_BKTGC, sink_BK1GC, _ = _weights(constants, x, scoring)
        kept = _kept(constants, x, weights_BKTGC, scoring)
        out_BKEGC, total_BK1GC = _product(weights_BKTGC, sink_BK1GC, constants[1], kept)
        return [], [_queries_first(out_BKEGC / total_BK1GC).to(xs[0].dtype)]

    return _loop(body, constants, [], xs)[1][0]


def _backward_like(tensors: Parts, scoring: Scoring, with_bias: bool) -> list[Tensor]:
    (key, value, *_), (query, _, _, sinks, *bias) = _split(tensors[1:], scoring)
    # not empty_like: the gradients are dense whatever the inputs' strides
    return [t.new_empty(t.shape) for t in (query, key, value, sinks, *(bias if with_bias else []))]


@kernel("attention_backward", _backward_like)
def _attention_backward(tensors: Parts, scoring: Scoring, with_bias: bool) -> list[Tensor]:
    """Map grad_out ``NBKGCE`` and the forward's tensors to the gradients of query, key, value, sinks and bias."""
    grad_out = tensors[0]
    constants, xs = _split(tensors[1:], scoring)

    def body(constants: Parts, carry: Parts, x: Parts) -> TurnResults:
        key_BKTD, value_BKTE, *_ = constants
        grad_key, grad_value = carry
        *x, grad_blocks = x
        query_BKGCD = x[0].float()
        weights, sink, slope = _weights(constants, x, scoring)
        kept = _kept(constants, x, weights, scoring)
        out_BKEGC, total_BK1GC = _product(weights, sink, value_BKTE, kept)
        # `weights` are not divided by their total, so their factor is
        grad_BKGCE = grad_blocks.float() / _queries_first(total_BK1GC)
        mean_BKGC1 = (grad_BKGCE * _queries_first(out_BKEGC / total_BK1GC)).sum(-1, keepdim=True)
        mean_BK1GC = mean_BKGC1.permute(0, 1, 4, 2, 3)
        grad_value = grad_value + torch.einsum("bktgc,bkgce->bkte", _times(weights, kept), grad_BKGCE)
        grad_weights = _times(torch.einsum("bkte,bkgce->bktgc", value_BKTE.float(), grad_BKGCE), kept)
        grad_biased = weights * (grad_weights - mean_BK1GC)
        grad_scores = grad_biased * scoring.scale
        if slope is not None:
            grad_scores = grad_scores * slope
        grad_key = grad_key + torch.einsum("bktgc,bkgcd->bktd", grad_scores, query_BKGCD)
        grad_query = apart(torch.einsum("bktd,bktgc->bkdgc", key_BKTD.float(), grad_scores))
        ys = [_queries_first(grad_query).to(xs[0].dtype), _summed(-sink * mean_BK1GC, x[3])]
        if with_bias:
            ys.append(_summed(grad_biased, x[4]))
        return [grad_key, grad_value], ys

    zeros = [torch.zeros_like(t, dtype=torch.float32) for t in constants[:2]]
    (grad_key, grad_value), (grad_query, *others) = _loop(body, constants, zeros, [*xs, grad_out])
    return [grad_query, grad_key.to(constants[0].dtype), grad_value.to(constants[1].dtype), *others]


def _weights(constants: Parts, x: Parts, scoring: Scoring) -> tuple[Tensor, Tensor, Tensor | None]:
    """One block's undivided weights ``BKTGC``, those of its sinks ``BK1GC``, and the soft cap's slope at each score."""
    key_BKTD, _, segments_BT = constants[:3]
    query_BKGCD, positions_C, segments_BC, sinks_bk1gC, *bias = x
    scores = torch.einsum("bktd,bkgcd->bktgc", key_BKTD.float(), query_BKGCD.float()) * scoring.scale
    slope = None
    if scoring.softcap is not None:
        tanh = torch.tanh(scores / scoring.softcap)
        scores, slope = tanh * scoring.softcap, 1 - tanh * tanh
    for bias_bkTgC in bias:
        scores = scores + bias_bkTgC.float()
    seen = _seen(positions_C, segments_BC, segments_BT, scoring)
    scores = torch.where(seen, scores, _MASKED)
    sinks = sinks_bk1gC.float()
    # A row that sees nothing gets weights of zero: exp(-1e38), for the top is at least half of the masked score.
    # A bias may itself be as low as that, along a whole row; then hidden weights are set to zero.
    top = torch.maximum(scores.amax(2, keepdim=True), sinks).clamp(min=_MASKED if bias else _MASKED / 2)
    weights = torch.exp(scores - top)
    return torch.where(seen, weights, 0.0) if bias else weights, torch.exp(sinks - top), slope


def _product(
    weights_BKTGC: Tensor, sink_BK1GC: Tensor, value_BKTE: Tensor, kept: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The weights' product with the values, ``BKEGC``, not yet divided by their total, and that total, ``BK1GC``."""
    out = apart(torch.einsum("bkte,bktgc->bkegc", value_BKTE.float(), _times(weights_BKTGC, kept)))
    # in a row that sees something the largest weight is 1: the clamp changes no such row
    return out, (weights_BKTGC.sum(2, keepdim=True) + sink_BK1GC).clamp(min=1.0)


def _queries_first(x_BKEGC: Tensor) -> Tensor:
    return x_BKEGC.permute(0, 1, 3, 4, 2)


def _kept(constants: Parts, x: Parts, weights_BKTGC: Tensor, scoring: Scoring) -> Tensor | None:
    """Dropout's factors for a block's weights, ``BKTGC``; None without dropout."""
    if not scoring.dropout:
        return None
    B, K, T, G, C = weights_BKTGC.shape
    return keep_factors(constants[3], (B, K, G, C, T), scoring.site, scoring.dropout, rows=x[1]).permute(0, 1, 4, 2, 3)


def _times(weights: Tensor, kept: Tensor | None) -> Tensor:
    return weights if kept is None else weights * kept


def _seen(positions_C: Tensor, segments_BC: Tensor, segments_BT: Tensor, scoring: Scoring) -> Tensor:
    """Whether a query sees a key, ``[B, 1, T, 1, C]``: of its segment, not padding, not later, in window and chunk."""
    segments_B1C = segments_BC.unsqueeze(1)
    same_BTC = (segments_B1C == segments_BT.unsqueeze(2)) & (segments_B1C != 0)
    if not scoring.causal:
        return same_BTC[:, None, :, None]
    positions_T1 = torch.arange(segments_BT.shape[1], dtype=positions_C.dtype, device=positions_C.device).unsqueeze(1)
    distance_TC = positions_C - positions_T1
    near_TC = distance_TC >= 0
    if scoring.window is not None:
        near_TC = near_TC & (distance_TC < scoring.window)
    if scoring.chunk is not None:
        near_TC = near_TC & (positions_C // scoring.chunk == positions_T1 // scoring.chunk)
    return (near_TC & same_BTC)[:, None, :, None]


def _summed(grad: Tensor, like: Tensor) -> Tensor:
    """Sum ``grad`` over the dimensions along which ``like`` was repeated, in its dtype."""
    repeated = [i for i in range(grad.dim()) if like.shape[i] < grad.shape[i]]
    return (grad.sum(repeated, keepdim=True) if repeated else grad).to(like.dtype)


def _loop(body: Callable[..., TurnResults], constants: Parts, carry: list[Tensor], xs: Parts) -> TurnResults:
    """Fold ``body(constants, carry, x) -> (carry, y)`` over dimension 0 of ``xs``; each tensor of ``y`` is stacked."""
    count, fixed = xs[0].shape[0], len(constants)
    if count == 1 or xs[0].device.type != "xla":
        ys = []
        for i in range(count):
            carry, y = body(constants, carry, [x[i] for x in xs])
            ys.append(y)
        return carry, [torch.stack(y) for y in zip(*ys, strict=True)]

    # A While's body may use only its arguments, so the constants are part of the carry: a tensor from outside would be
    # computed again inside, with everything that led to it.
    def step(state: list[Tensor], x: list[Tensor]) -> TurnResults:
        carry, y = body(state[:fixed], state[fixed:], x)
        return [*state[:fixed], *carry], y

    state, ys_N = run_turns(step, [*constants, *carry], list(xs))
    return state[fixed:], ys_N
