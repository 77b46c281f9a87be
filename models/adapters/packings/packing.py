"""A packing: how a frozen weight lies in fewer bits, as codes, under the weight's own name, and scales.

Scales are those of blocks: a weight is its codes' numbers times the scale of the block that each lies in. Both parts
have as many dimensions as the weight, so a weight's layout is theirs. Codes are unpacked just before use.

A weight is [..., rows, columns], and its inputs are one of the two.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# appended to a weight's name to name its scales
SCALE = "_scale"

Map = Callable[[Tensor], Tensor]

_ROUNDING = 2.0**-21  # of a code times its scale and back, relative
_MANTISSA = 2**23 - 1  # of a float32's bits
_FEW = 8


@dataclass(frozen=True)
class Weight:
    """The weight that a packing holds.

    Args:
        shape: of one layer's.
        inputs: the dimension of its inputs, -1 or -2.
        splits: the number of parts that devices hold of each dimension.
    """

    shape: tuple[int, ...]
    inputs: int = -1
    splits: tuple[int, ...] = ()

    def local(self, dim: int) -> int:
        """The size of ``dim``, counted from the end, on a device."""
        return self.shape[dim] // (self.splits[dim] if self.splits else 1)

    @property
    def turned(self) -> tuple[int, ...]:
        """Its dimensions in the order in which the inputs are the last but one."""
        last = len(self.shape) - 1
        return (*range(last - 1), last - 1, last) if self.inputs == -2 else (*range(last - 1), last, last - 1)


@dataclass(frozen=True)
class Part:
    """The codes, or the scales, of a weight.

    Args:
        dims: the weight's dimension that each of its dimensions lies along.
        steps: the number of the weight's elements along it that one of its elements stands for.
        units: the number of the weight's elements along it that devices can't split.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    dims: tuple[int, ...]
    steps: tuple[int, ...]
    units: tuple[int, ...]


class Packing(ABC):
    """A packing. ``title`` is what people call it, ``bits`` its size, scales included, for a weight of many blocks.

    ``again`` says in words what comes of a weight that was in this packing, is read, and packed once more.
    """

    title: str
    bits: float
    again: str
    # of codes and scales: no floats, so that nothing takes a gradient of them and every device moves them as they are
    code_dtype = torch.uint8
    scale_dtype = torch.float32

    def lacking(self, weight: Weight) -> str:
        """Why ``weight`` can't be packed; empty if it can."""
        return ""

    @abstractmethod
    def block(self, weight: Weight) -> tuple[int, ...]:
        """The sizes of a block with one scale, in each of the weight's dimensions."""

    def codes(self, weight: Weight) -> Part:
        """The part under the weight's own name."""
        ones = (1,) * len(weight.shape)
        return Part(weight.shape, self.code_dtype, tuple(range(len(ones))), ones, ones)

    def lies_turned(self, weight: Weight) -> bool:
        """True if codes lie with the weight's last two dimensions swapped."""
        dims = self.codes(weight).dims
        return dims != tuple(range(len(dims)))

    def scales(self, weight: Weight) -> Part:
        dims = self.codes(weight).dims
        block = tuple(self.block(weight)[dim] for dim in dims)
        shape = tuple(math.ceil(weight.shape[dim] / size) for dim, size in zip(dims, block, strict=True))
        return Part(shape, self.scale_dtype, dims, block, block)

    @abstractmethod
    def quantize(self, values: Tensor, weight: Weight) -> tuple[Tensor, Tensor]:
        """The codes of ``values``, one for each, and the scale of each block, both with the weight's dimensions.

        ``values`` are float32 and finite: whole blocks of ``weight``, or all that there is at its end.
        """

    def arrange(self, codes: Tensor, scale: Tensor, weight: Weight) -> tuple[Tensor, Tensor]:
        """Both parts as they are stored, of codes and scales as :meth:`quantize` gives them."""
        return codes.view(self.code_dtype), scale

    def pack(self, values: Tensor, weight: Weight) -> tuple[Tensor, Tensor]:
        """Codes and scales of ``values``, of any float dtype, as they are stored.

        Raises:
            ValueError: a value is not finite.
        """
        values = values.to(torch.float32)
        if not torch.isfinite(values).all():
            raise ValueError("a value that is no finite number")
        return self.arrange(*self.quantize(values, weight), weight)

    @abstractmethod
    def numbers(self, codes: Tensor) -> Tensor:
        """The number of each code, in float32."""

    def unpack(
        self, codes: Tensor, scale: Tensor, weight: Weight, dtype: torch.dtype, apart: Map = lambda x: x
    ) -> Tensor:
        """The whole weight, computed in float32 and rounded once to ``dtype``, by operations that XLA has.

        ``apart`` keeps the compiler from fusing its argument with what reads it. Codes and results change their shapes
        behind it: XLA would move the arithmetic past such a change, and then write float32 copies of both to memory.
        """
        return (self.numbers(codes) * scale).to(dtype)


def in_blocks(values: Tensor, block: tuple[int, ...]) -> Tensor:
    """``values``, padded with zeros to whole blocks, as [blocks of dimension 0, size of one, blocks of 1, …]."""
    short = [-size % each for size, each in zip(values.shape, block, strict=True)]
    if any(short):
        values = torch.nn.functional.pad(values, [n for pad in reversed(short) for n in (0, pad)])
    return values.reshape([n for size, each in zip(values.shape, block, strict=True) for n in (size // each, each)])


def largest(values: Tensor, block: tuple[int, ...], zeros: float = 1.0) -> Tensor:
    """The largest magnitude in each block; ``zeros`` where all are zeros."""
    found = in_blocks(values, block).abs().amax(tuple(range(1, 2 * values.dim(), 2)))
    return torch.where(found == 0, zeros, found)


def spread(scale: Tensor, times: int, dim: int, size: int) -> Tensor:
    """Each of ``scale`` this many times along ``dim``, of which the first ``size`` are kept."""
    if times == 1:
        return scale
    dim %= scale.dim()
    whole = scale.unsqueeze(dim + 1).expand(*scale.shape[: dim + 1], times, *scale.shape[dim + 1 :])
    return whole.flatten(dim, dim + 1).narrow(dim, 0, size)


# Codes are taken apart as float32 numbers, and compared with Python's integers: torch_xla makes powers and divisions of
# shifts, and compares integers, or float32 with a Python float, in 64 bits. A TPU takes long for all of these.
def split(number: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """``number`` // ``step`` and the rest, for whole numbers in float32 and a power of two."""
    high = torch.floor(number * (1 / step))
    return high, number - high * step


def signed(number: Tensor, sign: int) -> tuple[Tensor, Tensor]:
    """Whether the bit ``sign``, the highest, is set in ``number``, a whole one in float32; and the rest."""
    negative = number >= sign
    return negative, torch.where(negative, number - sign, number)


def chosen(number: Tensor, table: Sequence[float]) -> Tensor:
    """``table[number]``, for whole numbers in float32 and a table of 2^n; a TPU's gather would take far longer."""
    left: list[Any] = list(table)
    while len(left) > 1:
        half = len(left) // 2
        upper, number = signed(number, half)
        left = [torch.where(upper, high, low) for low, high in zip(left[:half], left[half:], strict=True)]
    found: Tensor = left[0]
    return found


def divided(values: Tensor, scale: Tensor, block: tuple[int, ...]) -> Tensor:
    """``values`` over the scale of their block."""
    for dim, each in enumerate(block):
        scale = spread(scale, each, dim, values.shape[dim])
    return values / scale


def found_again(
    values: Tensor, block: tuple[int, ...], most: Sequence[float], rounded: Map, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """The codes of ``values``, as float32 numbers, and the scale of each block, of this dtype.

    A block's largest magnitude becomes one of ``most``: the first with which ``rounded`` changes none of its values, so
    that what was made of such codes is found again; else the last of all. A power of two is best tried first, as the
    quotient is exact.
    """
    blocks = in_blocks(values, block)
    inside = tuple(range(1, blocks.dim(), 2))
    few = blocks[(slice(None), slice(_FEW)) * values.dim()]  # which tell of most blocks that no number fits
    each = largest(values, block).reshape([1 if dim in inside else size for dim, size in enumerate(blocks.shape)])

    def fits(values: Tensor, scale: Tensor) -> Tensor:
        off = rounded(values / scale).mul_(scale).sub_(values).abs_()
        return (off <= _ROUNDING * values.abs()).all(inside, keepdim=True)

    scale, left = (each / most[-1]).to(dtype), torch.ones_like(each, dtype=torch.bool)
    for number in most:
        tried = (each / number).to(dtype)
        found = left & fits(few, tried)
        found = found & fits(blocks, tried) if found.any() else found
        scale, left = torch.where(found, tried, scale), left & ~found
        if not left.any():
            break
    scale, found = scale.squeeze(inside), ~left.squeeze(inside)
    codes = rounded(divided(values, scale, block))
    if dtype == torch.float32 and found.any():
        # a part of a rounded product may be off by a bit, but a value whose code is a power of two has the scale's own
        powers = (codes.view(torch.int32) & _MANTISSA == 0) & (codes != 0)
        own = in_blocks((values / codes).where(powers, 0.0), block).amax(inside)
        scale = torch.where(found & (own > 0), own, scale)
    return codes, scale
