"""MXFP4: 4-bit floats (e2m1) with a power of two for each 32 inputs, in 4.25 bits a weight.

The OCP Microscaling formats' (https://www.opencomputeproject.org, MX v1.0): GPT-OSS is published in it.
"""

import torch
from torch import Tensor

from shardwright.models.adapters.packings.four_bits import FourBits
from shardwright.models.adapters.packings.packing import Weight, chosen, divided, largest, signed, split

_LARGEST = 6.0
_BIAS = 127  # of the scales' exponents (e8m0)
_SIGN = 8


class E2m1(FourBits):
    """Codes of a sign, 2 bits of exponent and 1 of mantissa."""

    def numbers(self, codes: Tensor) -> Tensor:
        negative, size = signed(codes, _SIGN)
        size = torch.where(size < 4, size * 0.5, torch.where(size < 6, size - 2, 2 * size - 8))
        return torch.where(negative, -size, size)


class Mxfp4(E2m1):
    """The scale is the least power of two with which no value of its block is beyond the largest code, 6.

    So values that were packed once, by any rule, are packed again without a difference.
    """

    title, bits, size, again = "MXFP4", 4.25, 32, "the same values"
    scale_dtype = torch.uint8

    def quantize(self, values: Tensor, weight: Weight) -> tuple[Tensor, Tensor]:
        block = self.block(weight)
        mantissa, exponent = torch.frexp(largest(values, block) / _LARGEST)
        # 2^exponent is above the quotient; at half of it, the power below is enough
        exponent = (exponent - (mantissa == 0.5).to(exponent.dtype)).clamp(1 - _BIAS, _BIAS)
        inside = divided(values, torch.ldexp(torch.ones(()), exponent), block)
        return nearest(inside), (exponent + _BIAS).to(torch.uint8)

    def factors(self, scale: Tensor) -> Tensor:
        # torch_xla can't take bits for another dtype, and an exponential need not be exact
        high, low = split(scale.to(torch.float32), 16)
        steps = chosen(high, [2.0 ** (16 * n + 7 - _BIAS) for n in range(16)])
        return steps * chosen(low, [2.0 ** (n - 7) for n in range(16)])


def nearest(numbers: Tensor) -> Tensor:
    """The codes of the nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives."""
    size = numbers.abs()
    # in the middle between two, the one with an even code
    codes = sum(
        (size > edge if even else size >= edge).to(torch.uint8)
        for edge, even in ((0.25, 1), (0.75, 0), (1.25, 1), (1.75, 0), (2.5, 1), (3.5, 0), (5.0, 1))
    )
    assert isinstance(codes, Tensor)
    return codes | numbers.signbit().to(torch.uint8) * _SIGN
