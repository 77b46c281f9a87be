"""Attributes collectives to parameters, and flags those that the recipe did not plan.

Where the compiler's metadata doesn't tell, sizes do: a parameter's shape and sharding say how many elements its gather,
or its gradient's reduction, must have.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.compile.hlo.communication import Collective, Traffic
from shardwright.compile.hlo.text import leaves
from shardwright.compile.lowered_graph import Argument, LoweredGraph
from shardwright.layout.partition import axes_of
from shardwright.layout.stacking import is_stacked

_WITHIN = "within "  # before axes of which a collective's groups are parts
_NOTABLE_BYTES = 64 * 2**20  # a step; a collective that moves less is not flagged


@dataclass(frozen=True)
class CollectiveLine:
    """All collectives of one kind, over one axis, on behalf of one module; numbers are a step's `Traffic`."""

    kind: str
    axis: str  # mesh axes, `fsdp×expert`; `slices` over DCN
    count: float
    bytes: float
    wire_bytes: float
    exposed_bytes: float
    module: str  # that the compiler's metadata names; without one, the parameter that fits, or the operation
    purpose: str  # `weights` (of one layer), `stack` (of all layers), `gradients`; empty: activations and the rest
    network: str
    shape: str  # of the largest
    unplanned: str  # why it should not be there; empty if nothing is known against it


def collective_lines(
    collectives: Mapping[Collective, Traffic], lowered: LoweredGraph, exchange: str | None
) -> list[CollectiveLine]:
    """One line for each kind, axis, module and purpose, most wire bytes first; ``exchange``: as of `Expected`."""
    parameters = Parameters(lowered)
    grouped = defaultdict(list)
    for key, traffic in collectives.items():
        purpose, names = parameters.behind(key)
        module = key.module if "." in key.module or not names else " or ".join(names[:2])
        why = _unplanned(key, traffic, purpose, names, parameters, exchange)
        grouped[key.kind, key.axis, module, purpose, key.network, why].append((key, traffic))
    lines = []
    for (kind, axis, module, purpose, network, why), members in grouped.items():
        total = Traffic()
        for _, traffic in members:
            total = total.plus(traffic, 1)
        largest, _ = max(members, key=lambda member: member[1].bytes / member[1].count)
        sums = (total.count, total.bytes, total.wire_bytes, total.exposed_bytes)
        lines.append(CollectiveLine(kind, axis, *sums, module, purpose, network, largest.shape, why))
    return sorted(lines, key=lambda line: -line.wire_bytes)


def _unplanned(
    key: Collective, traffic: Traffic, purpose: str, names: list[str], parameters: Parameters, exchange: str | None
) -> str:
    """Why a collective should not be there; empty if nothing is known against it."""
    if traffic.bytes < _NOTABLE_BYTES or key.network == "dcn":
        return ""
    if purpose == "stack":
        return f"{names[0]} is gathered whole, all layers at once"
    if purpose == "gradients" and key.kind == "all-reduce":
        return f"the gradient of {names[0]} is all-reduced over an axis that shards it: a reduce-scatter moves half"
    if purpose:
        return ""
    if key.kind == "all-to-all" and exchange is not None and key.axis != exchange and not parameters.sums(key):
        return f"an all-to-all over {key.axis}; tokens are exchanged over {exchange}"
    gathers = key.kind in ("all-gather", "all-reduce") and _axes(key) & parameters.batch_axes
    if gathers and key.axis != exchange and max(_elements(key.shape), default=0) >= max(parameters.batch_elements, 2):
        return f"activations of the whole batch over {key.axis}, which splits it: the layout was lost there"
    return ""


class Parameters:
    """Finds the step's weights by shapes and sizes of the compiled program."""

    def __init__(self, lowered: LoweredGraph) -> None:
        self.mesh = lowered.mesh
        self.weights = [a for a in lowered.arguments if a.kind == "weights" and len(a.shape) > 1]
        batches = [a for a in lowered.arguments if a.kind == "batch"]
        self.batch_axes = {axis for a in batches for axis in self._sharded(a)}
        self.batch_elements = max((math.prod(a.shape) for a in batches), default=0)

    def behind(self, key: Collective) -> tuple[str, list[str]]:
        """(purpose, parameters' names) of a collective; ("", []) if its size is no parameter's.

        Sizes can agree by chance: then several parameters are named.
        """
        found = defaultdict(list)
        for weight in self.weights:
            if purpose := self._purpose(weight, key):
                found[purpose].append(weight.name)
        # prefer one layer's: the recipe plans no gather of all layers
        return min(found.items(), key=lambda item: item[0] == "stack", default=("", []))

    def _purpose(self, weight: Argument, key: Collective) -> str:
        """The purpose of a collective if the sizes of what it moves say that this is ``weight``.

        A gather or a reduction over several axes may go over parts of them in turn: over a ring of a torus at a time,
        as kernels of experts do.
        """
        sharded, layers, sizes = self._sharded(weight), _layers(weight), _elements(key.shape)
        if not _axes(key) <= sharded:
            return ""
        shards = math.prod(self.mesh[axis] for axis in sharded)
        local = math.prod(weight.shape) // shards
        together = {math.prod(self.mesh[axis] for axis in _axes(key))}
        if key.axis.startswith(_WITHIN):
            together |= {part for part in range(2, shards + 1) if shards % part == 0}
        if key.kind in ("all-gather", "all-reduce", "reduce-scatter"):
            if any(local * part // layers in sizes for part in together):
                return "weights" if key.kind == "all-gather" else "gradients"
            whole = any(local * part in sizes for part in together)
            return "stack" if layers > 1 and whole and key.kind == "all-gather" else ""
        handed_round = key.kind == "collective-permute" and local // layers in sizes
        return "weights" if handed_round else ""

    def sums(self, key: Collective) -> bool:
        """Can an all-to-all be the reduction of a matrix's gradient, of its parts or of the rest after some rings?"""
        devices = math.prod(self.mesh.values())
        for weight in self.weights:
            _, *matrix = weight.shape
            parts = {math.prod(matrix) // part for part in range(1, devices + 1)}
            fits = _layers(weight) > 1 and len(matrix) > 1 and _axes(key) <= self._sharded(weight)
            if fits and _elements(key.shape) & parts:
                return True
        return False

    def shaped_like(self, shape: str) -> str:
        """The weight whose shard, of all layers or one, has this shape (HLO's text); empty if none has."""
        dims = next((leaf.dims for leaf in leaves(shape)), ())
        for weight in self.weights:
            splits = (math.prod(self.mesh[axis] for axis in axes) for axes in self._axes_of(weight))
            local = tuple(size // split for size, split in zip(weight.shape, splits, strict=True))
            if dims == local or (is_stacked(weight.name) and dims == local[1:]):
                return weight.name
        return ""

    def _sharded(self, argument: Argument) -> set[str]:
        return set().union(*self._axes_of(argument))

    def _axes_of(self, argument: Argument) -> list[list[str]]:
        """For each dimension the axes along which its shards differ."""
        return [[axis for axis in axes_of(entry) if self.mesh[axis] > 1] for entry in argument.spec]


def _layers(weight: Argument) -> int:
    return weight.shape[0] if is_stacked(weight.name) else 1


def _axes(key: Collective) -> set[str]:
    return set(key.axis.removeprefix(_WITHIN).split("×"))


def _elements(shapes: str) -> set[int]:
    """The sizes of the arrays in ``bf16[8,128], f32[]``, in elements."""
    return {leaf.elements for leaf in leaves(shapes)}
