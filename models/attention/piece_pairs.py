"""Attention of a piece of queries to a piece of keys, in JAX: what a ring is made of.

Results of several pieces of keys are merged by the logarithms of their sums of exponents; given that of all keys, each
pair's gradients are right by themselves.

Shape suffixes: as in :mod:`shardwright.models.attention.splash`, with P tokens in a piece.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwright.models.attention import splash, splash_masks

# isort: split
import jax
import jax.numpy as jnp

# the logarithm of a sum of no exponents; infinity less infinity is no number
NOTHING = -1e30


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


def forward(pair: PiecePair, settings: splash.Settings) -> tuple[jax.Array, jax.Array]:
    """The output [B, H, P, E], and the logarithm of each query's sum of exponents [B, H, P]; float32."""
    mask, segments = _masked(pair, settings)
    out, logsumexp = splash.forward((pair.query, pair.key, pair.value), segments, None, mask, settings)
    logsumexp = jnp.maximum(logsumexp, NOTHING)
    return jnp.where(logsumexp[..., None] > NOTHING, out.astype(jnp.float32), 0), logsumexp


def backward(
    pair: PiecePair, rows: tuple[jax.Array, jax.Array], grad_out: jax.Array, settings: splash.Settings
) -> tuple[jax.Array, ...]:
    """The gradients of query, key and value in float32; ``rows`` as :func:`splash.backward`."""
    mask, segments = _masked(pair, settings)
    grads = splash.backward((pair.query, pair.key, pair.value), rows, grad_out, segments, mask, settings)
    return tuple(grad.astype(jnp.float32) for grad in grads)


def _masked(pair: PiecePair, settings: splash.Settings) -> tuple[splash_masks.Mask, splash.SegmentIds | None]:
    sizes, scoring = splash.sizes_of(pair.query), settings.scoring
    segments = None if pair.segments is None else splash.segment_ids(*pair.segments, sizes)
    if pair.distance is None:
        return splash_masks.causal(sizes, scoring), segments
    return splash_masks.earlier_keys(sizes, scoring, pair.query.shape[2], pair.distance), segments


def without_chunk(settings: splash.Settings) -> splash.Settings:
    """``settings`` where chunks are said by the segments."""
    return replace(settings, scoring=replace(settings.scoring, chunk=None))
