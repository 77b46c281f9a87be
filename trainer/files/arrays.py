"""Arrays: values that are read a slice at a time, wherever they lie."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

Slices = tuple[slice, ...]
K = TypeVar("K")
T = TypeVar("T")


class Array(Protocol):
    """Anything with a shape and a dtype that is read by slices: a tensor on the host, a file, devices."""

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def __getitem__(self, where: Slices, /) -> torch.Tensor:
        """The values at ``where``, one slice for each dimension, as a tensor on the host."""


@dataclass(frozen=True)
class LazyArray:
    """An :class:`Array` whose slices are the results of ``read``."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[Slices], torch.Tensor]

    def __getitem__(self, where: Slices) -> torch.Tensor:
        return self.read(where)


def shaped_like(array: Array, read: Callable[[Slices], torch.Tensor]) -> LazyArray:
    """An array with the shape and dtype of ``array``, whose slices are the results of ``read``."""
    return LazyArray(tuple(array.shape), array.dtype, read)


def mapped(
    array: Array, function: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype | None = None
) -> LazyArray:
    """``array`` with ``function`` of what each read gives, as ``dtype``, by default its own."""
    dtype = dtype or array.dtype
    return LazyArray(tuple(array.shape), dtype, lambda where: function(array[where]).to(dtype))


class Stack:
    """The :class:`Array` ``[layers, ...]`` of arrays of one shape."""

    def __init__(self, layers: Sequence[Array]) -> None:
        self.layers = layers
        self.shape, self.dtype = (len(layers), *layers[0].shape), layers[0].dtype

    def __getitem__(self, where: Slices) -> torch.Tensor:
        return torch.stack([layer[where[1:]] for layer in self.layers[where[0]]])


def layer_of(stack: Array, layer: int) -> LazyArray:
    """One layer of a stack."""
    return LazyArray(tuple(stack.shape[1:]), stack.dtype, lambda where: stack[(slice(layer, layer + 1), *where)][0])


def is_finite(values: torch.Tensor) -> bool:
    """Whether no value is infinite or no number; in one pass without a copy, 0.09 CPU s a GB."""
    if not values.numel():
        return True
    least, largest = values.aminmax()  # of which both are NaN where one value is
    return math.isfinite(least) and math.isfinite(largest)


def whole(array: Array) -> torch.Tensor:
    return array[tuple(slice(0, size) for size in array.shape)]


def keeping_last(make: Callable[[K], T]) -> Callable[[K], T]:
    """``make``, whose last result is kept, and freed before the next is made: two are never held."""
    kept: dict[K, T] = {}

    def last(key: K) -> T:
        if key not in kept:
            kept.clear()
            kept[key] = make(key)
        return kept[key]

    return last
