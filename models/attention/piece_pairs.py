"""Attention of a piece of queries to a piece of keys, in JAX: what a ring is made of.

On a TPU it is the kernel of :mod:`shardwright.models.attention.splash`. Elsewhere queries go in blocks against all keys
of the piece, as in :mod:`shardwright.models.attention.portable`. Results of several pieces of keys are merged by the
logarithms of their sums of exponents; given that of all keys, each pair's gradients are right by themselves.

Shape suffixes: as there, with P tokens in a piece.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from shardwright.models.attention import splash, splash_masks
from shardwright.models.attention.portable import BLOCK, Scoring

# isort: split
import jax
import jax.numpy as jnp

# the logarithm of a sum of no exponents; infinity less infinity is no number
NOTHING = -1e30
_Two = tuple[jax.Array, jax.Array]


@dataclass(frozen=True)
class PiecePair:
    """A piece of queries and one of keys.

    Args:
        query: [B, H, P, D].
        key: [B, K, P, D].
        value: [B, K, P, E].
        segments: of the queries and of the keys, int32 [B, P] each; None: there is one.
        distance: how many tokens the first query comes after the first key, a 0-d int32; None: it is the same piece.
            Otherwise all queries come after all keys.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    segments: tuple[jax.Array, jax.Array] | None
    distance: jax.Array | None


@dataclass(frozen=True)
class Pairs:
    """How pairs are computed.

    Args:
        kernel: by the TPU's kernel, or Pallas's interpreter of it.
    """

    settings: splash.Settings
    kernel: bool

    def forward(self, pair: PiecePair) -> tuple[jax.Array, jax.Array]:
        """The output [B, H, P, E], and the logarithm of each query's sum of exponents [B, H, P]; float32."""
        if not self.kernel:
            return _forward(pair, self.settings.scoring)
        mask, segments = self._masked(pair)
        out, logsumexp = splash.forward((pair.query, pair.key, pair.value), segments, None, mask, self.settings)
        logsumexp = jnp.maximum(logsumexp, NOTHING)
        return jnp.where(logsumexp[..., None] > NOTHING, out.astype(jnp.float32), 0), logsumexp

    def backward(
        self, pair: PiecePair, rows: tuple[jax.Array, jax.Array], grad_out: jax.Array
    ) -> tuple[jax.Array, ...]:
        """The gradients of query, key and value in float32; ``rows`` as :func:`splash.backward`."""
        if not self.kernel:
            return _backward(pair, rows, grad_out, self.settings.scoring)
        mask, segments = self._masked(pair)
        tensors = pair.query, pair.key, pair.value
        grads = splash.backward(tensors, rows, grad_out, segments, mask, self.settings)
        return tuple(grad.astype(jnp.float32) for grad in grads)

    def _masked(self, pair: PiecePair) -> tuple[splash_masks.Mask, splash.SegmentIds | None]:
        sizes, scoring = splash.sizes_of(pair.query, self.settings), self.settings.scoring
        segments = None if pair.segments is None else splash.segment_ids(*pair.segments, sizes)
        if pair.distance is None:
            return splash_masks.causal(sizes, scoring), segments
        return splash_masks.earlier_keys(sizes, scoring, pair.query.shape[2], pair.distance), segments


def without_chunk(settings: splash.Settings) -> splash.Settings:
    """``settings`` where chunks are said by the segments."""
    return replace(settings, scoring=replace(settings.scoring, chunk=None))


def _forward(pair: PiecePair, scoring: Scoring) -> tuple[jax.Array, jax.Array]:
    value_BKPE = pair.value.astype(jnp.float32)

    def block(x: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        scores, seen, _ = _scores(pair, x[0], x[1], x[2], scoring)
        top = jnp.where(seen, scores, NOTHING).max(-1)
        weights = jnp.where(seen, jnp.exp(scores - top[..., None]), 0)
        total = weights.sum(-1)
        out = jnp.einsum("bkgct,bkte->bkgce", weights, value_BKPE) / jnp.maximum(total, 1)[..., None]
        return out, jnp.where(total > 0, top + jnp.log(jnp.maximum(total, 1)), NOTHING)

    out_N, logsumexp_N = jax.lax.map(block, _blocks(pair))
    return _joined(pair, out_N), _joined(pair, logsumexp_N[..., None])[..., 0]


def _backward(
    pair: PiecePair, rows: tuple[jax.Array, jax.Array], grad_out: jax.Array, scoring: Scoring
) -> tuple[jax.Array, jax.Array, jax.Array]:
    key, value = (x.astype(jnp.float32) for x in (pair.key, pair.value))

    def block(
        carry: tuple[jax.Array, jax.Array], x: tuple[jax.Array, ...]
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        query, positions, segments, logsumexp, dot, grad = x
        scores, seen, slope = _scores(pair, query, positions, segments, scoring)
        weights = jnp.where(seen, jnp.exp(scores - logsumexp), 0)
        grad_value = carry[1] + jnp.einsum("bkgct,bkgce->bkte", weights, grad)
        grad_scores = weights * (jnp.einsum("bkgce,bkte->bkgct", grad, value) - dot) * slope * scoring.scale
        grad_key = carry[0] + jnp.einsum("bkgct,bkgcd->bktd", grad_scores, query)
        return (grad_key, grad_value), jnp.einsum("bkgct,bktd->bkgcd", grad_scores, key)

    split = functools.partial(_split, pair)
    xs = (*_blocks(pair), *(split(x[..., None].astype(jnp.float32)) for x in rows), split(grad_out.astype(jnp.float32)))
    (grad_key, grad_value), grad_query_N = jax.lax.scan(block, (jnp.zeros_like(key), jnp.zeros_like(value)), xs)
    return _joined(pair, grad_query_N), grad_key, grad_value


def _scores(
    pair: PiecePair, query_BKGCD: jax.Array, positions_C: jax.Array, segments_BC: jax.Array, scoring: Scoring
) -> tuple[jax.Array, jax.Array, jax.Array | float]:
    """One block's scores, which keys it sees, and the soft cap's slope; positions count from the first key."""
    scores = jnp.einsum("bkgcd,bktd->bkgct", query_BKGCD, pair.key.astype(jnp.float32)) * scoring.scale
    slope: jax.Array | float = 1.0
    if scoring.softcap is not None:
        tanh = jnp.tanh(scores / scoring.softcap)
        scores, slope = tanh * scoring.softcap, 1 - tanh * tanh
    distance_CT = positions_C[:, None] - jnp.arange(pair.key.shape[2], dtype=jnp.int32)
    seen = (distance_CT >= 0)[None]
    if scoring.window is not None:
        seen = seen & (distance_CT < scoring.window)
    if pair.segments is not None:
        seen = seen & (segments_BC[..., None] == pair.segments[1][:, None])
    return scores, seen[:, None, None], slope


def _blocks(pair: PiecePair) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The queries N·BKGCD in float32, their positions from the first key N·C, and their segments N·BC."""
    B, _, P, _ = pair.query.shape
    N, C = _count(P)
    first = 0 if pair.distance is None else pair.distance
    segments = jnp.zeros((B, P), jnp.int32) if pair.segments is None else pair.segments[0]
    return (
        _split(pair, pair.query.astype(jnp.float32)),
        (first + jnp.arange(P, dtype=jnp.int32)).reshape(N, C),
        segments.reshape(B, N, C).swapaxes(0, 1),
    )


def _count(P: int) -> tuple[int, int]:
    """Into how many blocks of how many queries a piece is cut: no more than `BLOCK`, and equally many."""
    C = max(c for c in range(1, min(BLOCK, P) + 1) if P % c == 0)
    return P // C, C


def _split(pair: PiecePair, x_BHPD: jax.Array) -> jax.Array:
    (B, H, P, D), K = x_BHPD.shape, pair.key.shape[1]
    N, C = _count(P)
    return x_BHPD.reshape(B, K, H // K, N, C, D).transpose(3, 0, 1, 2, 4, 5)


def _joined(pair: PiecePair, x_NBKGCD: jax.Array) -> jax.Array:
    B, H, P, _ = pair.query.shape
    return x_NBKGCD.transpose(1, 2, 3, 0, 4, 5).reshape(B, H, P, -1)
