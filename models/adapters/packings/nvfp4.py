"""NVFP4: 4-bit floats (e2m1) with a scale for each 16 inputs.

ModelOpt and compressed-tensors publish a scale as an FP8 number, and one more number for the whole weight, in 4.5 bits
a weight. Their product in float32 is what multiplies a code, and is held here: joined weights may have several of those
numbers.
"""

import torch
from torch import Tensor

from shardwright.models.adapters.packings.mxfp4 import E2m1, nearest
from shardwright.models.adapters.packings.packing import Weight, found_again

# what a block's largest magnitude may be, but for a power of two; 6 is NVFP4's rule
_MOST = (4.0, 6.0)


class Nvfp4(E2m1):
    """A weight that was in this packing gets scales again with which its values are the same."""

    title, bits, size, again = "NVFP4", 6.0, 16, "the same values"

    def quantize(self, values: Tensor, weight: Weight) -> tuple[Tensor, Tensor]:
        numbers, scale = found_again(values, self.block(weight), _MOST, self._rounded)
        return nearest(numbers), scale

    def _rounded(self, numbers: Tensor) -> Tensor:
        return self.numbers(nearest(numbers).to(torch.float32))
