"""Frozen weights as integers of 8 bits with a scale for each row (LLM.int8's absmax, arXiv:2208.07339): half of
bfloat16's bytes.

They are multiplied out just before use, so a product is the one of a weight that was rounded.
"""

from __future__ import annotations

import torch

# what follows a weight's name in the name of its scales
SCALE = "_scale"
_LARGEST = 127


def to_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``weight`` [..., n] as int8 of its shape, and scales [..., 1] in float32; a value is off by half a scale at most.

    Raises:
        ValueError: a value is not finite.
    """
    weight = weight.float()
    scale = weight.abs().amax(-1, keepdim=True) / _LARGEST
    if not torch.isfinite(scale).all():
        raise ValueError("a value that is no finite number")
    scale[scale == 0] = 1.0
    return (weight / scale).round().to(torch.int8), scale


def from_int8(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weight that ``values`` [..., n] and ``scale`` [..., 1] stand for, rounded once, to ``dtype``."""
    return (values.to(torch.float32) * scale).to(dtype)
