"""A record of a file of tensors: one tensor as `torch.save` writes it, a ZIP archive whose entries are not compressed.

`torch.load` is not asked. It makes a storage as large as the record says, and runs what it calls safe.
"""

from __future__ import annotations

import io
import math
import struct
import sys
import zipfile
from typing import IO, Any

import torch

from shardwright.checkpoint.plain_pickle import Made, read_pickle

# semi-private: torch/serialization.py and torch/_utils.py, torch 2.9; the classes by which a pickle names a dtype
_STORAGES = {
    torch.float32: "torch.FloatStorage",
    torch.float64: "torch.DoubleStorage",
    torch.bfloat16: "torch.BFloat16Storage",
    torch.float16: "torch.HalfStorage",
    torch.int64: "torch.LongStorage",
    torch.int32: "torch.IntStorage",
    torch.uint8: "torch.ByteStorage",
    torch.bool: "torch.BoolStorage",
}
_REBUILD, _NO_HOOKS = "torch._utils._rebuild_tensor_v2", "collections.OrderedDict"
_SMALL = 64 << 10  # bytes; the pickle of a tensor has some two hundred
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # of a ZIP's entry: its mark, and the lengths of the name and the rest


def read_record(file: IO[bytes], begin: int, length: int, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Returns the tensor of ``sizes`` and ``dtype`` that lies in ``length`` bytes of ``file`` from ``begin`` on.

    Raises:
        ValueError: there is another tensor or none. Other errors, of many types: the archive is damaged.
    """
    part = _Part(file, begin, length)
    with zipfile.ZipFile(part) as archive:  # type: ignore[arg-type]
        entries = archive.namelist()
        if len(set(entries)) < len(entries):
            raise ValueError("an archive with two entries of one name")
        if "archive/byteorder" in entries and _small(archive, "byteorder") != sys.byteorder.encode():
            raise ValueError("a tensor of another byte order")
        names = {_REBUILD, _NO_HOOKS, _STORAGES[dtype]}
        stride = _stride(read_pickle(_small(archive, "data.pkl"), names), sizes, dtype)
        values = torch.empty(math.prod(sizes), dtype=dtype)
        _fill(part, _entry(archive, "data/0"), values)
    return values.as_strided(sizes, stride)


def _stride(made: Any, sizes: tuple[int, ...], dtype: torch.dtype) -> tuple[int, ...]:
    """Returns the strides of the tensor that a record's pickle describes.

    Raises:
        ValueError: it is not of ``sizes`` and ``dtype``, or not as large as its storage.
    """
    count = math.prod(sizes)
    storage = ("storage", _STORAGES[dtype], "0", "cpu", count)
    if type(made) is not Made or made.kind != _REBUILD or made.state is not None or len(made.arguments) < 4:
        raise ValueError("no tensor")
    found, offset, size, stride, *_ = made.arguments
    if found != storage or offset != 0 or size != sizes:
        raise ValueError(f"a tensor of another shape or dtype than {list(sizes)} {dtype}")
    good = type(stride) is tuple and len(stride) == len(sizes) and all(type(s) is int and s >= 0 for s in stride)
    if not good or (count and sum((n - 1) * s for n, s in zip(sizes, stride, strict=True)) >= count):
        raise ValueError("a tensor that is larger than its storage")
    return stride


def _small(archive: zipfile.ZipFile, name: str) -> bytes:
    found = _entry(archive, name)
    if found.file_size > _SMALL:
        raise ValueError(f"{name} of {found.file_size:,} bytes")
    return archive.read(found)


def _fill(part: _Part, storage: zipfile.ZipInfo, values: torch.Tensor) -> None:
    """Reads the values of the archive's storage, all of them, into ``values``.

    Not by way of the archive, which would copy them once more and compute another checksum: the file's was compared.
    """
    if storage.file_size != values.nbytes:
        raise ValueError(f"{storage.file_size:,} bytes in the place of {values.nbytes:,}")
    part.seek(storage.header_offset)
    header = part.read(_LOCAL_HEADER.size)
    mark, name, extra = _LOCAL_HEADER.unpack(header)
    part.seek(name + extra, io.SEEK_CUR)
    into = memoryview(values.view(torch.uint8).numpy())  # type: ignore[arg-type]
    if mark != b"PK\3\4" or part.at + len(into) > part.length:
        raise ValueError("no storage where the archive says")
    part.file.seek(part.begin + part.at)
    while into:
        count = part.file.readinto(into)  # type: ignore[attr-defined]
        if not count:
            raise ValueError(f"{len(into):,} bytes too few")
        into = into[count:]


def _entry(archive: zipfile.ZipFile, name: str) -> zipfile.ZipInfo:
    """Returns an entry of an archive, which must not be compressed.

    Raises:
        ValueError: it is. KeyError: there is none.
    """
    found = archive.getinfo(f"archive/{name}")
    if found.compress_type != zipfile.ZIP_STORED or found.compress_size != found.file_size:
        raise ValueError(f"{name} is compressed")
    return found


class _Part(io.RawIOBase):
    """A part of a file as a file for reading."""

    def __init__(self, file: IO[bytes], begin: int, length: int) -> None:
        self.file, self.begin, self.length, self.at = file, begin, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.length}[whence]
        self.at = max(0, start + offset)
        return self.at

    def tell(self) -> int:
        return self.at

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self.length - self.at)
        self.file.seek(self.begin + self.at)
        block = self.file.read(left if size is None or size < 0 else min(size, left))
        self.at += len(block)
        return block
