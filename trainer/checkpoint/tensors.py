"""The tensors of a checkpoint: safetensors files of shards, and an index of each one's place in the whole.

Shards are on the host before they are written, so a save need not wait for the devices. File K of a host holds the K-th
shard of each of its tensors, under the tensor's name. Tensors are read by slices, under any layout and whether layers
are stacked or not.

The files are those of `torch.distributed.checkpoint`'s Hugging Face format, and its `HuggingFaceStorageReader` reads
them. Its writer is not used: it makes each file in memory before it writes it, and of several shards of a tensor in one
process it keeps the last alone.
"""

import functools
import itertools
import json
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

import torch

from shardwright.checkpoint.manifest import BLOCK, INDEX, Checksum, checksum, damaged, stream_checksum
from shardwright.files.arrays import Array, LazyArray, Slices, Stack, layer_of
from shardwright.files.folder import Folder, StorageError
from shardwright.files.safetensors_file import DTYPES, NAMES, bytes_of, file_header
from shardwright.layout.stacking import is_stacked, layer_name, layer_names, numbers_of
from shardwright.model.meta_model import MOST_LAYERS

_DIMENSIONS = 64  # torch's own limit
_MOST = 1 << 62  # no size or offset is as large
Shards = list[tuple[Slices, torch.Tensor]]  # (where it lies in the whole, values) of each shard of a tensor
Snapshot = Mapping[str, Shards]  # a tensor's name -> its shards, on the host


@dataclass(frozen=True)
class TensorPart:
    """One process's part of a checkpoint: its tensor files' manifest entries, and (tensor, dtype, piece) each."""

    files: dict[str, Checksum]
    pieces: list[tuple[str, str, dict[str, Any]]]


def write_part(folder: Folder, snapshot: Snapshot, process: int = 0) -> TensorPart:
    """Writes the shards of ``snapshot`` into files that bear the number of this ``process``; raises StorageError."""
    part = TensorPart({}, [])
    for number in range(max(map(len, snapshot.values()), default=0)):
        file = f"tensors-{process}-{number}.safetensors"
        held = {name: shards[number] for name, shards in snapshot.items() if number < len(shards)}
        # wide dtypes first, so that each tensor lies at a multiple of its own width
        held = dict(sorted(held.items(), key=lambda item: -item[1][1].itemsize))
        offsets = {name: [each.start or 0 for each in where] for name, (where, _) in held.items()}
        # semi-private: torch/distributed/checkpoint/_hf_utils.py, torch 2.9; by these its reader puts shards together
        saved = {"DCP_SHARDING_INFO": json.dumps({name: {"saved_offsets": at} for name, at in offsets.items()})}
        head = file_header({name: (values.shape, values.dtype) for name, (_, values) in held.items()}, **saved)
        size = len(head)
        for name, (_, values) in held.items():
            piece = {"file": file, "begin": size, "length": values.nbytes}
            piece |= {"offsets": offsets[name], "shape": list(values.shape)}
            part.pieces.append((name, NAMES[values.dtype], piece))
            size += values.nbytes
        parts = itertools.chain([memoryview(head)], (bytes_of(values) for _, values in held.values()))
        # in blocks: a store's client copies what it is given at once
        blocks = (data[at : at + BLOCK] for data in parts for at in range(0, len(data), BLOCK))
        with folder.open(file, "wb") as out:
            part.files[file] = stream_checksum(blocks, out.write)
    return part


def write_index(
    folder: Folder, parts: Sequence[TensorPart], shapes: Mapping[str, Sequence[int]]
) -> dict[str, Checksum]:
    """Writes the index of parts of tensors of ``shapes``; returns all files' manifest entries; raises StorageError."""
    index: dict[str, Any] = {}
    for name, dtype, piece in itertools.chain.from_iterable(part.pieces for part in parts):
        entry = index.setdefault(name, {"dtype": dtype, "shape": list(shapes[name]), "pieces": []})
        entry["pieces"].append(piece)
    data = json.dumps(index, separators=(",", ":")).encode()
    folder.write(INDEX, data)
    return {name: entry for part in parts for name, entry in part.files.items()} | {INDEX: checksum(data)}


# ---- the index, checked before a tensor is touched: no claim exceeds what lies in the files ----


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor, and the place of its values: ``length`` bytes of ``file`` from ``begin`` on, row-major."""

    file: str
    begin: int
    length: int
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class IndexEntry:
    """A stored tensor; its pieces tile it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: Sequence[Piece]


def read_index(index: Any, files: Mapping[str, int], around: int = 0) -> dict[str, IndexEntry]:
    """The tensors of an index: name -> {dtype, shape, pieces: [{file, begin, length, offsets, shape}, …]}.

    ``files`` are the sizes of the files of tensors in bytes, and ``around`` the bytes that a piece may have beside its
    values. Raises ValueError, which says what does not agree, or an error of another type for a value of another type.
    """
    entries = {name: _entry(name, value, around) for name, value in index.items()}
    # pieces fill each file up to its end, one behind the other: no byte is of two tensors
    ends = dict.fromkeys(files, 0)
    pieces = [piece for entry in entries.values() for piece in entry.pieces]
    for piece in sorted(pieces, key=lambda piece: (piece.file, piece.begin, piece.length)):
        if piece.file not in files:
            raise ValueError(f"a piece lies in {piece.file[:200]!r}, which is no file of tensors")
        if piece.begin != (ends[piece.file] or piece.begin):
            raise ValueError(f"pieces in {piece.file!r} overlap, or leave out bytes between them")
        ends[piece.file] = piece.begin + piece.length
    for file, end in ends.items():
        if end != files[file]:
            raise ValueError(f"the pieces in {file!r} end at byte {end:,} of {files[file]:,}")
    return entries


def _entry(name: str, value: Any, around: int) -> IndexEntry:
    shown, shape, dtype = repr(name[:200]), _counts(value["shape"]), DTYPES[value["dtype"]]
    pieces = []
    for each in value["pieces"]:
        begin, length = _counts([each["begin"], each["length"]])
        pieces.append(Piece(each["file"], begin, length, _counts(each["offsets"]), _counts(each["shape"])))
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
    return IndexEntry(shape, dtype, pieces)


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


def _counts(values: Any) -> tuple[int, ...]:
    good = type(values) is list and len(values) <= _DIMENSIONS
    if not good or not all(type(count) is int and 0 <= count < _MOST for count in values):
        raise ValueError(f"{repr(values)[:80]} in the place of a list of counts")
    return tuple(values)


class StoredTensors:
    """The tensors of a checkpoint: name -> an array, of which a slice reads only the rows that it touches.

    A name is found however layers were stacked when it was written: ``model.layers.3.x`` is read from
    ``model.layers.*.x`` or ``model.layers.1:9:2.x``, and the other way round. ``read`` makes the tensors of the content
    of ``listing``, a file, or raises an error of any type; ``begin`` finds the values of a piece, so many bytes, in its
    file. Raises UserError if the list can't be read, or does not agree with the files' sizes.
    """

    def __init__(
        self,
        folder: Folder,
        listing: str,
        read: Callable[[bytes], dict[str, IndexEntry]],
        begin: Callable[[IO[bytes], Piece, int], int] = lambda file, piece, count: piece.begin,
    ) -> None:
        self.folder, self.begin, data = folder, begin, folder.read(listing)
        try:
            self.entries = read(data)
        except Exception as error:  # of many types: values of wrong types fail anywhere
            found = f"{type(error).__name__}: {str(error)[:300]}"
            raise damaged(folder, f"{listing} is no list of tensors ({found})") from None
        # name of a layer's tensor -> the stack that it is in, and where
        self._layers = {
            member: (name, index)
            for name, entry in self.entries.items()
            if is_stacked(name)
            for index, member in enumerate(layer_names(name, entry.shape[0]))
        }

    def names(self) -> list[str]:
        """Every tensor's name; of a stack, the names of its layers."""
        return [*(name for name in self.entries if not is_stacked(name)), *self._layers]

    def __call__(self, name: str) -> Array:
        """The array of that name; KeyError if there is none."""
        if (entry := self.entries.get(name)) is not None:
            return LazyArray(entry.shape, entry.dtype, functools.partial(self._read, name, entry))
        if name in self._layers:
            stack, index = self._layers[name]
            return layer_of(self(stack), index)
        if is_stacked(name):
            layers: list[Array] = []
            for layer in numbers_of(name) or itertools.count():
                member = layer_name(name, layer)
                if member not in self.entries and member not in self._layers:
                    break
                layers.append(self(member))
            if len(layers) == len(numbers_of(name) or layers) > 0:
                return Stack(layers)
        raise KeyError(name)

    def _read(self, name: str, entry: IndexEntry, where: Slices) -> torch.Tensor:
        """A part of a stored tensor, put together from its pieces."""
        wanted = [range(*part.indices(size)) for part, size in zip(where, entry.shape, strict=True)]
        out = torch.empty([len(part) for part in wanted], dtype=entry.dtype)
        met: dict[str, list[tuple[Piece, Slices, Slices]]] = {}  # file -> a piece, where in `out`, where in the piece
        for piece in entry.pieces:
            low = [max(part.start, at) for part, at in zip(wanted, piece.offsets, strict=True)]
            ends = map(operator.add, piece.offsets, piece.shape)
            high = [min(part.stop, end) for part, end in zip(wanted, ends, strict=True)]
            if all(map(operator.lt, low, high)):
                in_out = _slices(low, high, [part.start for part in wanted])
                met.setdefault(piece.file, []).append((piece, in_out, _slices(low, high, piece.offsets)))
        for file, parts in met.items():
            try:
                with self.folder.open(file, "rb") as opened:
                    for piece, in_out, in_piece in parts:
                        begin = self.begin(opened, piece, math.prod(piece.shape) * out.itemsize)
                        _fill(out[in_out], opened, begin, piece.shape, in_piece)
            except Exception as error:  # of many types: a damaged file, or what Folder makes of it
                found = error.found if isinstance(error, StorageError) else f"{type(error).__name__}: {error}"
                raise damaged(self.folder, f"{name} in {file} can't be read ({found})") from error
        return out


def open_tensors(folder: Folder, files: Mapping[str, int]) -> StoredTensors:
    """The tensors in ``folder``, whose ``files`` of them have so many bytes; raises as :class:`StoredTensors`."""
    return StoredTensors(folder, INDEX, lambda data: read_index(json.loads(data), files))


def _slices(low: Sequence[int], high: Sequence[int], origin: Sequence[int]) -> Slices:
    return tuple(slice(a - o, b - o) for a, b, o in zip(low, high, origin, strict=True))


def _fill(out: torch.Tensor, file: IO[bytes], begin: int, shape: Sequence[int], where: Slices) -> None:
    """Reads into ``out`` the values at ``where`` of a box of ``shape``, row-major in ``file`` from ``begin`` on.

    Where columns are left out, whole rows are read, a matrix at a time for boxes of more than two dimensions.
    """
    if not shape:
        out, shape, where = out[None], (1,), (slice(0, 1),)
    rows, row = where[0], math.prod(shape[1:]) * out.itemsize
    if out.is_contiguous() and where[1:] == tuple(slice(0, size) for size in shape[1:]):
        _read_into(bytes_of(out), file, begin + rows.start * row)
    elif len(shape) > 2:
        for layer in range(rows.start, rows.stop):
            _fill(out[layer - rows.start], file, begin + layer * row, shape[1:], where[1:])
    else:
        whole = torch.empty(rows.stop - rows.start, *shape[1:], dtype=out.dtype)
        _read_into(bytes_of(whole), file, begin + rows.start * row)
        out.copy_(whole[(slice(None), *where[1:])])


def _read_into(into: memoryview, file: IO[bytes], begin: int) -> None:
    file.seek(begin)
    while into:
        count = file.readinto(into[:BLOCK])  # type: ignore[attr-defined]
        if not count:
            raise ValueError(f"{len(into):,} bytes too few")
        into = into[count:]
