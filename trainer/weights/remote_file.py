"""A safetensors file in a repository of the hub, of which the header is fetched, and no tensor but small ones."""

import functools
from dataclasses import dataclass

import torch
from huggingface_hub import hf_hub_url
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

from shardwright.files.arrays import Array, LazyArray, Slices
from shardwright.files.hub_names import hub_error
from shardwright.files.safetensors_file import DTYPES, HeaderEntry, read_header

SMALL = 2**20  # bytes of a tensor that may be fetched: shapes and other settings that a format keeps in tensors


@dataclass(frozen=True)
class RemoteFile:
    """A file of the repository ``id`` at ``revision``."""

    repository: str
    revision: str
    name: str

    @functools.cached_property
    def arrays(self) -> dict[str, Array]:
        """Name -> tensor; the header is fetched once, by two requests for a range of bytes.

        Raises UserError for a header that is none, or if the hub does not give it.
        """
        try:
            return {name: self._array(entry) for name, entry in read_header(self._bytes).items()}
        except Exception as error:  # the hub client raises many kinds, and a header may hold anything
            raise hub_error(f"the header of {self.name}", self.repository, error) from error

    def _array(self, entry: HeaderEntry) -> LazyArray:
        dtype = DTYPES[entry.dtype]

        def read(where: Slices) -> torch.Tensor:
            if entry.end - entry.begin > SMALL:
                raise ValueError(f"a tensor of shape {list(entry.shape)} is not fetched from {self.repository}")
            data = bytearray(self._bytes(entry.begin, entry.end))
            return torch.frombuffer(data, dtype=dtype).reshape(entry.shape)[where]

        return LazyArray(entry.shape, dtype, read)

    def _bytes(self, start: int, stop: int) -> bytes:
        """The file's bytes from one place up to another, or to its end."""
        # as the hub's own client asks for headers (HfApi.parse_safetensors_file_metadata), which keeps no offsets
        headers = build_hf_headers() | {"Range": f"bytes={start}-{stop - 1}"}
        reply = get_session().get(hf_hub_url(self.repository, self.name, revision=self.revision), headers=headers)
        hf_raise_for_status(reply)
        data: bytes = reply.content
        return data
