"""Which mesh axes shard a tensor, and which parameter a collective is about, both read off HLO shardings and shapes."""

from __future__ import annotations

import math
import re
from functools import lru_cache

import numpy as np

from trainer.compile.hlo.collectives import Collective
from trainer.compile.lowering import Argument, Lowered

_DIMS = re.compile(r"\[([\d,]*)\]")


@lru_cache(maxsize=4096)
def axes_of_dimensions(sharding: str, rank: int, mesh: tuple[tuple[str, int], ...]) -> tuple[tuple[str, ...], ...]:
    """For each dimension, the mesh axes along which its shards differ.

    Args:
        sharding: HLO's text: ``{replicated}``, ``{devices=[8,1]<=[8]}``, ``{devices=[4,1,2]0,1,…}``.
        mesh: (axis, size) in mesh order; device ids are positions in it.
    """
    none: tuple[tuple[str, ...], ...] = ((),) * rank
    match = re.match(r"\{devices=\[([\d,]+)\](?:<=\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,]+))", sharding)
    if match is None:
        return none
    tiles, dims, order, listed = ([int(d) for d in (group or "").split(",") if d] for group in match.groups())
    ids = np.array(listed) if listed else np.arange(math.prod(dims)).reshape(dims).transpose(order or None).ravel()
    place = np.empty((len(ids), len(tiles)), int)  # device → its tile's index in each dimension
    place[ids] = np.stack(np.unravel_index(np.arange(len(ids)), tiles), axis=1)
    grid = place.reshape(*(size for _, size in mesh), len(tiles))
    axes: list[tuple[str, ...]] = []
    for dimension in range(rank):
        index = grid[..., dimension]
        axes.append(tuple(name for n, (name, _) in enumerate(mesh) if (index != index.take([0], axis=n)).any()))
    return tuple(axes)


class Parameters:
    """The step's weights by the sizes that collectives about them have."""

    def __init__(self, lowered: Lowered) -> None:
        self.mesh = tuple(lowered.mesh.items())
        self.layers = lowered.layers
        self.weights = [a for a in lowered.arguments if a.kind == "weights" and len(a.shape) > 1]
        batches = [a for a in lowered.arguments if a.kind == "batch"]
        self.batch_axes = {axis for a in batches for axes in self._axes(a) for axis in axes}
        self.batch_elements = max((math.prod(a.shape) for a in batches), default=0)

    def _axes(self, argument: Argument) -> tuple[tuple[str, ...], ...]:
        return axes_of_dimensions(argument.sharding, len(argument.shape), self.mesh)

    def behind(self, key: Collective) -> tuple[str, list[str]]:
        """(purpose, parameters) of a collective that has the size of parameters sharded along its axes.

        Purpose: ``weights`` for a gather of them or a shard handed round, ``stack`` for a gather of all layers at once,
        ``gradients`` for a reduction, empty if nothing fits. Sizes can agree by chance; then several are named.
        """
        axes = set(key.axis.removeprefix("within ").split("×"))
        sizes = {math.prod(int(d) for d in dims.split(",") if d) for dims in _DIMS.findall(key.shape)}
        found: dict[str, list[str]] = {}
        for weight in self.weights:
            sharded = {axis for names in self._axes(weight) for axis in names}
            if not axes <= sharded:
                continue
            local = math.prod(weight.shape) // math.prod(dict(self.mesh)[axis] for axis in sharded)
            stacked = self.layers > 1 and weight.shape[0] == self.layers
            whole = local * math.prod(dict(self.mesh)[axis] for axis in axes)
            layer = whole // self.layers if stacked else whole
            if key.kind in ("all-gather", "all-reduce", "reduce-scatter"):
                purpose = "weights" if key.kind == "all-gather" else "gradients"
                if layer in sizes:
                    found.setdefault(purpose, []).append(weight.name)
                elif stacked and whole in sizes and key.kind == "all-gather":
                    found.setdefault("stack", []).append(weight.name)
            elif key.kind == "collective-permute" and (local // self.layers if stacked else local) in sizes:
                found.setdefault("weights", []).append(weight.name)
        for purpose, names in found.items():
            return purpose, names
        return "", []

    def shaped_like(self, shape: str) -> str:
        """The weight of which a chip holds a tensor of this shape (HLO's text), all layers or one; empty if none."""
        match = _DIMS.search(shape)
        dims = tuple(int(d) for d in match[1].split(",") if d) if match else ()
        sizes = dict(self.mesh)
        for weight in self.weights:
            splits = (math.prod(sizes[axis] for axis in axes) for axes in self._axes(weight))
            local = tuple(size // split for size, split in zip(weight.shape, splits, strict=True))
            if dims == local or (self.layers > 1 and dims == local[1:] and weight.shape[0] == self.layers):
                return weight.name
        return ""

    def holds_batch(self, key: Collective) -> bool:
        """Is some shape at least as large as the global batch's tokens, and not a parameter's?"""
        return any(
            math.prod(int(d) for d in dims.split(",") if d) >= max(self.batch_elements, 2)
            for dims in _DIMS.findall(key.shape)
        )
