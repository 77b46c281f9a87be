"""A checkpoint's list of its tensors, checked before a tensor is touched: `tensors.json`.

Each tensor is cut into pieces that tile it, and each piece's values are a run of bytes in a file. No claim exceeds what
lies in the files: shapes, dtypes, pieces and the files' sizes agree.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwright.files.safetensors_file import DTYPES
from shardwright.layout.stacking import is_stacked, numbers_of
from shardwright.model.meta_model import MOST_LAYERS

_DIMENSIONS = 64  # torch's own limit
_MOST = 1 << 62  # no size or offset is as large


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor, and the place of its values: ``length`` bytes of ``file`` from ``begin`` on, row-major."""

    file: str
    begin: int
    length: int
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Entry:
    """A stored tensor; its pieces tile it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: Sequence[Piece]


def read_index(index: Any, files: Mapping[str, int], around: int = 0) -> dict[str, Entry]:
    """The tensors of an index: name -> {dtype, shape, pieces: [{file, begin, length, offsets, shape}, …]}.

    ``files`` are the sizes of the files of tensors in bytes, and ``around`` the bytes that a piece may have beside its
    values. Raises ValueError, which says what does not agree, or an error of another type for a value of another type.
    """
    entries = {name: _entry(name, value, around) for name, value in index.items()}
    _check_filled((piece for entry in entries.values() for piece in entry.pieces), files)
    return entries


def _entry(name: str, value: Any, around: int) -> Entry:
    shown, shape, dtype = repr(name[:200]), _counts(value["shape"]), DTYPES[value["dtype"]]
    pieces = [
        Piece(each["file"], *_counts([each["begin"], each["length"]]), _counts(each["offsets"]), _counts(each["shape"]))
        for each in value["pieces"]
    ]
    for piece in pieces:
        if not 0 <= piece.length - math.prod(piece.shape) * dtype.itemsize <= around:
            raise ValueError(f"a piece of {shown} of shape {list(piece.shape)} has {piece.length:,} bytes")
    if not tiles(shape, [(piece.offsets, piece.shape) for piece in pieces]):
        found = f"the pieces of {shown} do not tile its shape {list(shape)}"
        raise ValueError(f"{found}: they overlap, or some are missing")
    if is_stacked(name):
        layers = shape[0] if shape else 0
        if not 0 < layers <= MOST_LAYERS or len(numbers_of(name) or range(layers)) != layers:
            raise ValueError(f"the stack {shown} of shape {list(shape)} has other layers than its name says")
    return Entry(shape, dtype, pieces)


def tiles(shape: Sequence[int], boxes: Sequence[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """Whether boxes (offsets, sizes) are the cells of a grid that covers ``shape``: each element lies in one of them.

    A mesh cuts every dimension of a tensor for all of the others alike, so shards always are such cells.
    """
    cuts: list[dict[int, int]] = [{} for _ in shape]  # for each dimension: begin of a cell -> its size
    for offsets, sizes in boxes:
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            return False
        if any(cut.setdefault(at, size) != size for cut, at, size in zip(cuts, offsets, sizes, strict=True)):
            return False
    for cut, length in zip(cuts, shape, strict=True):
        ends = itertools.accumulate((cut[at] for at in sorted(cut)), initial=0)
        if [*sorted(cut), length] != list(ends):
            return False
    return len(boxes) == math.prod(map(len, cuts)) == len({tuple(offsets) for offsets, _ in boxes})


def _check_filled(pieces: Iterable[Piece], files: Mapping[str, int]) -> None:
    """Raises ValueError unless pieces fill each file up to its end, one behind the other: no byte is of two tensors."""
    ends = dict.fromkeys(files, 0)
    for piece in sorted(pieces, key=lambda piece: (piece.file, piece.begin, piece.length)):
        if piece.file not in files:
            raise ValueError(f"a piece lies in {piece.file[:200]!r}, which is no file of tensors")
        if piece.begin != (ends[piece.file] or piece.begin):
            raise ValueError(f"pieces in {piece.file!r} overlap, or leave out bytes between them")
        ends[piece.file] = piece.begin + piece.length
    for file, end in ends.items():
        if end != files[file]:
            raise ValueError(f"the pieces in {file!r} end at byte {end:,} of {files[file]:,}")


def _counts(values: Any) -> tuple[int, ...]:
    good = type(values) is list and len(values) <= _DIMENSIONS
    if not good or not all(type(count) is int and 0 <= count < _MOST for count in values):
        raise ValueError(f"{repr(values)[:80]} in the place of a list of counts")
    return tuple(values)
