"""A published format: which tensors of a file hold one weight together, and which values they stand for.

The rest are the pieces that formats are made of: arrays of codes unpacked, of numbers, of codes times scales.
"""

import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwright.files.arrays import Array, LazyArray, Slices, mapped, whole
from shardwright.files.safetensors_file import DTYPES

DEQUANTIZED = torch.bfloat16  # the dtype of what is read, unless it is packed again
# dtypes that a part may have
ANY = frozenset(DTYPES.values())
FLOATS = frozenset(dtype for dtype in ANY if dtype.is_floating_point)
WIDE_FLOATS = frozenset(dtype for dtype in FLOATS if dtype.itemsize > 1)  # FP8: codes
EXPONENTS = frozenset({torch.uint8, torch.float8_e8m0fnu})  # powers of two (E8M0)
BYTES = frozenset({torch.uint8, torch.int8})
_PIECE = 1 << 19  # elements that are dequantized at a time, so that a read takes little more than its result

# end of a tensor's name -> the tensor
Parts = Mapping[str, Array]
# values of a config.json's quantization_config
Settings = Mapping[str, Any]
# (a weight's values, settings, the tensors that hold it in the base, or none) -> end of the name -> tensor, codes first
Encode = Callable[[torch.Tensor, Settings, Parts], Mapping[str, torch.Tensor]]


@dataclass(frozen=True, eq=False)
class Format:
    """A way to store a weight ``STEM + plain`` as tensors ``STEM + tail``.

    ``decode`` maps them to an array of the weight, float32 or already rounded, of which reading a slice reads only that
    slice's blocks; before, it reads no more than the parts that say a shape or an order. It raises ValueError, with the
    reason, for parts that do not go together. ``encode`` makes such tensors (formats/encode.py).
    """

    title: str  # as a run's first lines name it
    # ends of the names that a weight needs, the codes' first for most, and dtypes: they tell formats of equal names
    parts: Mapping[str, Collection[torch.dtype]]
    decode: Callable[[Parts, Settings], Array]
    plain: str = ".weight"
    fits: Callable[[Parts], bool] = lambda parts: True  # where dtypes don't tell
    optional: tuple[str, ...] = ()  # ends of names that a weight may have beside
    turned: bool = False  # whether ``decode`` gives the weight with its last two dimensions swapped
    unread: tuple[str, ...] = ()  # ends of names that may be there, and on which the values do not depend
    encode: Encode | None = None  # None: it is read, and not written
    unwritten: str = "no way back into it is published"  # why there is no `encode`

    @property
    def main(self) -> str:
        """The end of a name by which the format is known."""
        return next(iter(self.parts))

    def weight(self, parts: Parts, settings: Settings, dtype: torch.dtype = DEQUANTIZED) -> Array:
        """The weight that ``parts`` hold, its float32 values rounded to ``dtype``; raises ValueError as ``decode``."""
        found = self.decode(parts, settings)
        found = in_pieces(found, dtype) if self.title and found.dtype == torch.float32 else found
        # in pieces as it is stored: a row of the result may go through all that is
        return transposed(found) if self.turned else found

    def parts_of(self, stem: str, tensors: Mapping[str, Array]) -> Parts | None:
        """The tensors of the weight ``stem`` by the ends of their names; None: they are not in this format."""
        parts = {tail: tensors[stem + tail] for tail in (*self.parts, *self.optional) if stem + tail in tensors}
        there = all(tail in parts and parts[tail].dtype in dtypes for tail, dtypes in self.parts.items())
        return parts if there and self.fits(parts) else None


def shape_error(name: str, array: Array, wanted: str) -> ValueError:
    """An error for a part of another shape than ``wanted``, in words."""
    return ValueError(f"{name} has shape {list(array.shape)}, where {wanted} is needed")


# ---- arrays made of arrays ----


def transposed(array: Array) -> LazyArray:
    """``array`` [.., m, n] as [.., n, m]."""
    *front, rows, columns = array.shape

    def read(where: Slices) -> torch.Tensor:
        return array[(*where[:-2], where[-1], where[-2])].transpose(-1, -2)

    return LazyArray((*front, columns, rows), array.dtype, read)


def picked(array: Array, index: torch.Tensor, dim: int) -> LazyArray:
    """The rows ``index`` of dimension ``dim`` of ``array``, in that order; reads those from the least to the greatest.

    Raises ValueError if there is no such row.
    """
    shape = list(array.shape)
    if len(index) and not (int(index.min()) >= 0 and int(index.max()) < shape[dim]):
        raise ValueError(f"groups {int(index.min())} to {int(index.max())} are named, where there are {shape[dim]}")
    shape[dim] = len(index)
    dim %= len(shape)

    def read(where: Slices) -> torch.Tensor:
        wanted = index[where[dim]].long()
        first, last = (int(wanted.min()), int(wanted.max()) + 1) if len(wanted) else (0, 0)
        rows = array[(*where[:dim], slice(first, last), *where[dim + 1 :])]
        return rows.index_select(dim, wanted - first)

    return LazyArray(tuple(shape), array.dtype, read)


def powers_of_two(exponents: Array) -> Array:
    """E8M0 numbers as float32, 2^(byte - 127), under both of their dtypes; arrays of other dtypes as they are."""
    if exponents.dtype not in EXPONENTS:
        return exponents
    return mapped(exponents, lambda bytes_: bytes_.view(torch.float8_e8m0fnu).to(torch.float32), torch.float32)


def unpacked(
    words: Array, bits: int, dim: int, size: int | None = None, order: Sequence[int] | None = None
) -> LazyArray:
    """Unsigned codes of ``bits`` bits [.., size, ..], as uint8, packed along dimension ``dim`` of ``words``.

    The first lies in the lowest bits, and a code may go over a word's end. ``order``: the places in a word of its
    codes, if another. ``size`` drops codes at the end.
    """
    dim %= len(words.shape)
    width = words.dtype.itemsize * 8
    together = math.lcm(width, bits)  # the bits after which a word and a code end together
    held = words.shape[dim] * width // bits
    shape = (*words.shape[:dim], held if size is None else size, *words.shape[dim + 1 :])

    def read(where: Slices) -> torch.Tensor:
        part, codes_in, words_in = where[dim], together // bits, together // width
        first, last = part.start // codes_in, -(-part.stop // codes_in)
        read_words = words[(*where[:dim], slice(first * words_in, last * words_in), *where[dim + 1 :])]
        codes = _codes(read_words.movedim(dim, -1).clone(memory_format=torch.contiguous_format), bits)
        if order is not None:
            codes = codes.unflatten(-1, (-1, len(order)))[..., list(order)].flatten(-2)
        return codes.narrow(-1, part.start - first * codes_in, part.stop - part.start).movedim(-1, dim)

    return LazyArray(shape, torch.uint8, read)


def _codes(words: torch.Tensor, bits: int) -> torch.Tensor:
    """All codes in ``words`` [.., n], as bytes."""
    in_bytes = words.view(torch.uint8)  # safetensors, and all machines that this runs on, are little-endian
    if bits == 8:
        return in_bytes
    if bits == 4:  # the same as below, at twice the speed and more
        return torch.stack((in_bytes & 15, in_bytes >> 4), -1).flatten(-2)
    if 8 % bits == 0:
        return ((in_bytes.unsqueeze(-1) >> torch.arange(0, 8, bits, dtype=torch.uint8)) & (2**bits - 1)).flatten(-2)
    in_bits = _codes(words, 1).unflatten(-1, (-1, bits))
    return (in_bits << torch.arange(bits, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)


def looked_up(table: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """The numbers of ``table`` that ``codes`` stand for; twice as fast as an index."""
    return table.index_select(0, codes.flatten().int()).reshape(codes.shape)


@functools.cache
def _numbers(dtype: torch.dtype) -> torch.Tensor:
    """The float32 numbers of all codes of an 8-bit float, by the code's bits."""
    return torch.arange(256, dtype=torch.uint8).view(dtype).to(torch.float32)


def _as_floats(codes: torch.Tensor) -> torch.Tensor:
    if codes.dtype.is_floating_point and codes.dtype.itemsize == 1:  # torch's own cast takes longer
        return looked_up(_numbers(codes.dtype), codes.view(torch.uint8))
    return codes.to(torch.float32)


# ---- codes times scales ----


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


def scaled(
    codes: Array,
    scales: Array,
    stated: Sequence[tuple[int, ...]],
    zeros: Array | int = 0,
    *,
    others: bool = False,
) -> LazyArray:
    """(``codes`` - ``zeros``) × ``scales`` in float32; a dimension's block may be cut off at its end.

    ``stated`` and ``others``: as :func:`block_shape`, which tells the blocks. ``zeros``: one number, or one for each
    scale. Raises ValueError for scales or zeros of another shape.
    """
    scales = with_dimensions(scales, len(codes.shape))
    blocks = block_shape(scales, codes.shape, stated, others=others)
    if not isinstance(zeros, int):
        zeros = with_dimensions(zeros, len(codes.shape))
        if tuple(zeros.shape) != tuple(scales.shape):
            raise shape_error("its zeros", zeros, f"{list(scales.shape)}, one for each scale,")

    def read(where: Slices) -> torch.Tensor:
        inside = tuple(blocks_of(part, block) for part, block in zip(where, blocks, strict=True))
        values = _as_floats(codes[where])
        if not isinstance(zeros, int):
            values = values - spread(zeros[inside].to(torch.float32), where, blocks)
        elif zeros:
            values = values - zeros
        return values * spread(scales[inside].to(torch.float32), where, blocks)

    return dequantized(codes.shape, read)


def dequantized(shape: Sequence[int], read: Callable[[Slices], torch.Tensor]) -> LazyArray:
    """An array of the float32 values that ``read`` computes."""
    return LazyArray(tuple(shape), torch.float32, read)


def in_pieces(array: Array, dtype: torch.dtype) -> LazyArray:
    """``array`` rounded to ``dtype``, and computed a piece at a time: what a slice takes beside itself stays small."""

    def read(where: Slices) -> torch.Tensor:
        out = torch.empty([part.stop - part.start for part in where], dtype=dtype)
        for piece in _pieces(where) if out.numel() else ():
            place = (slice(p.start - w.start, p.stop - w.start) for p, w in zip(piece, where, strict=True))
            out[tuple(place)] = array[piece]
        return out

    return LazyArray(tuple(array.shape), dtype, read)


def _pieces(where: Slices) -> Iterator[Slices]:
    """``where`` in parts of few elements, or of one row of the last dimension."""
    if not where:
        yield where
        return
    first, *rest = where
    row = math.prod(part.stop - part.start for part in rest)
    if len(where) == 1 or row <= _PIECE:
        step = max(1, _PIECE // max(1, row))
        for start in range(first.start, first.stop, step):
            yield (slice(start, min(start + step, first.stop)), *rest)
        return
    for index in range(first.start, first.stop):
        for piece in _pieces(tuple(rest)):
            yield (slice(index, index + 1), *piece)


# ---- which element has which scale ----


def block_shape(
    scales: Array, shape: Sequence[int], stated: Sequence[tuple[int, ...]], *, others: bool = False
) -> tuple[int, ...]:
    """The elements [one for each dimension of ``shape``] that share one of ``scales``; ValueError if these don't fit.

    The first of the ``stated`` blocks (of the last dimensions) that fits; of ``others``, all of a dimension, or one
    each.
    """
    blocks = [(*[1] * (len(shape) - len(block)), *block)[-len(shape) :] for block in stated]
    if others:
        blocks.append(tuple(size if count == 1 else 1 for count, size in zip(scales.shape, shape, strict=True)))
    grids = [[-(-size // max(1, part)) for size, part in zip(shape, block, strict=True)] for block in blocks]
    for block, grid in zip(blocks, grids, strict=True):
        if list(scales.shape) == grid:
            return block
    each = " × ".join(map(str, stated[0]))
    raise shape_error("its scale", scales, f"{grids[0]}, one for each {each} of {list(shape)},")


def with_dimensions(scales: Array, dimensions: int) -> Array:
    """``scales`` with as many dimensions as the codes have; those that have fewer are small, and read whole."""
    lacking = dimensions - len(scales.shape)
    if lacking == 0:
        return scales
    if lacking < 0:
        raise shape_error("its scale", scales, f"at most {dimensions} dimensions")
    shape = (*scales.shape, *[1] * lacking) if math.prod(scales.shape) > 1 else (1,) * dimensions
    return LazyArray(shape, scales.dtype, lambda where: whole(scales).reshape(shape)[where])


def group_weights(settings: Settings) -> list[Mapping[str, Any]]:
    """The config's words on weights, of which there may be one for each kind of layer."""
    return [group.get("weights") or {} for group in (settings.get("config_groups") or {}).values()]


def group_sizes(settings: Settings) -> list[int]:
    """The sizes of groups of columns that the config states."""
    stated = [*(part.get("group_size") for part in group_weights(settings)), settings.get("group_size")]
    return [size for size in dict.fromkeys(stated) if size and size > 0]


def block_sizes(settings: Settings) -> list[tuple[int, ...]]:
    """The blocks of rows and columns that the config states."""
    parts = group_weights(settings)
    stated = [settings.get("weight_block_size"), *(part.get("block_structure") for part in parts)]
    return [tuple(int(size) for size in block) for block in stated if block]
