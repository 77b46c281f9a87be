"""Values that can be read by slices, wherever they lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

Slices = tuple[slice, ...]


class Array(Protocol):
    """Values that can be read by slices: a tensor on the host, or a file."""

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def __getitem__(self, where: Slices, /) -> torch.Tensor:
        """The part at ``where``, which names every dimension; on the host."""
        ...


class Stack:
    """Arrays of one shape as one with a dimension more, in front; see :class:`Array`."""

    def __init__(self, layers: Sequence[Array]) -> None:
        self.layers = layers
        self.shape, self.dtype = (len(layers), *layers[0].shape), layers[0].dtype

    def __getitem__(self, where: Slices) -> torch.Tensor:
        return torch.stack([layer[where[1:]] for layer in self.layers[where[0]]])
