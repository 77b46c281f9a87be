"""Slices of an array against those of a tensor."""

from __future__ import annotations

import itertools

import torch

from shardwright.files.arrays import Array


def assert_every_slice(values: Array, expected: torch.Tensor) -> None:
    """Asserts that ``values`` are ``expected`` bit for bit: the whole, and slices on and off the blocks' bounds."""
    assert values.dtype == expected.dtype
    assert tuple(values.shape) == tuple(expected.shape)
    cuts = [sorted({0, 1, size // 2, size // 2 + 1, size}) for size in expected.shape]
    for bounds in itertools.product(*(itertools.combinations(cut, 2) for cut in cuts)):
        where = tuple(slice(*pair) for pair in bounds)
        assert torch.equal(bits(values[where]), bits(expected[where])), where


def bits(values: torch.Tensor) -> torch.Tensor:
    """The numbers' bits, which tell 0 from -0 and are equal for a NaN."""
    return values.clone(memory_format=torch.contiguous_format).view(
        torch.int16 if values.dtype.itemsize == 2 else torch.int32
    )
