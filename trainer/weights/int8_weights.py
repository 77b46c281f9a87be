"""A source that rounds another's weights to int8 as they are read."""

from __future__ import annotations

import torch

from shardwright.errors import UserError
from shardwright.files.arrays import Array, LazyArray, Slices, keeping_last
from shardwright.layout.plan import ShardingPlan
from shardwright.models.adapters.int8 import SCALE, to_int8
from shardwright.weights.weight_sources import Source

_Rows = tuple[tuple[int, int], ...]


def with_int8(source: Source, plan: ShardingPlan) -> Source:
    """``source`` with the weights that ``plan`` stores in int8 rounded, and their scales.

    Rows are rounded whole and read once. The host holds the rows of one parameter, and all scales, which are small.
    """
    rounded = keeping_last(lambda name: dict[_Rows, torch.Tensor]())
    scales: dict[tuple[str, _Rows], torch.Tensor] = {}
    names = {member for entry in plan.parameters if entry.dtype == torch.int8 for member in plan.members(entry.name)}

    def read(name: str, rows: Slices, *, scale: bool) -> torch.Tensor:
        array = source(name)
        key = tuple(place.indices(size)[:2] for place, size in zip(rows, array.shape, strict=False))
        if scale and (name, key) in scales:
            return scales[name, key]
        values = rounded(name)
        if key not in values:
            try:
                values[key], scales[name, key] = to_int8(array[(*rows, slice(0, array.shape[-1]))])
            except ValueError as error:
                raise UserError(
                    asked=f"{name} in int8",
                    found=str(error),
                    why="integers have none",
                    instead="--base_dtype bfloat16, or a checkpoint without such values",
                ) from error
        return scales[name, key] if scale else values[key]

    def int8_source(name: str) -> Array:
        base = name.removesuffix(SCALE)
        if base not in names:
            return source(name)
        shape, scale = tuple(source(base).shape), name != base
        return LazyArray(
            (*shape[:-1], 1) if scale else shape,
            torch.float32 if scale else torch.int8,
            lambda where: read(base, where[:-1], scale=scale)[..., where[-1]],
        )

    return int8_source
