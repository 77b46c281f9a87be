"""4-bit integers less a zero, times a float16 scale, for each 32 inputs, as GPTQ and AWQ publish.

Their groups (arXiv:2210.17323, arXiv:2306.00978; most often of 128 inputs) are several blocks of the same scale.
"""

from dataclasses import replace

import torch
from torch import Tensor

from shardwright.models.adapters.packings.four_bits import FourBits
from shardwright.models.adapters.packings.packing import Part, Weight, found_again

_CODES = 15  # the largest code
# what a block's largest magnitude may be, in scales: a zero goes to 16; of a weight that was in no such packing, 8
_MOST = (16, 15, 14, 13, 12, 11, 10, 9, 7, 6, 5, 4, 3, 2, 1, 8)
_LEAST = 2.0**-22  # an eighth of what is smaller is no float16


class Int4Zeros(FourBits):
    """The scales have twice as many numbers as there are blocks: each block's scale, and behind it its zero."""

    title, bits, size = "INT4 with zeros", 5.0, 32
    again = "the same values where scales are float16 numbers"
    scale_dtype = torch.float16

    def scales(self, weight: Weight) -> Part:
        part = super().scales(weight)
        *others, blocks, outputs = part.shape
        return replace(part, shape=(*others, 2 * blocks, outputs), steps=(*part.steps[:-2], self.size // 2, 1))

    def quantize(self, values: Tensor, weight: Weight) -> tuple[Tensor, Tensor]:
        blocks = values.movedim(weight.inputs, -1).unflatten(-1, (-1, self.size))
        rows = blocks.flatten(0, -2)
        rows = torch.where(rows.abs().amax(-1, keepdim=True) < _LEAST, 0.0, rows)
        integers, scale = found_again(rows, (1, self.size), _MOST, _rounded, self.scale_dtype)
        least = integers.amin(-1, keepdim=True)
        codes = (integers - least).to(torch.uint8).reshape(blocks.shape)
        pairs = torch.cat([scale, -least.to(self.scale_dtype)], -1).reshape(*blocks.shape[:-1], 2)
        return codes.flatten(-2).movedim(-1, weight.inputs), pairs.flatten(-2).movedim(-1, weight.inputs)

    def numbers(self, codes: Tensor) -> Tensor:
        return codes

    def scaled(self, codes: Tensor, scale: Tensor, blocks: tuple[int, ...]) -> Tensor:
        pairs = scale.unflatten(-2, (*blocks, 2)).to(torch.float32)
        return (codes - pairs[..., 1:, :]) * pairs[..., :1, :]


def _rounded(numbers: Tensor) -> Tensor:
    whole = numbers.round()
    return torch.minimum(whole, whole.amin(-1, keepdim=True) + _CODES)
