"""safetensors files (https://github.com/huggingface/safetensors#format), written front to back, without a copy.

8 bytes, the header's length N (unsigned, little endian); N bytes of JSON, name -> dtype, shape, [begin, end) in what
follows, padded with spaces; then the tensors, little endian, row-major, with no gap between them.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

# dtypes by their names in a header
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
LARGEST = 100_000_000  # bytes of a header: safetensors' own limit
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def file_header(tensors: Mapping[str, tuple[Sequence[int], torch.dtype]], **metadata: str) -> bytes:
    """The header of a file of tensors with these shapes and dtypes, in this order, and of what it says beside them."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for name, (shape, dtype) in tensors.items():
        begin, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        entries[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class HeaderEntry(NamedTuple):
    """A tensor in a header; it lies in [begin, end) of a file's bytes."""

    dtype: str  # the header's name of it
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(read: Callable[[int, int], bytes]) -> dict[str, HeaderEntry]:
    """The tensors of a file by name; ``read`` returns its bytes from one place up to another.

    Raises ValueError for what is no header, or names a tensor twice (safetensors' own reader takes the last one).
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = next(name for i, (name, _) in enumerate(pairs) if name in dict(pairs[:i]))
            raise ValueError(f"{twice[:200]!r} stands twice in its header")
        return found

    size = int.from_bytes(read(0, 8), "little")
    if size > LARGEST:
        raise ValueError(f"a header of {size:,} bytes")
    found = json.loads(read(8, 8 + size), object_pairs_hook=unique)
    found.pop("__metadata__", None)
    entries = {}
    for name, entry in found.items():
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        entries[name] = HeaderEntry(entry["dtype"], tuple(entry["shape"]), begin, end)
    return entries


def bytes_of(values: torch.Tensor) -> memoryview:
    """The bytes of a tensor on the host, in its own memory where that is row-major."""
    return values.contiguous().reshape(-1).view(torch.uint8).numpy().data
