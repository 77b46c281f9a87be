"""Sums of decays between the tokens of a chunk, each taken over its own tokens.

Differences of one running sum would lose precision: behind a decay of −700 a difference of 0.01 has no digits left in
float32, nor has its gradient.
"""

from shardwright.models.ops.jax_call import Array, jnp

LEAF = 8  # tokens; smaller blocks would fill a TPU worse than they save work


def until(g: Array, axis: int = -1) -> Array:
    """At each token, the sum of ``g`` from the first token to it."""
    return jnp.cumsum(g, axis=axis)


def after(g: Array, axis: int = -1) -> Array:
    """At each token, the sum of ``g`` behind it."""
    tail = jnp.zeros_like(jnp.take(g, jnp.array([0]), axis=axis))
    later = jnp.concatenate((jnp.split(g, [1], axis=axis)[1], tail), axis=axis)  # one token to the front
    return jnp.flip(jnp.cumsum(jnp.flip(later, axis), axis=axis), axis)


def between(g: Array) -> Array:
    """At [..., i, j] the sum of ``g`` from behind token j to token i; −∞ for j > i: [..., C, C], C a power of 2."""
    C = g.shape[-1]
    if C <= LEAF:
        counted = jnp.where(lower(C, -1), g[..., :, None], 0)
        return jnp.where(lower(C), jnp.cumsum(counted, axis=-2), -jnp.inf)
    late, early = until(g[..., C // 2 :]), after(g[..., : C // 2])
    return joined(between(halves(g, -1)), late[..., :, None] + early[..., None, :], -jnp.inf)


def lower(size: int, diagonal: int = 0) -> Array:
    return jnp.tril(jnp.ones((size, size), bool), diagonal)


def halves(array: Array, axis: int) -> Array:
    """Stack the two halves of ``axis``, which is negative, along a new axis in front of it."""
    return jnp.stack(jnp.split(array, 2, axis), axis=axis - 1)


def joined(diagonal: Array, corner: Array, above: float = 0.0) -> Array:
    """A square matrix of the blocks ``diagonal[..., 0 and 1, :, :]``, ``corner`` below the first, and ``above``."""
    first, second = diagonal[..., 0, :, :], diagonal[..., 1, :, :]
    top = jnp.concatenate((first, jnp.full_like(first, above)), axis=-1)
    return jnp.concatenate((top, jnp.concatenate((corner, second), axis=-1)), axis=-2)
