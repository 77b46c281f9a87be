"""8-bit floats (e4m3: 4 bits of exponent, 3 of mantissa), with a scale for each block or each output.

Blocks of 128 × 128 are DeepSeek-V3's (arXiv:2412.19437, `weight_scale_inv`), and those of Qwen's -FP8 repositories;
a scale for each output is compressed-tensors' per-channel FP8. Blocks at a weight's end may be smaller. Codes lie as
bytes.
"""

import math

import torch
from torch import Tensor

from shardwright.models.adapters.packings.packing import (
    Map,
    Packing,
    Weight,
    chosen,
    found_again,
    signed,
    split,
    spread,
)

_BLOCK = 128
_E4M3 = torch.float8_e4m3fn
# what a block's largest magnitude may become: one for each mantissa, for a scale and half of it hold the same values;
# the largest number of all, as most makers have it
_MOST = (256.0, 288.0, 320.0, 352.0, 384.0, 416.0, 240.0, 448.0)
_STEPS = [2.0 ** (max(exponent, 1) - 10) for exponent in range(16)]  # between numbers of an exponent


class _Fp8(Packing):
    again = "the same values"

    def quantize(self, values: Tensor, weight: Weight) -> tuple[Tensor, Tensor]:
        block = tuple(min(pair) for pair in zip(self.block(weight), values.shape, strict=True))
        codes, scale = found_again(values, block, _MOST, _rounded)
        return codes.to(_E4M3), scale

    def numbers(self, codes: Tensor) -> Tensor:
        # there is no NaN among them; by arithmetic: torch_xla can't take bits for another dtype
        negative, size = signed(codes.to(torch.float32), 128)
        exponent, mantissa = split(size, 8)
        size = torch.where(exponent >= 1, mantissa + 8, mantissa) * chosen(exponent, _STEPS)
        return torch.where(negative, -size, size)


class Fp8Blocks(_Fp8):
    """A scale for each block of rows and columns."""

    title, bits = "FP8 in blocks of 128 × 128", 8.0 + 32 / _BLOCK**2

    def block(self, weight: Weight) -> tuple[int, ...]:
        return (*[1] * (len(weight.shape) - 2), _BLOCK, _BLOCK)

    def unpack(
        self, codes: Tensor, scale: Tensor, weight: Weight, dtype: torch.dtype, apart: Map = lambda x: x
    ) -> Tensor:
        *others, rows, columns = codes.shape
        # rows by groups, each in one block and on one device: 128 of them, where these divide the rows
        group = math.gcd(weight.local(-2), _BLOCK)
        scale = spread(spread(scale, _BLOCK, -1, columns), _BLOCK // group, -2, rows // group)
        grouped = apart(codes.reshape(*others, rows // group, group, columns))
        return apart((self.numbers(grouped) * scale.unsqueeze(-2)).to(dtype)).reshape(codes.shape)


class Fp8Rows(_Fp8):
    """A scale for each output."""

    title, bits = "FP8 with a scale an output", 8.0

    def block(self, weight: Weight) -> tuple[int, ...]:
        last = (weight.shape[-2], 1) if weight.inputs == -2 else (1, weight.shape[-1])
        return (*[1] * (len(weight.shape) - 2), *last)


def _rounded(numbers: Tensor) -> Tensor:
    return numbers.clamp(-_MOST[-1], _MOST[-1]).to(_E4M3).to(torch.float32)
