"""4-bit integers with a bfloat16 scale for each 32 inputs, in 4.5 bits a weight, as Kimi-K2 is published.

They are compressed-tensors' symmetric groups (https://github.com/vllm-project/compressed-tensors, pack_quantized).
"""

import torch
from torch import Tensor

from shardwright.models.adapters.packings.four_bits import FourBits
from shardwright.models.adapters.packings.packing import Weight, found_again

_LEAST = -8  # of the integers, which go to 7
# what a block's largest magnitude may be: 7 is Kimi's; 7.5 is compressed-tensors' rule, which gives 7 or -8
_MOST = (7, 8, 6, 5, 4, 3, 2, 1, 7.5)


class Int4(FourBits):
    """A weight that was in this packing, or in groups of a multiple of 32 inputs, gets its own scales again."""

    title, bits, size = "INT4", 4.5, 32
    again = "the same values where scales are bfloat16 numbers"
    scale_dtype = torch.bfloat16

    def quantize(self, values: Tensor, weight: Weight) -> tuple[Tensor, Tensor]:
        codes, scale = found_again(values, self.block(weight), _MOST, _rounded, self.scale_dtype)
        return (codes - _LEAST).to(torch.uint8), scale

    def numbers(self, codes: Tensor) -> Tensor:
        return codes + _LEAST

    def factors(self, scale: Tensor) -> Tensor:
        return scale.to(torch.float32)


def _rounded(numbers: Tensor) -> Tensor:
    return numbers.round().clamp(_LEAST, -_LEAST - 1)
