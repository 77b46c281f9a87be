"""Arrays: values that are read a slice at a time, wherever they lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

Slices = tuple[slice, ...]


class Array(Protocol):
    """What has a shape and a dtype and is read by slices: a tensor on the host, a file, a tensor on the devices."""

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def __getitem__(self, where: Slices, /) -> torch.Tensor:
        """The values at ``where``, one slice for each dimension, as a tensor on the host."""
        ...


class Stack:
    """The :class:`Array` ``[layers, ...]`` that stacks arrays of one shape along a new first dimension."""

    def __init__(self, layers: Sequence[Array]) -> None:
        self.layers = layers
        self.shape, self.dtype = (len(layers), *layers[0].shape), layers[0].dtype

    def __getitem__(self, where: Slices) -> torch.Tensor:
        return torch.stack([layer[where[1:]] for layer in self.layers[where[0]]])


class Layer:
    """The :class:`Array` of one layer of a stack, without the stack's first dimension."""

    def __init__(self, stack: Array, layer: int) -> None:
        self.stack, self.layer = stack, layer
        self.shape, self.dtype = tuple(stack.shape[1:]), stack.dtype

    def __getitem__(self, where: Slices) -> torch.Tensor:
        return self.stack[(slice(self.layer, self.layer + 1), *where)][0]
