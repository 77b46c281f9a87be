"""A TPU's kernels on virtual devices, by Pallas's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from shardwright.models.ops import jax_call, plain_kernels, tpu_kernels


@contextmanager
def interpreted() -> Iterator[None]:
    """Inside, virtual devices run a TPU's kernels of attention and of grouped products."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tpu_kernels, "INTERPRETED", True)
        for name in ("attention", "attention_backward", "grouped_product", "grouped_outer"):
            patch.setattr(plain_kernels, name, getattr(tpu_kernels, name))
        jax_call._computation.cache_clear()
        yield
    jax_call._computation.cache_clear()
