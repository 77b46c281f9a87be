"""Causal ring attention: a row's tokens are split over devices, and keys and values pass from each device to the next.

Tokens lie in the order of :mod:`shardwright.models.attention.pieces`, two pieces a device. Of the arriving keys every
device sees two of four pairs of pieces, whole; the pairs that the mask empties are not computed. Results for several
pieces of keys are merged by their logsumexp; given that of all keys, each pair's gradients are independent. Keys and
values are sent on while they are used, and in the backward their gradients follow them, one device behind (Liu, Zaharia
and Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023; the balanced order: Brandon et
al., "Striped Attention", 2023, and the zigzag order in use since). Only the inputs, the output and each row's logsumexp
are saved.

Shape suffixes: B batch, H query heads, K key and value heads, S sequence (on a device: its two pieces), P tokens of a
piece, D head dimension of query and key, E that of value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwright.models.attention import pieces, splash, splash_masks
from shardwright.models.attention.splash import KernelSettings
from shardwright.models.ops.jax_call import Array, jax, jnp


def attend(
    tensors: Sequence[Tensor], segments_BS: Tensor | None, sinks_H: Tensor | None, settings: KernelSettings
) -> Tensor:
    """Return attention ``[B, H, S, E]`` of query, key and value in pieces' order, differentiable in these and sinks.

    Segment 0 is padding: rows of zeros, with zero gradients. Twice the layout's `sequence_shards` divides S.
    """
    shards, chunk = settings.layout.sequence_shards, settings.scoring.chunk
    B, _, S, _ = tensors[0].shape
    length = S // (2 * shards)
    starts = pieces.numbers(shards, tensors[0].device) * length
    segments = None if segments_BS is None else segments_BS.to(torch.int32)
    if chunk is not None:
        within = torch.arange(length, dtype=torch.int32, device=starts.device)
        chunks = ((starts.unsqueeze(1) + within) // chunk).flatten().expand(B, S)
        segments = chunks if segments is None else segments * (-(-S // chunk)) + chunks
        settings = replace(settings, scoring=replace(settings.scoring, chunk=None))
    return _ring(tensors, {"s": starts, "bs": segments, "h": sinks_H}, segments_BS, settings)


# 0 or 1: a device's first or second piece
Which = Array | int
# the logsumexp of no scores; finite, because infinity less infinity is NaN
_NOTHING = -1e30


@dataclass(frozen=True)
class _PiecePair:
    """A piece of queries and one of keys, and which they are of their device's two."""

    of_queries: Which
    of_keys: Which
    query: Array  # [B, H, P, D]
    key: Array  # [B, K, P, D]
    value: Array  # [B, K, P, E]
    segments: tuple[Array, Array] | None  # the queries' and the keys', int32 [B, P] each; None: there is one
    # 0-d int32: how many tokens the first query comes after the first key, all queries after all keys; None: both are
    # the same piece
    distance: Array | None


def _pair_forward(pair: _PiecePair, settings: KernelSettings) -> tuple[Array, Array]:
    """Return the output [B, H, P, E] and each query's logsumexp [B, H, P], in float32."""
    mask, segments = _masked(pair, settings)
    out, logsumexp = splash.forward((pair.query, pair.key, pair.value), segments, None, mask, settings)
    logsumexp = jnp.maximum(logsumexp, _NOTHING)
    return jnp.where(logsumexp[..., None] > _NOTHING, out.astype(jnp.float32), 0), logsumexp


def _pair_backward(
    pair: _PiecePair, rows: tuple[Array, Array], grad_out: Array, settings: KernelSettings
) -> tuple[Array, ...]:
    """Return the float32 gradients of query, key and value; ``rows`` as in :func:`splash.backward`."""
    mask, segments = _masked(pair, settings)
    grads = splash.backward((pair.query, pair.key, pair.value), rows, grad_out, segments, mask, settings)
    return tuple(grad.astype(jnp.float32) for grad in grads)


def _masked(pair: _PiecePair, settings: KernelSettings) -> tuple[splash_masks.Mask, splash.SegmentIds | None]:
    sizes, scoring = splash.sizes_of(pair.query), settings.scoring
    segments = None if pair.segments is None else splash.segment_ids(*pair.segments, sizes)
    if pair.distance is None:
        return splash_masks.causal(sizes, scoring), segments
    return splash_masks.earlier_keys(sizes, scoring, pair.query.shape[2], pair.distance), segments


class _Keys(NamedTuple):
    """The tensors that go round: two pieces of keys, their values, first positions [2] and segments."""

    key: Array
    value: Array
    starts: Array
    segments: Array | None

    def sent_on(self, settings: KernelSettings) -> _Keys:
        segments = None if self.segments is None else _next(self.segments, settings)
        key, value, starts = (_next(x, settings) for x in (self.key, self.value, self.starts))
        return _Keys(key, value, starts, segments)


def _next(x: Array, settings: KernelSettings) -> Array:
    axis, count = settings.layout.sequence_axis, settings.layout.sequence_shards
    return jax.lax.ppermute(x, axis, [(i, (i + 1) % count) for i in range(count)])


class _Rows(NamedTuple):
    """The tensors that stay: queries ``BHSD``, the pieces' first positions [2], segments ``BS``."""

    query: Array
    starts: Array
    segments: Array | None

    def own(self, keys: _Keys) -> list[_PiecePair]:
        """The pairs with the device's own keys."""
        later = self.starts[1] - self.starts[0]
        return [self._pair(keys, 0, 0, None), self._pair(keys, 1, 1, None), self._pair(keys, 1, 0, later)]

    def others(self, keys: _Keys) -> list[_PiecePair]:
        """The pairs with another device's keys: the first piece of an earlier device, both pieces of a later one."""
        behind = (keys.starts[0] > self.starts[0]).astype(jnp.int32)
        distance = self.starts[behind] - keys.starts[behind]
        return [self._pair(keys, 1, 0, self.starts[1] - keys.starts[0]), self._pair(keys, behind, behind, distance)]

    def _pair(self, keys: _Keys, of_queries: Which, of_keys: Which, distance: Array | None) -> _PiecePair:
        segments = None
        if self.segments is not None and keys.segments is not None:
            segments = _piece(self.segments, of_queries, 1), _piece(keys.segments, of_keys, 1)
        key, value = (_piece(x, of_keys) for x in (keys.key, keys.value))
        query = _piece(self.query, of_queries)
        return _PiecePair(of_queries, of_keys, query, key, value, segments, distance)


def _piece(x: Array, which: Which, dim: int = 2) -> Array:
    length = x.shape[dim] // 2
    return jax.lax.dynamic_slice_in_dim(x, which * length, length, dim)


def _with(x: Array, which: Which, piece: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(x, piece, which * piece.shape[2], 2)


def _arguments(query: Array, key: Array, value: Array, *more: Array, words: str) -> tuple[_Rows, _Keys, Array | None]:
    named = dict(zip(words.split(), more, strict=True))
    starts, segments = named["s"], named.get("bs")
    return _Rows(query, starts, segments), _Keys(key, value, starts, segments), named.get("h")


def _forward(*tensors: Array, words: str, settings: KernelSettings) -> tuple[Array, Array]:
    rows, keys, sinks = _arguments(*tensors, words=words)
    *same, later = rows.own(keys)
    parts = [_pair_forward(pair, settings) for pair in same]
    out, logsumexp = (jnp.concatenate(halves, 2) for halves in zip(*parts, strict=True))

    def merged(found: tuple[Array, Array], pair: _PiecePair) -> tuple[Array, Array]:
        old_out, old = (_piece(x, pair.of_queries) for x in found)
        new_out, new = _pair_forward(pair, settings)
        total = jnp.logaddexp(old, new)
        joined = old_out * jnp.exp(old - total)[..., None] + new_out * jnp.exp(new - total)[..., None]
        return _with(found[0], pair.of_queries, joined), _with(found[1], pair.of_queries, total)

    found = merged((out, logsumexp), later)

    def turn(carry: tuple[_Keys, tuple[Array, Array]], _: None) -> tuple[Any, None]:
        keys, found = carry
        for pair in rows.others(keys):
            found = merged(found, pair)
        return (keys.sent_on(settings), found), None

    turns = settings.layout.sequence_shards - 1
    (_, (out, logsumexp)), _ = jax.lax.scan(turn, (keys.sent_on(settings), found), None, length=turns)
    if sinks is not None:
        total = jnp.logaddexp(logsumexp, sinks.astype(jnp.float32)[:, None])
        out, logsumexp = out * jnp.exp(logsumexp - total)[..., None], total
    return out.astype(rows.query.dtype), logsumexp


def _backward(
    grad_out: Array, out: Array, logsumexp: Array, *tensors: Array, words: str, settings: KernelSettings
) -> tuple[Array, Array, Array, Array]:
    rows, keys, sinks = _arguments(*tensors, words=words)
    dot, grad_sinks = splash.row_products(grad_out, out, logsumexp, sinks)

    def added(grads: Sequence[Array], pairs: Sequence[_PiecePair]) -> Sequence[Array]:
        for pair in pairs:
            logsumexp_P, dot_P, grad_out_P = (_piece(x, pair.of_queries) for x in (logsumexp, dot, grad_out))
            more = _pair_backward(pair, (logsumexp_P, dot_P), grad_out_P, settings)
            places = (pair.of_queries, pair.of_keys, pair.of_keys)
            grads = tuple(map(_add, grads, places, more))
        return grads

    zeros = [jnp.zeros(x.shape, jnp.float32) for x in (rows.query, keys.key, keys.value)]
    grads = tuple(added(zeros, rows.own(keys)))

    def turn(carry: tuple[_Keys, tuple[Array, ...]], _: None) -> tuple[Any, None]:
        keys, (grad_query, *behind) = carry
        # the gradients of the current keys arrive while this device's part is computed
        arrived = [_next(x, settings) for x in behind]
        grad_query, own_key, own_value = added((grad_query, *zeros[1:]), rows.others(keys))
        return (keys.sent_on(settings), (grad_query, arrived[0] + own_key, arrived[1] + own_value)), None

    turns = settings.layout.sequence_shards - 1
    (_, (grad_query, *others)), _ = jax.lax.scan(turn, (keys.sent_on(settings), grads), None, length=turns)
    grad_key, grad_value = (_next(x, settings) for x in others)  # back to the keys' own device
    grad_key, grad_value = grad_key.astype(keys.key.dtype), grad_value.astype(keys.value.dtype)
    return grad_query.astype(rows.query.dtype), grad_key, grad_value, grad_sinks[..., None]


def _add(x: Array, which: Which, piece: Array) -> Array:
    return _with(x, which, _piece(x, which) + piece)


_ring = splash.attention_kernel("ring", _forward, _backward, "bhs")
