"""8-bit integers with a scale for each row of the last dimension (LLM.int8's absmax, arXiv:2208.07339)."""

import torch
from torch import Tensor

from shardwright.models.adapters.packings.packing import Packing, Weight, divided, largest

_LARGEST = 127


class Int8(Packing):
    """A value is off by half a scale at most."""

    title, bits, again = "int8", 8.0, "within a rounding of its scale"
    code_dtype = torch.int8

    def block(self, weight: Weight) -> tuple[int, ...]:
        return (*[1] * (len(weight.shape) - 1), weight.shape[-1])

    def quantize(self, values: Tensor, weight: Weight) -> tuple[Tensor, Tensor]:
        block = self.block(weight)
        scale = largest(values, block, zeros=_LARGEST) / _LARGEST
        return divided(values, scale, block).round().to(torch.int8), scale

    def numbers(self, codes: Tensor) -> Tensor:
        return codes.to(torch.float32)
