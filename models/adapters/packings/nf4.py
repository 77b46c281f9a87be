"""NF4: a normal distribution's quantiles, times the largest magnitude of each 64 inputs, in 4.5 bits a weight.

QLoRA's (arXiv:2305.14314), with bitsandbytes' table and its block of 64; the magnitudes are float32, as without double
quantization.
"""

import torch
from torch import Tensor

from shardwright.models.adapters.packings.four_bits import FourBits
from shardwright.models.adapters.packings.packing import Weight, chosen, divided, largest

# bitsandbytes/functional.py, `get_4bit_type`, bitsandbytes 0.50
TABLE = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


class Nf4(FourBits):
    """A value gets the nearest number of the table."""

    title, bits, size = "NF4", 4.5, 64
    again = "the same codes; the same values where the largest are bfloat16 numbers"

    def quantize(self, values: Tensor, weight: Weight) -> tuple[Tensor, Tensor]:
        block = self.block(weight)
        scale = largest(values, block)
        table = torch.tensor(TABLE)
        inside = divided(values, scale, block).contiguous()
        return torch.bucketize(inside, (table[1:] + table[:-1]) / 2).to(torch.uint8), scale

    def numbers(self, codes: Tensor) -> Tensor:
        return chosen(codes, TABLE)
