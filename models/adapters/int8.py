"""Frozen weights as int8 with a scale for each row (LLM.int8's absmax, arXiv:2208.07339), in half of bfloat16's bytes.

They are multiplied by their scales just before use, so a product is that of a rounded weight.
"""

import torch
from torch import Tensor

# appended to a weight's name to name its scales
SCALE = "_scale"
_LARGEST = 127


def to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``weight`` [..., n] as int8, and float32 scales [..., 1]; a value is off by at most half a scale.

    Raises:
        ValueError: a value is not finite.
    """
    weight = weight.float()
    scale = weight.abs().amax(-1, keepdim=True) / _LARGEST
    if not torch.isfinite(scale).all():
        raise ValueError("a value that is no finite number")
    scale[scale == 0] = 1.0
    return (weight / scale).round().to(torch.int8), scale


def from_int8(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight of ``values`` [..., n] and ``scale`` [..., 1], rounded once, to ``dtype``."""
    return (values.to(torch.float32) * scale).to(dtype)
