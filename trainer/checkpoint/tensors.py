"""The tensors of a checkpoint, in `torch.distributed.checkpoint`'s format (DCP).

Tensors are written as shards that lie on the host already (so a save need not wait for the device), those of stacked
layers one layer at a time, and are read by slices under any layout and any stacking. DCP's own `load` reads them too.
Semi-private, pinned with torch 2.9: `_StorageInfo`, and `FileSystemReader.fs`.
"""

from __future__ import annotations

import enum
import io
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any

import torch
import xxhash
from torch.distributed.checkpoint.filesystem import (
    CURRENT_DCP_VERSION,
    FileSystemBase,
    FileSystemReader,
    _StorageInfo,
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
from trainer.checkpoint.manifest import Checksum, damaged
from trainer.storage import Folder, StorageError

METADATA = ".metadata"  # DCP's own name
Shards = list[tuple[Slices, torch.Tensor]]
Snapshot = Mapping[str, Shards]  # name -> its shards on the host


def write_tensors(
    folder: Folder, snapshot: Snapshot, shapes: Mapping[str, Sequence[int]], process: int = 0
) -> dict[str, Checksum]:
    """Write the shards of ``snapshot`` in DCP's format; returns the manifest's entries of the files written.

    DCP's own `save` is not used: its planners want live tensors on both sides, ours are on the host already.

    Args:
        shapes: name -> shape of the whole tensor.
        process: this process's number, which its file is named for (one alone writes metadata yet).

    Raises:
        StorageError: the disk or store did not take it.
    """
    files, name = _FolderFiles(folder), f"__{process}_0.distcp"
    entries: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    with files.create_stream(name, "wb") as stream:
        for tensor, shards in snapshot.items():
            for offsets, values in layer_shards(tensor, shards):
                begun = stream.tell()
                # a view is saved with all of its storage
                torch.save(values if values.nbytes == values.untyped_storage().nbytes() else values.clone(), stream)
                places[MetadataIndex(tensor, offsets)] = _StorageInfo(name, begun, stream.tell() - begun)
                properties, size = TensorProperties(dtype=values.dtype), torch.Size(shapes[tensor])
                entry = entries.setdefault(tensor, TensorStorageMetadata(properties, size, []))
                entry.chunks.append(ChunkStorageMetadata(torch.Size(offsets), values.shape))
    with files.create_stream(METADATA, "wb") as stream:
        stream.write(pickle.dumps(Metadata(entries, storage_data=places, version=CURRENT_DCP_VERSION)))
    return files.written


def layer_shards(name: str, shards: Shards) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """(offsets, values) of what is written: shards as they are, and layer by layer where layers are stacked."""
    for where, values in shards:
        start = tuple(part.start or 0 for part in where)
        if ".*." in name:
            for layer in range(values.shape[0]):
                yield (start[0] + layer, *start[1:]), values[layer : layer + 1]
        else:
            yield start, values


class _FolderFiles(FileSystemBase):
    """A :class:`Folder` as DCP's file system; remembers size and checksum of what is written through it."""

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
            except RuntimeError as error:  # torch.save's, which forgets what the stream told it
                raise hashed.error or error from None
        self.written[name] = hashed.digest

    def concat_path(self, path: Any, suffix: str) -> str:
        return suffix

    def rename(self, path: Any, new_path: Any) -> None:
        raise NotImplementedError("a checkpoint's files are written under their own names")

    def init_path(self, path: Any) -> Any:
        return path

    def mkdir(self, path: Any) -> None:
        pass  # a folder is made when something is written into it

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def exists(self, path: Any) -> bool:
        return False  # an old checkpoint is removed before its folder is written into again

    def rm_file(self, path: Any) -> None:
        self.folder.remove_file(str(path))


class _Hashed(io.RawIOBase):
    """A stream for writing that counts and sums what passes; closing it is its owner's."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.size, self.hash = file, 0, xxhash.xxh3_64()
        self.error: OSError | None = None

    @property
    def digest(self) -> Checksum:
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
    """The tensors of a checkpoint, by name, each an array that is read by slices; only what a slice touches is read.

    A name is found however layers were stacked when it was written: ``model.layers.*.x`` for ``model.layers.3.x``
    and the other way round.
    """

    def __init__(self, folder: Folder) -> None:
        self.reader = _Reader(folder)
        self.metadata = self.reader.read_metadata()
        self.reader.set_up_storage_reader(self.metadata, True)
        self.entries: dict[str, Any] = self.metadata.state_dict_metadata

    def names(self) -> list[str]:
        """Every tensor's name, layers one by one whether they were stacked or not."""
        found = []
        for name, entry in self.entries.items():
            prefix, star, rest = name.partition(".*.")
            found += [f"{prefix}.{i}.{rest}" for i in range(entry.size[0])] if star else [name]
        return found

    def __call__(self, name: str) -> Array:
        """The array of that name; KeyError if there is none."""
        if name in self.entries:
            return self._stored(name)
        prefix, star, rest = name.partition(".*.")
        if star:
            layers: list[Array] = []
            while (layer := f"{prefix}.{len(layers)}.{rest}") in self.entries:
                layers.append(self._stored(layer))
            if layers:
                return Stack(layers)
        for number in re.finditer(r"(?<=\.)\d+(?=\.)", name):
            stacked = f"{name[: number.start()]}*{name[number.end() :]}"
            if stacked in self.entries and int(number[0]) < self.entries[stacked].size[0]:
                return _Layer(self._stored(stacked), int(number[0]))
        raise KeyError(name)

    def _stored(self, name: str) -> Array:
        return _Stored(self.reader, name, self.entries[name])


class _Stored:
    """One stored tensor; see `Array`."""

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
    """A layer of a stack, without the stack's dimension."""

    def __init__(self, stack: Array, layer: int) -> None:
        self.stack, self.layer = stack, layer
        self.shape, self.dtype = tuple(stack.shape[1:]), stack.dtype

    def __getitem__(self, where: Slices) -> torch.Tensor:
        return self.stack[(slice(self.layer, self.layer + 1), *where)][0]


class _Into:
    """A DCP load planner that puts every item where it belongs in one tensor."""

    def __init__(self, out: torch.Tensor) -> None:
        self.out = out

    def resolve_tensor(self, item: ReadItem) -> torch.Tensor:
        return self.out[tuple(slice(o, o + n) for o, n in zip(item.dest_offsets, item.lengths, strict=True))]

    def commit_tensor(self, item: ReadItem, tensor: torch.Tensor) -> None:
        pass


class _Reader(FileSystemReader):
    def __init__(self, folder: Folder) -> None:
        super().__init__(str(folder))
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
    """What `getattr` is asked for by an enum's member that Python 3.11.0 to 3.11.3 pickled, and nothing else."""
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum) and name in kind.__members__):
        raise pickle.UnpicklingError(f"getattr of {kind!r} in {METADATA}")
    return kind[name]


class _Unpickler(pickle.Unpickler):
    """Of DCP's metadata and nothing else: a checkpoint is data, and must not run code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} in {METADATA}")
        return super().find_class(module, name)
