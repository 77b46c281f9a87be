"""Other kernels than a device's own: a TPU's on virtual devices, and the portable attention in place of any."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from shardwright.models.attention import splash
from shardwright.models.attention.portable import portable
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


def without_kernel(patch: pytest.MonkeyPatch) -> None:
    """Has XLA devices run the portable attention, as they do where the kernel can't do what is asked."""

    def attend(tensors: Any, *others: Any) -> torch.Tensor:
        *inputs, settings = others
        return portable(*tensors, *inputs, settings.scoring).transpose(1, 2)

    patch.setattr(splash, "attend", attend)
