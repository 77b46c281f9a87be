"""A source of weights in int8, made of any other while it is read."""

from __future__ import annotations

import torch

from shardwright.errors import UserError
from shardwright.files.arrays import Array, Slices
from shardwright.layout.plan import ShardingPlan
from shardwright.models.adapters.int8 import SCALE, to_int8
from shardwright.weights.weight_sources import Source

_Rows = tuple[tuple[int, int], ...]


def with_int8(source: Source, plan: ShardingPlan) -> Source:
    """``source`` with the weights that ``plan`` stores in int8 rounded so, and their scales.

    Rows are rounded whole, and read once: the host holds those of one parameter, and all scales, which are small.
    """
    rounded = _Rounded(source)
    names = {member for entry in plan.parameters if entry.dtype == torch.int8 for member in plan.members(entry.name)}

    def read(name: str) -> Array:
        base = name.removesuffix(SCALE)
        return _Int8(rounded, base, scales=name != base) if base in names else source(name)

    return read


class _Rounded:
    """What was read and rounded: the rows of the parameter that is being read, and every scale so far."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._name, self._values = "", dict[_Rows, torch.Tensor]()
        self._scales: dict[tuple[str, _Rows], torch.Tensor] = {}

    def read(self, name: str, rows: Slices, *, scales: bool) -> torch.Tensor:
        """The rows ``rows`` of the parameter ``name``, or their scales."""
        array = self.source(name)
        key = tuple(place.indices(size)[:2] for place, size in zip(rows, array.shape, strict=False))
        if scales and (name, key) in self._scales:
            return self._scales[name, key]
        if name != self._name:
            self._name, self._values = name, {}
        if key not in self._values:
            try:
                self._values[key], self._scales[name, key] = to_int8(array[(*rows, slice(0, array.shape[-1]))])
            except ValueError as error:
                raise UserError(
                    asked=f"{name} in int8",
                    found=str(error),
                    why="integers have none",
                    instead="--base_dtype bfloat16, or a checkpoint without such values",
                ) from error
        return self._scales[name, key] if scales else self._values[key]


class _Int8:
    """The :class:`Array` of a parameter in int8, or of its scales."""

    def __init__(self, rounded: _Rounded, name: str, *, scales: bool) -> None:
        self.rounded, self.name, self.scales = rounded, name, scales
        shape = tuple(rounded.source(name).shape)
        self.shape = (*shape[:-1], 1) if scales else shape
        self.dtype = torch.float32 if scales else torch.int8

    def __getitem__(self, where: Slices) -> torch.Tensor:
        return self.rounded.read(self.name, where[:-1], scales=self.scales)[..., where[-1]]
