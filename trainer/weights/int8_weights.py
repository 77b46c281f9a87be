"""A source that rounds another's weights to int8 as they are read."""

from __future__ import annotations

import torch

from shardwright.errors import UserError
from shardwright.files.arrays import Array, LazyArray, Slices
from shardwright.layout.plan import ShardingPlan
from shardwright.models.adapters.int8 import SCALE, to_int8
from shardwright.weights.weight_sources import Source

_Rows = tuple[tuple[int, int], ...]


def with_int8(source: Source, plan: ShardingPlan) -> Source:
    """``source`` with the weights that ``plan`` stores in int8 rounded, and their scales.

    Rows are rounded whole and read once. The host holds the rows of one parameter, and all scales, which are small.
    """
    rounding = _Rounding(source)
    names = {member for entry in plan.parameters if entry.dtype == torch.int8 for member in plan.members(entry.name)}

    def int8_source(name: str) -> Array:
        base = name.removesuffix(SCALE)
        if base not in names:
            return source(name)
        shape, scales = tuple(source(base).shape), name != base
        return LazyArray(
            (*shape[:-1], 1) if scales else shape,
            torch.float32 if scales else torch.int8,
            lambda where: rounding.read(base, where[:-1], scales=scales)[..., where[-1]],
        )

    return int8_source


class _Rounding:
    """Rounds rows, and keeps those of the parameter read last, and every scale."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._name, self._values = "", dict[_Rows, torch.Tensor]()
        self._scales: dict[tuple[str, _Rows], torch.Tensor] = {}

    def read(self, name: str, rows: Slices, *, scales: bool) -> torch.Tensor:
        """The rounded ``rows`` of the parameter ``name``, or their scales."""
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
