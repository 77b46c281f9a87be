"""FLOPs of dots and convolutions, from their shapes: 2 × multiply-adds.

The TPU compiler turns dots into convolutions, batched ones into convolutions with padding and dilation. A position that
only meets padding, or a hole that dilation makes, does no work and counts nothing.
"""

import math
import re
from functools import lru_cache

import numpy as np

from shardwright.compile.hlo.text import Instruction


def dot_flops(dot: Instruction) -> float:
    contracted = dot.attribute(r"lhs_contracting_dims=\{([\d,]*)\}") or ""
    left = dot.inputs[0].dims
    return 2.0 * dot.leaves[0].elements * math.prod(left[int(d)] for d in contracted.split(",") if d)


def convolution_flops(convolution: Instruction) -> float:
    """FLOPs of a convolution of an input and a kernel; 0 if its dimensions are not labelled."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", convolution.attributes)
    if labels is None:
        return 0.0
    shapes = [leaf.dims for leaf in (*convolution.inputs[:2], convolution.leaves[0])]
    left, right, out = (dict(zip(text, dims, strict=False)) for text, dims in zip(labels.groups(), shapes, strict=True))
    window = convolution.attribute(r"window=\{([^}]*)\}") or ""
    batch_groups = int(convolution.attribute(r"batch_group_count=(\d+)") or 1)
    work = left["b"] / batch_groups * right["i"] * right["o"]
    for number, dimension in enumerate(sorted(filter(str.isdigit, right))):
        low = int(_window(window, "pad", number, "0_0").split("_")[0])
        factors = [int(_window(window, key, number, "1")) for key in ("stride", "lhs_dilate", "rhs_dilate")]
        work *= _valid(left[dimension], out[dimension], right[dimension], low, *factors)
    return 2.0 * work


def _window(window: str, key: str, number: int, default: str) -> str:
    """The value of ``key=2x3`` for the spatial dimension ``number``."""
    match = re.search(rf"(?:^|\s){key}=(\S+)", window)
    return match[1].split("x")[number] if match else default


@lru_cache(maxsize=4096)
def _valid(size: int, out: int, kernel: int, low: int, stride: int, left_dilation: int, right_dilation: int) -> int:
    """Counts the pairs of an output and a kernel position that meet an input element, in one spatial dimension."""
    position = np.arange(out)[:, None] * stride + np.arange(kernel)[None, :] * right_dilation - low
    inside = (position >= 0) & (position <= (size - 1) * left_dilation) & (position % left_dilation == 0)
    return int(inside.sum())
