"""The tensors of a checkpoint, in `torch.distributed.checkpoint`'s format (DCP).

What is written are shards that lie on the host already, so a save need not wait for the devices; stacked layers are
written one at a time. Tensors are read by slices, under any layout and whether layers are stacked or not. DCP's own
`load` reads them too.
"""

from __future__ import annotations

import io
import itertools
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

import torch
import xxhash
from torch.distributed.checkpoint.filesystem import (
    CURRENT_DCP_VERSION,
    _StorageInfo,  # semi-private: torch/distributed/checkpoint/filesystem.py, torch 2.9
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from shardwright.checkpoint.dcp_metadata import Chunk, Entry, read_listing
from shardwright.checkpoint.manifest import METADATA, Checksum, damaged
from shardwright.checkpoint.tensor_records import read_record
from shardwright.files.arrays import Array, Layer, Slices, Stack
from shardwright.files.folder import Folder, StorageError
from shardwright.hosts.hosts import hosts
from shardwright.layout.stacking import is_stacked, layer_name, layer_names, numbers_of

Shards = list[tuple[Slices, torch.Tensor]]  # (where it lies in the whole, values) of each shard of a tensor
Snapshot = Mapping[str, Shards]  # a tensor's name -> its shards, on the host


@dataclass(frozen=True)
class TensorPart:
    """What one process wrote of a checkpoint's tensors.

    Args:
        files: the manifest's entries of the files written.
        records: (tensor's name, its dtype, where the record's values lie in the whole, their shape, the record).
    """

    files: dict[str, Checksum]
    records: list[tuple[str, torch.dtype, tuple[int, ...], tuple[int, ...], _StorageInfo]]


def write_part(folder: Folder, snapshot: Snapshot, process: int = 0) -> TensorPart:
    """Writes the shards of ``snapshot`` into a file of this process's own.

    DCP's own `save` is not used: its planners want the live tensors, and these are copies on the host.

    Args:
        process: this process's number, which is in its file's name.

    Raises:
        StorageError: the disk or the store did not take it.
    """
    name, part = f"__{process}_0.distcp", TensorPart({}, [])
    with _hashed(folder, name, part.files) as stream:
        for tensor, shards in snapshot.items():
            for offsets, values in layer_shards(tensor, shards):
                hosts().watchdog.progressed()
                begun = stream.tell()
                # torch.save writes the whole storage of a view, so a view is copied first
                torch.save(values if values.nbytes == values.untyped_storage().nbytes() else values.clone(), stream)
                record = _StorageInfo(name, begun, stream.tell() - begun)
                part.records.append((tensor, values.dtype, offsets, tuple(values.shape), record))
    return part


def write_listing(
    folder: Folder, parts: Sequence[TensorPart], shapes: Mapping[str, Sequence[int]]
) -> dict[str, Checksum]:
    """Writes what makes one checkpoint of the parts; returns the manifest's entries of all files of tensors.

    Args:
        shapes: a tensor's name -> shape of the whole.

    Raises:
        StorageError: the disk or the store did not take it.
    """
    written = {name: entry for part in parts for name, entry in part.files.items()}
    entries: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for tensor, dtype, offsets, sizes, record in itertools.chain.from_iterable(part.records for part in parts):
        places[MetadataIndex(tensor, offsets)] = record
        properties, size = TensorProperties(dtype=dtype), torch.Size(shapes[tensor])
        entry = entries.setdefault(tensor, TensorStorageMetadata(properties, size, []))
        entry.chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
    with _hashed(folder, METADATA, written) as stream:
        stream.write(pickle.dumps(Metadata(entries, storage_data=places, version=CURRENT_DCP_VERSION)))
    return written


def layer_shards(name: str, shards: Shards) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """Yields (offsets, values) of what is written for each shard: the shard itself, or of a stack each layer of it."""
    for where, values in shards:
        start = tuple(part.start or 0 for part in where)
        if is_stacked(name):
            for layer in range(values.shape[0]):
                yield (start[0] + layer, *start[1:]), values[layer : layer + 1]
        else:
            yield start, values


@contextmanager
def _hashed(folder: Folder, name: str, written: dict[str, Checksum]) -> Iterator[Any]:
    """Opens a file of ``folder`` for writing; once the ``with`` has ended, ``written`` holds its size and checksum."""
    with folder.open(name, "wb") as file:
        hashed = _Hashed(file)
        try:
            yield hashed
        except RuntimeError as error:  # torch.save raises it in place of the stream's own error
            raise hashed.error or error from None
    written[name] = hashed.checksum


class _Hashed(io.RawIOBase):
    """A stream for writing that counts the bytes and computes their checksum; its owner closes the file."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.size, self.hash = file, 0, xxhash.xxh3_64()
        self.error: OSError | None = None

    @property
    def checksum(self) -> Checksum:
        return {"bytes": self.size, "xxh3": self.hash.hexdigest()}

    def write(self, data: Any) -> int:
        try:
            self.file.write(data)
        except OSError as error:
            self.error = error
            raise
        self.hash.update(data)
        self.size += memoryview(data).nbytes
        return memoryview(data).nbytes

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


class StoredTensors:
    """The tensors of a checkpoint: name -> an array, of which a slice reads only the shards that it touches.

    A name is found however layers were stacked when it was written: ``model.layers.3.x`` is read from
    ``model.layers.*.x`` or ``model.layers.1:9:2.x``, and the other way round.

    Args:
        files: name -> bytes of the files of tensors.

    Raises:
        UserError: their list says what can't be, or does not agree with the files' sizes.
    """

    def __init__(self, folder: Folder, files: Mapping[str, int]) -> None:
        self.folder = folder
        try:
            self.entries = read_listing(folder.read(METADATA), files)
        except ValueError as error:
            raise damaged(folder, f"{METADATA} is no list of tensors ({error})") from None
        # name of a layer's tensor -> the stack that it is in, and where
        self._layers = {
            member: (name, index)
            for name, entry in self.entries.items()
            if is_stacked(name)
            for index, member in enumerate(layer_names(name, entry.size[0]))
        }

    def names(self) -> list[str]:
        """Returns every tensor's name; of a stack, the names of its layers."""
        return [*(name for name in self.entries if not is_stacked(name)), *self._layers]

    def __call__(self, name: str) -> Array:
        """Returns the array of that name; KeyError if there is none."""
        if name in self.entries:
            return self._stored(name)
        if name in self._layers:
            stack, index = self._layers[name]
            return Layer(self._stored(stack), index)
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

    def _stored(self, name: str) -> Array:
        return _Stored(self.folder, name, self.entries[name])


class _Stored:
    """A stored tensor as an array, put together from its chunks."""

    def __init__(self, folder: Folder, name: str, entry: Entry) -> None:
        self.folder, self.name, self.chunks = folder, name, entry.chunks
        self.shape, self.dtype = entry.size, entry.dtype

    def __getitem__(self, where: Slices) -> torch.Tensor:
        starts = [part.start or 0 for part in where]
        stops = [size if part.stop is None else part.stop for part, size in zip(where, self.shape, strict=True)]
        out = torch.empty([stop - start for start, stop in zip(starts, stops, strict=True)], dtype=self.dtype)
        wanted: dict[str, list[tuple[Chunk, Slices, Slices]]] = {}
        for chunk in self.chunks:
            ends = [o + s for o, s in zip(chunk.offsets, chunk.sizes, strict=True)]
            low = [max(a, b) for a, b in zip(starts, chunk.offsets, strict=True)]
            high = [min(a, b) for a, b in zip(stops, ends, strict=True)]
            if all(a < b for a, b in zip(low, high, strict=True)):
                in_out = _slices(low, high, starts)
                in_chunk = _slices(low, high, chunk.offsets)
                wanted.setdefault(chunk.file, []).append((chunk, in_out, in_chunk))
        for file, parts in wanted.items():
            self._read(file, parts, out)
        return out

    def _read(self, name: str, parts: Sequence[tuple[Chunk, Slices, Slices]], out: torch.Tensor) -> None:
        """Copies slices of the chunks in a file to their slices of ``out``."""
        try:
            with self.folder.open(name, "rb") as file:
                for chunk, in_out, in_chunk in parts:
                    values = read_record(file, chunk.begin, chunk.length, chunk.sizes, self.dtype)
                    out[in_out] = values[in_chunk]
        except Exception as error:  # of many types: a damaged archive, or what Folder makes of it
            found = error.found if isinstance(error, StorageError) else f"{type(error).__name__}: {error}"
            raise damaged(self.folder, f"{self.name} in {name} can't be read ({found})") from error


def _slices(low: Sequence[int], high: Sequence[int], origin: Sequence[int]) -> Slices:
    return tuple(slice(a - o, b - o) for a, b, o in zip(low, high, origin, strict=True))
