"""A gather and a reduce-scatter as exchanges of parts, inside `jax.shard_map`: a TPU computes beside an exchange.

libtpu 0.0.21 runs a reduce-scatter alone, and a gather beside its own fusions only, never beside a Pallas kernel. An
all-to-all is done by the network alone. The bytes are the same, but not all links help: an exchange takes longer
where nothing is computed meanwhile.
"""

from __future__ import annotations

from typing import Any

from models.jax_call import jax

# a jax.Array, when it is traced
Array = Any


def gather(shard: Array, axis: str, dim: int) -> Array:
    """`jax.lax.all_gather` along ``dim``, tiled: each device sends its shard to each other."""
    copies = jax.numpy.concatenate([shard] * jax.lax.axis_size(axis), axis=dim)
    return jax.lax.all_to_all(copies, axis, split_axis=dim, concat_axis=dim, tiled=True)


def scatter_sum(x: Array, axis: str, dim: int) -> Array:
    """`jax.lax.psum_scatter` along ``dim``, tiled: each device gets all parts of its own and adds them up, in float32."""
    count = jax.lax.axis_size(axis)
    parts = jax.lax.all_to_all(x, axis, split_axis=dim, concat_axis=dim, tiled=True)
    # added one by one: on a TPU a reduction over so short a dimension is slow
    total, *others = (part.astype(jax.numpy.float32) for part in jax.numpy.split(parts, count, axis=dim))
    return sum(others, start=total).astype(x.dtype)
