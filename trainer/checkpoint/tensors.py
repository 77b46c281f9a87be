"""The tensors of a checkpoint, in `torch.distributed.checkpoint`'s format (DCP).

What is written are shards that lie on the host already, so a save need not wait for the devices; stacked layers are
written one at a time. Tensors are read by slices, under any layout and whether layers are stacked or not. DCP's own
`load` reads them too.
"""

from __future__ import annotations

import enum
import io
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any

import torch
import xxhash
from torch.distributed.checkpoint.filesystem import (
    CURRENT_DCP_VERSION,
    FileSystemBase,
    FileSystemReader,
    _StorageInfo,  # semi-private: torch/distributed/checkpoint/filesystem.py, torch 2.9
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from trainer.arrays import Array, Slices, Stack
from trainer.checkpoint.manifest import METADATA, Checksum, damaged
from trainer.layout.stacking import is_stacked, layer_name, layer_names, possible_stacks
from trainer.storage import Folder, StorageError

Shards = list[tuple[Slices, torch.Tensor]]  # (where it lies in the whole, values) of each shard of a tensor
Snapshot = Mapping[str, Shards]  # a tensor's name -> its shards, on the host


def write_tensors(
    folder: Folder, snapshot: Snapshot, shapes: Mapping[str, Sequence[int]], process: int = 0
) -> dict[str, Checksum]:
    """Writes the shards of ``snapshot`` in DCP's format; returns the manifest's entries of the files written.

    DCP's own `save` is not used: its planners want the live tensors, and these are copies on the host.

    Args:
        shapes: a tensor's name -> shape of the whole.
        process: this process's number, which is in its file's name (only one process writes metadata yet).

    Raises:
        StorageError: the disk or the store did not take it.
    """
    files, name = _FolderFiles(folder), f"__{process}_0.distcp"
    entries: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    with files.create_stream(name, "wb") as stream:
        for tensor, shards in snapshot.items():
            for offsets, values in layer_shards(tensor, shards):
                begun = stream.tell()
                # torch.save writes the whole storage of a view, so a view is copied first
                torch.save(values if values.nbytes == values.untyped_storage().nbytes() else values.clone(), stream)
                places[MetadataIndex(tensor, offsets)] = _StorageInfo(name, begun, stream.tell() - begun)
                properties, size = TensorProperties(dtype=values.dtype), torch.Size(shapes[tensor])
                entry = entries.setdefault(tensor, TensorStorageMetadata(properties, size, []))
                entry.chunks.append(ChunkStorageMetadata(torch.Size(offsets), values.shape))
    with files.create_stream(METADATA, "wb") as stream:
        stream.write(pickle.dumps(Metadata(entries, storage_data=places, version=CURRENT_DCP_VERSION)))
    return files.written


def layer_shards(name: str, shards: Shards) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """Yields (offsets, values) of what is written for each shard: the shard itself, or of a stack each layer of it."""
    for where, values in shards:
        start = tuple(part.start or 0 for part in where)
        if is_stacked(name):
            for layer in range(values.shape[0]):
                yield (start[0] + layer, *start[1:]), values[layer : layer + 1]
        else:
            yield start, values


class _FolderFiles(FileSystemBase):
    """A :class:`Folder` as a file system of DCP's; remembers the size and checksum of each file that it writes."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.written: dict[str, Checksum] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        name = str(path)
        with self.folder.open(name, mode) as file:
            if mode == "rb":
                yield file
                return
            hashed = _Hashed(file)
            try:
                yield hashed
            except RuntimeError as error:  # torch.save raises it in place of the stream's own error
                raise hashed.error or error from None
        self.written[name] = hashed.checksum

    def concat_path(self, path: Any, suffix: str) -> str:
        return suffix

    def rename(self, path: Any, new_path: Any) -> None:
        raise NotImplementedError("a checkpoint's files are written under their own names")

    def init_path(self, path: Any) -> Any:
        return path

    def mkdir(self, path: Any) -> None:
        pass  # Folder makes itself when something is written into it

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def exists(self, path: Any) -> bool:
        return False  # an old checkpoint is removed before its folder is written into again

    def rm_file(self, path: Any) -> None:
        self.folder.remove_file(str(path))


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

    A name is found whether layers were stacked or not when it was written: ``model.layers.3.x`` is read from
    ``model.layers.*.x``, and the other way round.
    """

    def __init__(self, folder: Folder) -> None:
        self.reader = _Reader(folder)
        self.metadata = self.reader.read_metadata()
        self.reader.set_up_storage_reader(self.metadata, True)
        self.entries: dict[str, Any] = self.metadata.state_dict_metadata

    def names(self) -> list[str]:
        """Returns every tensor's name; of a stack, the names of its layers."""
        return [
            member
            for name, entry in self.entries.items()
            for member in (layer_names(name, entry.size[0]) if is_stacked(name) else [name])
        ]

    def __call__(self, name: str) -> Array:
        """Returns the array of that name; KeyError if there is none."""
        if name in self.entries:
            return self._stored(name)
        if is_stacked(name):
            layers: list[Array] = []
            while (layer := layer_name(name, len(layers))) in self.entries:
                layers.append(self._stored(layer))
            if layers:
                return Stack(layers)
        for stack, index in possible_stacks(name):
            if stack in self.entries and index < self.entries[stack].size[0]:
                return _Layer(self._stored(stack), index)
        raise KeyError(name)

    def _stored(self, name: str) -> Array:
        return _Stored(self.reader, name, self.entries[name])


class _Stored:
    """A stored tensor as an array, put together from the chunks that DCP's metadata lists."""

    def __init__(self, reader: _Reader, name: str, entry: Any) -> None:
        self.reader, self.name, self.chunks = reader, name, entry.chunks
        self.shape, self.dtype = tuple(entry.size), entry.properties.dtype

    def __getitem__(self, where: Slices) -> torch.Tensor:
        starts = [part.start or 0 for part in where]
        stops = [size if part.stop is None else part.stop for part, size in zip(where, self.shape, strict=True)]
        out = torch.empty([stop - start for start, stop in zip(starts, stops, strict=True)], dtype=self.dtype)
        items = []
        for chunk in self.chunks:
            ends = [o + s for o, s in zip(chunk.offsets, chunk.sizes, strict=True)]
            low = [max(a, b) for a, b in zip(starts, chunk.offsets, strict=True)]
            high = [min(a, b) for a, b in zip(stops, ends, strict=True)]
            if all(a < b for a, b in zip(low, high, strict=True)):
                index = MetadataIndex(self.name, chunk.offsets)
                in_out = torch.Size(a - b for a, b in zip(low, starts, strict=True))
                in_chunk = torch.Size(a - b for a, b in zip(low, chunk.offsets, strict=True))
                lengths = torch.Size(b - a for a, b in zip(low, high, strict=True))
                items.append(ReadItem(LoadItemType.TENSOR, index, in_out, index, in_chunk, lengths))
        if sum(item.lengths.numel() for item in items) != out.numel():
            raise damaged(self.reader.folder, f"{self.name} is not all there")
        self.reader.read_data(LoadPlan(items), _Into(out))
        return out


class _Layer:
    """The array of one layer of a stack, without the stack's first dimension."""

    def __init__(self, stack: Array, layer: int) -> None:
        self.stack, self.layer = stack, layer
        self.shape, self.dtype = tuple(stack.shape[1:]), stack.dtype

    def __getitem__(self, where: Slices) -> torch.Tensor:
        return self.stack[(slice(self.layer, self.layer + 1), *where)][0]


class _Into:
    """A load planner of DCP's that copies every item to its place in one tensor."""

    def __init__(self, out: torch.Tensor) -> None:
        self.out = out

    def resolve_tensor(self, item: ReadItem) -> torch.Tensor:
        return self.out[tuple(slice(o, o + n) for o, n in zip(item.dest_offsets, item.lengths, strict=True))]

    def commit_tensor(self, item: ReadItem, tensor: torch.Tensor) -> None:
        pass


class _Reader(FileSystemReader):
    """DCP's reader, over a :class:`Folder`; what it can't read is said to be damaged."""

    def __init__(self, folder: Folder) -> None:
        super().__init__(str(folder))
        # semi-private: the attribute fs, torch/distributed/checkpoint/filesystem.py, torch 2.9
        self.folder, self.fs = folder, _FolderFiles(folder)  # type: ignore[assignment]

    def read_data(self, plan: LoadPlan, planner: Any) -> Any:
        try:
            return super().read_data(plan, planner)
        except (StorageError, EOFError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
            raise damaged(self.folder, f"{plan.items[0].storage_index.fqn} can't be read ({error})") from error

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        try:
            return _Unpickler(io.BytesIO(self.folder.read(METADATA))).load()
        except (pickle.UnpicklingError, EOFError, AttributeError, TypeError, ValueError) as error:
            raise damaged(self.folder, f"{METADATA} is no list of tensors ({error})") from None


# what DCP's metadata is made of; semi-private: torch/distributed/checkpoint/{metadata,filesystem}.py and
# torch/serialization.py, torch 2.9
_ALLOWED = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    )
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    *(("torch", name) for name in ("float32", "float64", "bfloat16", "float16", "int64", "int32", "uint8", "bool")),
}


def _enum_member(kind: Any, name: str) -> Any:
    """Stands in for `getattr`, by which Python 3.11.0 to 3.11.3 pickle an enum's member; returns nothing else."""
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum) and name in kind.__members__):
        raise pickle.UnpicklingError(f"getattr of {kind!r} in {METADATA}")
    return kind[name]


class _Unpickler(pickle.Unpickler):
    """Reads DCP's metadata and refuses any other object: a checkpoint is data, and must not run code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} in {METADATA}")
        return super().find_class(module, name)
