"""A published format: which tensors of a file hold one weight together, and which values they stand for."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shardwright.files.arrays import Array, LazyArray, Slices

DEQUANTIZED = torch.bfloat16  # the dtype of what is read

# end of a tensor's name -> the tensor
Parts = Mapping[str, Array]
# values of a config.json's quantization_config
Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Format:
    """A way to store a weight ``STEM + plain`` as tensors ``STEM + tail``.

    ``decode`` maps them to an array of the weight, of which reading a slice reads only that slice's blocks; nothing is
    read before. It raises ValueError, with the reason, for parts that do not go together. ``holds`` tells parts of
    this format from those of another with the same names.
    """

    title: str  # as a run's first lines name it
    main: str  # the end of the name of the codes
    scales: tuple[str, ...]  # ends of the other names that a weight needs
    holds: Callable[[Parts], bool]
    decode: Callable[[Parts, Settings], Array]
    plain: str = ".weight"
    unread: tuple[str, ...] = ()  # ends of names that may be there, and of which the values do not depend


def shape_error(name: str, array: Array, wanted: str) -> ValueError:
    """An error for a part of another shape than ``wanted``, in words."""
    return ValueError(f"{name} has shape {list(array.shape)}, where {wanted} is needed")


def blocks_of(part: slice, block: int) -> slice:
    """The blocks of this many elements that the elements ``part`` lie in."""
    return slice(part.start // block, -(-part.stop // block))


def spread(scales: torch.Tensor, where: Slices, blocks: tuple[int, ...]) -> torch.Tensor:
    """Scales of the blocks around ``where`` [.., blocks], as one for each element [.., elements] of ``where``."""
    for dim, (part, block) in enumerate(zip(where, blocks, strict=True)):
        if block > 1:
            first = part.start // block * block
            scales = scales.repeat_interleave(block, dim).narrow(dim, part.start - first, part.stop - part.start)
    return scales


def scaled(codes: Array, scales: Array, blocks: tuple[int, ...]) -> LazyArray:
    """``codes`` times their block's scale, in float32 rounded once; a dimension's block may be cut off at its end."""

    def read(where: Slices) -> torch.Tensor:
        inside = tuple(blocks_of(part, block) for part, block in zip(where, blocks, strict=True))
        factors = spread(scales[inside].to(torch.float32), where, blocks)
        return (codes[where].to(torch.float32) * factors).to(DEQUANTIZED)

    return LazyArray(tuple(codes.shape), DEQUANTIZED, read)
