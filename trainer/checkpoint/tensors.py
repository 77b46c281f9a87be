"""The tensors of a checkpoint: safetensors files of shards, and an index of each one's place in the whole.

Shards are on the host before they are written, so a save need not wait for the devices. File K of a host holds the K-th
shard of each of its tensors, under the tensor's name. Tensors are read by slices, under any layout and whether layers
are stacked or not.

The files are those of `torch.distributed.checkpoint`'s Hugging Face format, and its `HuggingFaceStorageReader` reads
them. Its writer is not used: it makes each file in memory before it writes it, and of several shards of a tensor in one
process it keeps the last alone.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

import torch
import xxhash

from shardwright.checkpoint.manifest import BLOCK, INDEX, Checksum, checksum, damaged
from shardwright.checkpoint.tensor_index import Entry, Piece, read_index
from shardwright.files.arrays import Array, Layer, Slices, Stack
from shardwright.files.folder import Folder, StorageError
from shardwright.files.safetensors_file import NAMES, bytes_of, file_header
from shardwright.hosts.hosts import hosts
from shardwright.layout.stacking import is_stacked, layer_name, layer_names, numbers_of

Shards = list[tuple[Slices, torch.Tensor]]  # (where it lies in the whole, values) of each shard of a tensor
Snapshot = Mapping[str, Shards]  # a tensor's name -> its shards, on the host


@dataclass(frozen=True)
class TensorPart:
    """One process's part of a checkpoint: its tensor files' manifest entries, and (tensor, dtype, piece) each."""

    files: dict[str, Checksum]
    pieces: list[tuple[str, str, dict[str, Any]]]


def write_part(folder: Folder, snapshot: Snapshot, process: int = 0) -> TensorPart:
    """Writes the shards of ``snapshot`` into files that bear the number of this ``process``.

    Raises:
        StorageError: the disk or the store did not take it.
    """
    part = TensorPart({}, [])
    for number in range(max(map(len, snapshot.values()), default=0)):
        held = {name: shards[number] for name, shards in snapshot.items() if number < len(shards)}
        # wide dtypes first, so that each tensor lies at a multiple of its own width
        held = dict(sorted(held.items(), key=lambda item: -item[1][1].itemsize))
        _write_file(folder, f"tensors-{process}-{number}.safetensors", held, part)
    return part


def _write_file(folder: Folder, file: str, held: Mapping[str, tuple[Slices, torch.Tensor]], part: TensorPart) -> None:
    offsets = {name: [each.start or 0 for each in where] for name, (where, _) in held.items()}
    # semi-private: torch/distributed/checkpoint/_hf_utils.py, torch 2.9; by these its reader puts shards together
    saved = {"DCP_SHARDING_INFO": json.dumps({name: {"saved_offsets": at} for name, at in offsets.items()})}
    head = file_header({name: (values.shape, values.dtype) for name, (_, values) in held.items()}, **saved)
    state, size = xxhash.xxh3_64(), len(head)
    with folder.open(file, "wb") as out:
        state.update(head)
        out.write(head)
        for name, (_, values) in held.items():
            piece = {"file": file, "begin": size, "length": values.nbytes}
            piece |= {"offsets": offsets[name], "shape": list(values.shape)}
            part.pieces.append((name, NAMES[values.dtype], piece))
            for block in _blocks(bytes_of(values)):
                hosts().watchdog.progressed()
                state.update(block)
                out.write(block)
            size += values.nbytes
    part.files[file] = {"bytes": size, "xxh3": state.hexdigest()}


def _blocks(data: memoryview) -> Iterator[memoryview]:
    """Parts of ``data``: a store's client copies what it is given at once."""
    return (data[at : at + BLOCK] for at in range(0, len(data), BLOCK))


def write_index(
    folder: Folder, parts: Sequence[TensorPart], shapes: Mapping[str, Sequence[int]]
) -> dict[str, Checksum]:
    """Writes the index of the parts, by the ``shapes`` of whole tensors; returns the manifest's entries of all files.

    Raises:
        StorageError: the disk or the store did not take it.
    """
    index: dict[str, Any] = {}
    for name, dtype, piece in itertools.chain.from_iterable(part.pieces for part in parts):
        entry = index.setdefault(name, {"dtype": dtype, "shape": list(shapes[name]), "pieces": []})
        entry["pieces"].append(piece)
    data = json.dumps(index, separators=(",", ":")).encode()
    folder.write(INDEX, data)
    return {name: entry for part in parts for name, entry in part.files.items()} | {INDEX: checksum(data)}


class StoredTensors:
    """The tensors of a checkpoint: name -> an array, of which a slice reads only the rows that it touches.

    A name is found however layers were stacked when it was written: ``model.layers.3.x`` is read from
    ``model.layers.*.x`` or ``model.layers.1:9:2.x``, and the other way round.

    Args:
        listing: the file that lists them; ``read`` makes the tensors of its content, or raises an error, of many types.
        begin: a piece's file, the piece, its values' bytes -> where in the file they begin.

    Raises:
        UserError: their list can't be read, or does not agree with the files' sizes.
    """

    def __init__(
        self,
        folder: Folder,
        listing: str,
        read: Callable[[bytes], dict[str, Entry]],
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
        if name in self.entries:
            return _Stored(self, name, self.entries[name])
        if name in self._layers:
            stack, index = self._layers[name]
            return Layer(_Stored(self, stack, self.entries[stack]), index)
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


def open_tensors(folder: Folder, files: Mapping[str, int]) -> StoredTensors:
    """The tensors in ``folder``, whose ``files`` of them have so many bytes; raises as :class:`StoredTensors`."""
    return StoredTensors(folder, INDEX, lambda data: read_index(json.loads(data), files))


class _Stored:
    """A stored tensor as an array, put together from its pieces."""

    def __init__(self, tensors: StoredTensors, name: str, entry: Entry) -> None:
        self.tensors, self.name, self.pieces = tensors, name, entry.pieces
        self.shape, self.dtype = entry.shape, entry.dtype

    def __getitem__(self, where: Slices) -> torch.Tensor:
        starts = [part.start or 0 for part in where]
        stops = [size if part.stop is None else part.stop for part, size in zip(where, self.shape, strict=True)]
        out = torch.empty([stop - start for start, stop in zip(starts, stops, strict=True)], dtype=self.dtype)
        wanted: dict[str, list[tuple[Piece, Slices, Slices]]] = {}
        for piece in self.pieces:
            ends = [o + s for o, s in zip(piece.offsets, piece.shape, strict=True)]
            low = [max(a, b) for a, b in zip(starts, piece.offsets, strict=True)]
            high = [min(a, b) for a, b in zip(stops, ends, strict=True)]
            if all(a < b for a, b in zip(low, high, strict=True)):
                in_out = _slices(low, high, starts)
                in_piece = _slices(low, high, piece.offsets)
                wanted.setdefault(piece.file, []).append((piece, in_out, in_piece))
        for file, parts in wanted.items():
            self._read(file, parts, out)
        return out

    def _read(self, name: str, parts: Sequence[tuple[Piece, Slices, Slices]], out: torch.Tensor) -> None:
        folder = self.tensors.folder
        try:
            with folder.open(name, "rb") as file:
                for piece, in_out, in_piece in parts:
                    begin = self.tensors.begin(file, piece, math.prod(piece.shape) * out.itemsize)
                    _fill(out[in_out], file, begin, piece.shape, in_piece)
        except Exception as error:  # of many types: a damaged file, or what Folder makes of it
            found = error.found if isinstance(error, StorageError) else f"{type(error).__name__}: {error}"
            raise damaged(folder, f"{self.name} in {name} can't be read ({found})") from error


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
