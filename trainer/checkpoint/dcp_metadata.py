"""What a checkpoint's `.metadata` says of its tensors: read as plain data, and checked before a tensor is touched.

Each tensor is cut into chunks that tile it, and each chunk is a record of bytes in a file of tensors. What is claimed
never exceeds what lies in the files: shapes, dtypes, records and the files' sizes agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwright.checkpoint.plain_pickle import Made, Name, read_pickle
from shardwright.layout.stacking import is_stacked, numbers_of

# semi-private: torch/distributed/checkpoint/{metadata,filesystem}.py and torch/serialization.py, torch 2.9
_DCP = "torch.distributed.checkpoint.metadata."
_PLACE = "torch.distributed.checkpoint.filesystem._StorageInfo"
_KINDS = ("Metadata", "MetadataIndex", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata")
DTYPES = {
    f"torch.{name}": getattr(torch, name)
    for name in ("float32", "float64", "bfloat16", "float16", "int64", "int32", "uint8", "bool")
}
_NAMES = {
    *(_DCP + kind for kind in (*_KINDS, "_MEM_FORMAT_ENCODING")),
    *("torch.Size", "torch.serialization._get_layout", _PLACE),
    "builtins.getattr",  # by which Python 3.11.0 to 3.11.3 pickle an enum's member
    *DTYPES,
}
_MOST = 1 << 62  # no size, offset or length is as large
_DIMENSIONS = 64  # torch's own limit
_AROUND = 64 << 10  # bytes; a record has some 1,500 beside its values
_SHOWN = 200  # characters of a name in a message


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor, and the record that holds its values: ``length`` bytes of ``file`` from ``begin`` on."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    begin: int
    length: int


@dataclass(frozen=True)
class Entry:
    """A stored tensor; its chunks tile it."""

    size: tuple[int, ...]
    dtype: torch.dtype
    chunks: Sequence[Chunk]


def read_listing(data: bytes, files: Mapping[str, int]) -> dict[str, Entry]:
    """Returns the tensors that ``data``, the content of `.metadata`, lists.

    Args:
        files: name -> bytes of the files of tensors.

    Raises:
        ValueError: says what is no list of tensors, or does not agree.
    """
    fields = _state(read_pickle(data, _NAMES), _DCP + "Metadata")
    places = {_index(key): _place(value, files) for key, value in _dict(fields.get("storage_data")).items()}
    entries = {}
    for name, value in _dict(fields.get("state_dict_metadata")).items():
        if type(name) is not str:
            raise ValueError("a tensor whose name is no text")
        entries[name] = _entry(name, value, places)
    if places:
        raise ValueError(f"{len(places)} records of no tensor, such as {_short(next(iter(places))[0])}")
    _check_apart(chunk for entry in entries.values() for chunk in entry.chunks)
    return entries


def _entry(name: str, value: Any, places: dict[tuple[str, tuple[int, ...]], tuple[str, int, int]]) -> Entry:
    """Returns the tensor ``name``, and takes its chunks' records out of ``places``."""
    fields, shown = _state(value, _DCP + "TensorStorageMetadata"), _short(name)
    properties = _made(fields.get("properties"), _DCP + "TensorProperties").state
    if type(properties) is not tuple or len(properties) != 5 or type(properties[0]) is not Name:
        raise ValueError(f"{shown} has no dtype")
    if properties[0] not in DTYPES or _made(properties[1], "torch.serialization._get_layout").arguments != (
        "torch.strided",
    ):
        raise ValueError(f"{shown} is no dense tensor of a known dtype")
    size, dtype, chunks = _size(fields.get("size")), DTYPES[properties[0]], []
    listed = fields.get("chunks")
    if type(listed) is not list:
        raise ValueError(f"{shown} has no list of chunks")
    for chunk in listed:
        box = _state(chunk, _DCP + "ChunkStorageMetadata")
        offsets, sizes = _size(box.get("offsets")), _size(box.get("sizes"))
        # a record holds one chunk, so that what is listed is no longer than the records are
        place = places.pop((name, offsets), None)
        if place is None:
            raise ValueError(f"{shown} has a chunk at {list(offsets)} without a record of its own")
        if len(sizes) != len(size) or not 0 <= place[2] - math.prod(sizes) * dtype.itemsize <= _AROUND:
            raise ValueError(f"{shown} has a chunk of shape {list(sizes)} in a record of {place[2]:,} bytes")
        chunks.append(Chunk(offsets, sizes, *place))
    if not tiles(size, [(chunk.offsets, chunk.sizes) for chunk in chunks]):
        raise ValueError(f"the chunks of {shown} do not tile its shape {list(size)}: they overlap or are not all there")
    if is_stacked(name) and (not size or len(chunks) < size[0]):
        raise ValueError(f"the stack {shown} of shape {list(size)} has fewer chunks than layers")
    if is_stacked(name) and len(numbers_of(name) or range(size[0])) != size[0]:
        raise ValueError(f"the stack {shown} of shape {list(size)} has other layers than its name says")
    return Entry(size, dtype, chunks)


def tiles(shape: Sequence[int], boxes: Sequence[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """Whether boxes (offsets, sizes) are the cells of a grid that covers ``shape``: each element lies in one of them.

    A mesh cuts every dimension of a tensor for all of the others alike, so shards always are such cells.
    """
    cuts: list[dict[int, int]] = [{} for _ in shape]  # of each dimension: where a cell begins -> its size
    for offsets, sizes in boxes:
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            return False
        if any(cut.setdefault(at, size) != size for cut, at, size in zip(cuts, offsets, sizes, strict=True)):
            return False
    for cut, length in zip(cuts, shape, strict=True):
        end = 0
        for at in sorted(cut):
            if at != end:
                return False
            end += cut[at]
        if end != length:
            return False
    return len(boxes) == math.prod(map(len, cuts)) == len({tuple(offsets) for offsets, _ in boxes})


def _check_apart(chunks: Iterable[Chunk]) -> None:
    """Raises ValueError if two records share bytes: all tensors together are then no larger than the files."""
    ends: dict[str, int] = {}
    for chunk in sorted(chunks, key=lambda chunk: (chunk.file, chunk.begin)):
        if chunk.begin < ends.get(chunk.file, 0):
            raise ValueError(f"two records share bytes of {chunk.file}")
        ends[chunk.file] = chunk.begin + chunk.length


def _index(key: Any) -> tuple[str, tuple[int, ...]]:
    fields = _state(key, _DCP + "MetadataIndex")
    if type(fields.get("fqn")) is not str:
        raise ValueError("a record of a tensor without a name")
    return fields["fqn"], _size(fields.get("offset"))


def _place(value: Any, files: Mapping[str, int]) -> tuple[str, int, int]:
    fields = _state(value, _PLACE)
    file, begin, length = (fields.get(name) for name in ("relative_path", "offset", "length"))
    if type(file) is not str or file not in files:
        raise ValueError(f"a record lies in {_short(file)}, which is no file of tensors that the manifest names")
    if type(begin) is not int or type(length) is not int or not 0 <= begin < begin + length <= files[file]:
        raise ValueError(f"a record lies beyond the {files[file]:,} bytes of {file}")
    if fields.get("transform_descriptors"):
        raise ValueError("a record that is compressed")
    return file, begin, length


def _size(value: Any) -> tuple[int, ...]:
    arguments = _made(value, "torch.Size").arguments
    size = arguments[0] if len(arguments) == 1 else None
    if type(size) is not tuple or len(size) > _DIMENSIONS or not all(map(_is_count, size)):
        raise ValueError("a size that is none")
    return size


def _state(value: Any, kind: str) -> dict[str, Any]:
    return _dict(_made(value, kind).state)


def _made(value: Any, kind: str) -> Made:
    if type(value) is not Made or value.kind != kind:
        found = value.kind if type(value) is Made else type(value).__name__
        raise ValueError(f"a {found} in the place of a {kind.rpartition('.')[2]}")
    return value


def _dict(value: Any) -> dict[Any, Any]:
    if type(value) is not dict:
        raise ValueError(f"a {type(value).__name__} in the place of a dict")
    return value


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MOST


def _short(value: Any) -> str:
    """A value for a message: on one line, and not long."""
    if type(value) is not str:
        return f"a {type(value).__name__}"
    return value if len(value) <= _SHOWN and value.isprintable() else repr(value[:_SHOWN])
