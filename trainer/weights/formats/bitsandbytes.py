"""NF4, FP4 and int8 of bitsandbytes (https://github.com/bitsandbytes-foundation/bitsandbytes).

4 bits (https://arxiv.org/abs/2305.14314): the weight is one row of pairs of codes, the first of a pair in the higher
bits, in blocks with one largest value each, which can be packed in 8 bits once more. `quant_state` is a text in JSON.
int8 (https://arxiv.org/abs/2208.07339): a row's codes times its largest value, over 127.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from shardwright.files.arrays import Array, Slices, whole
from shardwright.weights.formats.encode import four_bit_table, int8_rows
from shardwright.weights.formats.format import (
    ANY,
    Format,
    Parts,
    Settings,
    dequantized,
    looked_up,
    shape_error,
    unpacked,
)

_STATES = (".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4")
_ABSMAX, _MAP, _NESTED, _NESTED_MAP = ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map"
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_OVER_127 = 7.874015748031496e-3  # as bitsandbytes multiplies by it


@dataclass(frozen=True)
class _Blocks:
    """A weight's blocks, by their number."""

    parts: Parts
    state: dict[str, Any]
    shape: tuple[int, ...]
    size: int  # elements of a block

    @property
    def count(self) -> int:
        return -(-math.prod(self.shape) // self.size)

    def read(self, ranges: Sequence[tuple[int, int]]) -> torch.Tensor:
        """The values of all blocks in ``ranges`` (first, last + 1), one block after the other."""
        stored = torch.cat([self._codes(first, last) for first, last in ranges])
        pairs = unpacked(stored, 4, 0)[(slice(0, len(stored) * 2),)].unflatten(0, (-1, 2)).flip(-1).flatten()
        values = looked_up(whole(self.parts[_MAP]), pairs)
        values = values * self._largest(ranges).repeat_interleave(self.size)[: len(pairs)]
        return values.to(_DTYPES[self.state["dtype"]])

    def _codes(self, first: int, last: int) -> torch.Tensor:
        """The bytes of these blocks, of which the weight's last may be cut off."""
        codes = self.parts[""]
        held = codes.dtype.itemsize * 2  # elements in a stored number, whose dtype says only how the bytes travel
        places = slice(first * self.size // held, -(-min(last * self.size, math.prod(self.shape)) // held))
        return codes[(places, *[slice(0, 1)] * (len(codes.shape) - 1))].reshape(-1).view(torch.uint8)

    def _largest(self, ranges: Sequence[tuple[int, int]]) -> torch.Tensor:
        """The largest values of these blocks, in float32."""
        largest = torch.cat([self.parts[_ABSMAX][(slice(first, last),)] for first, last in ranges])
        if _NESTED not in self.parts:
            return largest.to(torch.float32)
        outer = torch.cat([torch.arange(first, last) for first, last in ranges]) // self.state["nested_blocksize"]
        start = int(outer[0])
        inside = self.parts[_NESTED][(slice(start, int(outer[-1]) + 1),)][outer - start]
        return looked_up(whole(self.parts[_NESTED_MAP]), largest) * inside + self.state["nested_offset"]


def _runs(where: Slices, shape: tuple[int, ...]) -> tuple[torch.Tensor, int]:
    """(the first element, by its number in the whole, of each run of neighbours in ``where``; a run's length)."""
    length, stride, starts = 1, 1, torch.zeros(1, dtype=torch.int64)
    joined = True  # whether the dimensions after this one are whole
    for part, size in zip(reversed(where), reversed(shape), strict=True):
        if joined:
            length, starts = length * (part.stop - part.start), starts + part.start * stride
            joined = part.stop - part.start == size
        else:
            starts = (torch.arange(part.start, part.stop).unsqueeze(1) * stride + starts).flatten()
        stride *= size
    return starts, length


def _decode_4bit(state: str, parts: Parts, settings: Settings) -> Array:
    values = json.loads(bytes(whole(parts[state]).tolist()))
    shape, size = tuple(values["shape"]), int(values["blocksize"])
    blocks = _Blocks(parts, values, shape, size)
    if values["dtype"] not in _DTYPES:
        raise ValueError(f"its dtype is {values['dtype']!r}, where {', '.join(_DTYPES)} are known")
    if math.prod(parts[""].shape) * parts[""].dtype.itemsize != -(-math.prod(shape) // 2):
        raise shape_error("its codes", parts[""], f"that of {list(shape)}, two in a byte,")
    if tuple(parts[_ABSMAX].shape) != (blocks.count,):
        raise shape_error("absmax", parts[_ABSMAX], f"[{blocks.count}], one for each {size} of {list(shape)},")
    if tuple(parts[_MAP].shape) != (16,):
        raise shape_error("quant_map", parts[_MAP], "[16]")
    if parts[_ABSMAX].dtype == torch.uint8 or _NESTED in parts:
        _check_nested(parts, values, blocks.count)

    def read(where: Slices) -> torch.Tensor:
        starts, length = _runs(where, shape)
        ranges, places, before = [(0, 0)], torch.empty_like(starts), 0  # before: blocks of the ranges that are full
        for index, start in enumerate(starts.tolist()):
            first, last = start // size, -(-(start + length) // size)
            low, high = ranges[-1]
            if first > high:
                before, low, high = before + high - low, first, first
                ranges.append((low, high))
            ranges[-1] = (low, max(high, last))
            places[index] = (before - low) * size + start
        flat = blocks.read(ranges)
        if len(starts) == 1:
            flat = flat.narrow(0, int(places[0]), length)
        else:
            flat = flat[(places.unsqueeze(1) + torch.arange(length)).flatten()]
        return flat.reshape([part.stop - part.start for part in where])

    return dequantized(shape, read)


def _check_nested(parts: Parts, values: dict[str, Any], count: int) -> None:
    if not {_NESTED, _NESTED_MAP} <= parts.keys() or parts[_ABSMAX].dtype != torch.uint8:
        raise ValueError("absmax is packed once more: in bytes, with nested_absmax and nested_quant_map")
    outer = -(-count // int(values["nested_blocksize"]))
    if tuple(parts[_NESTED].shape) != (outer,) or tuple(parts[_NESTED_MAP].shape) != (256,):
        raise shape_error("nested_absmax", parts[_NESTED], f"[{outer}], and a nested_quant_map [256],")
    float(values["nested_offset"])


def _decode_int8(parts: Parts, settings: Settings) -> Array:
    codes, largest = parts[".weight"], parts[".SCB"]
    if tuple(largest.shape) != (codes.shape[0],):
        raise shape_error("SCB", largest, f"[{codes.shape[0]}], one for each row,")
    if ".weight_format" in parts and whole(parts[".weight_format"]).any():
        raise ValueError("its weight_format is one of a GPU's tiles, where rows are read")

    def read(where: Slices) -> torch.Tensor:
        return codes[where].to(torch.float32) * largest[where[:1]].to(torch.float32).unsqueeze(1) * _OVER_127

    return dequantized(codes.shape, read)


FOUR_BITS = [
    Format(
        title=f"bitsandbytes {state[-3:].upper()}",
        parts=dict.fromkeys((state, "", _ABSMAX, _MAP), ANY),
        decode=partial(_decode_4bit, state),
        plain="",
        optional=(_NESTED, _NESTED_MAP),
        encode=partial(four_bit_table, state),
    )
    for state in _STATES
]
INT8 = Format(
    title="bitsandbytes int8",
    parts={".weight": {torch.int8}, ".SCB": ANY},
    fits=lambda parts: len(parts[".weight"].shape) == 2,
    decode=_decode_int8,
    optional=(".weight_format",),
    encode=int8_rows,
)
