"""8-bit integers with a scale for each row of the last dimension (LLM.int8's absmax, arXiv:2208.07339)."""

import torch
from torch import Tensor

from shardwright.models.adapters.packings.packing import Packing, Weight, found_again

_LEAST = -128
# what a row's largest magnitude may become: compressed-tensors', whose 127.5 may be either end, and LLM.int8's
_MOST = (128.0, 127.0)


class Int8(Packing):
    """A value is off by half a scale at most."""

    title, bits, again = "int8", 8.0, "the same codes, and scales to a rounding"
    code_dtype = torch.int8

    def block(self, weight: Weight) -> tuple[int, ...]:
        return (*[1] * (len(weight.shape) - 1), weight.shape[-1])

    def quantize(self, values: Tensor, weight: Weight) -> tuple[Tensor, Tensor]:
        codes, scale = found_again(values, self.block(weight), _MOST, _rounded)
        return codes.to(torch.int8), scale

    def numbers(self, codes: Tensor) -> Tensor:
        return codes.to(torch.float32)


def _rounded(numbers: Tensor) -> Tensor:
    return numbers.round().clamp(_LEAST, -_LEAST - 1)
