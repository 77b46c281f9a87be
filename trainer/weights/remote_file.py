"""A safetensors file in a repository of the hub, of which the header is fetched, and no tensor but small ones."""

from dataclasses import dataclass

import torch
from huggingface_hub import HfFileSystem

from shardwright.files.arrays import Array, LazyArray, Slices
from shardwright.files.safetensors_file import DTYPES, Entry, read_header

SMALL = 2**20  # bytes of a tensor that may be fetched: shapes and other settings that a format keeps in tensors


@dataclass(frozen=True)
class RemoteFile:
    """A file of the repository ``id`` at ``revision``."""

    repository: str
    revision: str
    name: str

    def arrays(self) -> dict[str, Array]:
        """Name -> tensor; the header is fetched, by two requests for a range of bytes.

        Raises ValueError for a header that is none, and the hub client's errors.
        """
        return {name: self._array(entry) for name, entry in read_header(self._bytes).items()}

    def _array(self, entry: Entry) -> LazyArray:
        dtype = DTYPES[entry.dtype]

        def read(where: Slices) -> torch.Tensor:
            if entry.end - entry.begin > SMALL:
                raise ValueError(f"a tensor of shape {list(entry.shape)} is not fetched from {self.repository}")
            data = bytearray(self._bytes(entry.begin, entry.end))
            return torch.frombuffer(data, dtype=dtype).reshape(entry.shape)[where]

        return LazyArray(entry.shape, dtype, read)

    def _bytes(self, start: int, stop: int) -> bytes:
        data: bytes = HfFileSystem().cat_file(f"{self.repository}@{self.revision}/{self.name}", start=start, end=stop)
        return data
