"""Splitting a mesh axis into shorter rings, and a reduce-scatter that overlaps with compute."""

import math

from shardwright.models.ops.jax_call import Array, Axes, jnp, lax


def rings(axis: str, size: int, longest: int) -> dict[str, int]:
    """Split ``axis`` into rings of at most ``longest`` devices, each an axis: name → size, outermost first."""
    # a collective over the whole axis equals one over each of its rings, one after another
    sizes = []
    while size > longest and (ring := max((d for d in range(1, longest + 1) if size % d == 0), default=1)) > 1:
        sizes.append(ring)
        size //= ring
    return {f"{axis}.{i}": ring for i, ring in enumerate([*sizes, size])}


def exchange_sum(x: Array, axes: Axes, dim: int) -> Array:
    """``psum_scatter`` along ``dim`` by an exchange: each device adds up its own parts, in float32."""
    # as many bytes, but a TPU computes beside an exchange, while libtpu 0.0.21 runs a reduce-scatter alone
    count = math.prod(lax.axis_size(axis) for axis in axes)
    parts = lax.all_to_all(x, axes, split_axis=dim, concat_axis=dim, tiled=True)
    # added one by one: on a TPU a reduction over so short a dimension is slow
    total, *others = (part.astype(jnp.float32) for part in jnp.split(parts, count, axis=dim))
    return sum(others, start=total).astype(x.dtype)
