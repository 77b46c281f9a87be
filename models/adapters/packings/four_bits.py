"""Packings of 4-bit codes, two in a byte, with a scale for each block of so many inputs.

Both parts lie with the inputs as the last dimension but one, whichever way the weight has them: a TPU keeps the last
dimension along its lanes, and what is repeated or taken apart along the other costs nothing. A byte's low half is of
the first half of a group of inputs, its high half of the second: of 64, so that half a group is the 32 rows of a tile
of bytes, or of 32 where 64 don't divide a device's inputs.
"""

from dataclasses import replace

import torch
from torch import Tensor

from shardwright.models.adapters.packings.packing import Map, Packing, Part, Weight, split

_GROUP = 64


class FourBits(Packing):
    """A packing of 4-bit codes, 0 … 15 in float32; ``size`` is the number of inputs in a block."""

    size: int

    def lacking(self, weight: Weight) -> str:
        inputs, least = weight.shape[weight.inputs], max(self.size, _GROUP // 2)
        return f"its {inputs} inputs are no multiple of {least}" * bool(inputs % least)

    def block(self, weight: Weight) -> tuple[int, ...]:
        sizes = [1] * len(weight.shape)
        sizes[weight.inputs] = self.size
        return tuple(sizes)

    def codes(self, weight: Weight) -> Part:
        *others, inputs, outputs = (weight.shape[dim] for dim in weight.turned)
        ones = (1,) * len(others)
        units = (*ones, max(self._group(weight), self.size), 1)
        return Part((*others, inputs // 2, outputs), self.code_dtype, weight.turned, (*ones, 2, 1), units)

    def scales(self, weight: Weight) -> Part:
        return replace(super().scales(weight), units=self.codes(weight).units)

    def arrange(self, codes: Tensor, scale: Tensor, weight: Weight) -> tuple[Tensor, Tensor]:
        order, half = weight.turned, self._group(weight) // 2
        low, high = codes.permute(order).unflatten(-2, (-1, 2, half)).unbind(-3)
        return (low | high << 4).flatten(-3, -2), scale.permute(order).contiguous()

    def unpack(
        self, codes: Tensor, scale: Tensor, weight: Weight, dtype: torch.dtype, apart: Map = lambda x: x
    ) -> Tensor:
        half = self._group(weight) // 2
        rows = min(half, self.size)  # of a half with one scale
        groups = apart(codes.unflatten(-2, (-1, half // rows, rows))).unsqueeze(-4).to(torch.float32)
        # in bfloat16, or the compiler would write both to memory in float32
        high, low = (apart(part.to(torch.bfloat16)) for part in split(groups, 16))
        is_high = torch.arange(2, device=codes.device).reshape(2, 1, 1, 1) > 0
        taken = torch.where(is_high, high, low).to(torch.float32)
        numbers = self.scaled(taken, scale, (taken.shape[-5], -1, half // rows))
        found = apart(numbers.to(dtype)).flatten(-5, -2)
        return found if weight.inputs == -2 else found.transpose(-1, -2)

    def scaled(self, codes: Tensor, scale: Tensor, blocks: tuple[int, ...]) -> Tensor:
        """The values of ``codes`` [.., blocks, rows, outputs], whose stored scales are one for each block."""
        return self.numbers(codes) * self.factors(scale).unflatten(-2, blocks).unsqueeze(-2)

    def factors(self, scale: Tensor) -> Tensor:
        """Stored scales as factors, in float32."""
        return scale

    def _group(self, weight: Weight) -> int:
        return _GROUP if weight.local(weight.inputs) % _GROUP == 0 else _GROUP // 2
