"""A matrix product that XLA's CPU backend runs on one thread, in JAX.

It splits a larger product over threads, though where there are as many virtual devices as cores each thread has work of
its own, and a CPU second then does little more than half as much. It never splits a convolution. So the product is
written as one: along the two halves of a row, with a window of both (one with a window of 1 is compiled as a product).

``python scripts/measure/speed.py products`` measures both.
"""

from __future__ import annotations

from typing import Any

from shardwright.models.ops.jax_call import jax

jnp, lax = jax.numpy, jax.lax

# a jax.Array, when it is traced
Array = Any


def product(x_MK: Array, w_KN: Array) -> Array:
    """``x @ w``, [M, N]."""
    (M, K), N = x_MK.shape, w_KN.shape[1]
    if K % 2 or x_MK.dtype != jnp.float32:  # the backend has no fast convolution in another dtype
        return x_MK @ w_KN
    halves = x_MK.reshape(M, 2, K // 2), w_KN.reshape(2, K // 2, N)
    return lax.conv_general_dilated(*halves, (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC")).reshape(M, N)
