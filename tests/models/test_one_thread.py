"""A product that XLA's CPU backend does not split over threads."""

from __future__ import annotations

import numpy as np
import pytest

from shardwright.models.ops.cpu_matmul import product
from shardwright.models.ops.jax_call import jax


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("inner", [1, 6, 7])
def test_it_is_the_product(inner, dtype):
    x, w = np.random.default_rng(0).normal(size=(2, 5 * inner))
    x, w = jax.numpy.asarray(x.reshape(5, inner), dtype), jax.numpy.asarray(w.reshape(inner, 5), dtype)
    y = jax.jit(product)(x, w)
    assert y.dtype == dtype
    np.testing.assert_allclose(np.float32(y), np.float32(x) @ np.float32(w), rtol=2e-2 if dtype == "bfloat16" else 1e-5)


def test_it_is_compiled_as_a_convolution():
    """Which is what XLA's CPU backend runs on one thread; of another dtype it would be a loop over its elements."""

    def compiled(dtype):
        shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape in ((64, 128), (128, 256))]
        return jax.jit(product).lower(*shapes).compile().as_text()

    assert " convolution(" in compiled("float32")
    assert " dot(" not in compiled("float32")
    assert " convolution(" not in compiled("bfloat16")
