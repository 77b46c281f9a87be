"""Attention between one piece of queries and one piece of keys, the unit of a ring, in JAX.

Results for several pieces of keys are merged by their logsumexp; given that of all keys, each pair's gradients are
independent.

Shape suffixes: as in :mod:`shardwright.models.attention.splash`, with P tokens in a piece.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.models.attention import splash, splash_masks
from shardwright.models.ops.jax_call import Array, jnp

# the logsumexp of no scores; finite, because infinity less infinity is NaN
NOTHING = -1e30


@dataclass(frozen=True)
class PiecePair:
    """A piece of queries [B, H, P, D], and one of keys [B, K, P, D] with values [B, K, P, E].

    ``segments`` are the queries' and the keys', int32 [B, P] each; None: there is one. ``distance``, a 0-d int32, is
    how many tokens the first query comes after the first key, all queries after all keys; None: both are the same
    piece.
    """

    query: Array
    key: Array
    value: Array
    segments: tuple[Array, Array] | None
    distance: Array | None


def forward(pair: PiecePair, settings: splash.KernelSettings) -> tuple[Array, Array]:
    """Return the output [B, H, P, E] and each query's logsumexp [B, H, P], in float32."""
    mask, segments = _masked(pair, settings)
    out, logsumexp = splash.forward((pair.query, pair.key, pair.value), segments, None, mask, settings)
    logsumexp = jnp.maximum(logsumexp, NOTHING)
    return jnp.where(logsumexp[..., None] > NOTHING, out.astype(jnp.float32), 0), logsumexp


def backward(
    pair: PiecePair, rows: tuple[Array, Array], grad_out: Array, settings: splash.KernelSettings
) -> tuple[Array, ...]:
    """Return the float32 gradients of query, key and value; ``rows`` as in :func:`splash.backward`."""
    mask, segments = _masked(pair, settings)
    grads = splash.backward((pair.query, pair.key, pair.value), rows, grad_out, segments, mask, settings)
    return tuple(grad.astype(jnp.float32) for grad in grads)


def _masked(pair: PiecePair, settings: splash.KernelSettings) -> tuple[splash_masks.Mask, splash.SegmentIds | None]:
    sizes, scoring = splash.sizes_of(pair.query), settings.scoring
    segments = None if pair.segments is None else splash.segment_ids(*pair.segments, sizes)
    if pair.distance is None:
        return splash_masks.causal(sizes, scoring), segments
    return splash_masks.earlier_keys(sizes, scoring, pair.query.shape[2], pair.distance), segments
