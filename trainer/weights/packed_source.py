"""A source whose weights are packed while they are read, as their plan stores them."""

import torch

from shardwright.errors import UserError
from shardwright.files.arrays import Array, LazyArray, Slices, keeping_last
from shardwright.layout.plan import Packed, ShardingPlan
from shardwright.models.adapters.packings.registry import SCALE, Part
from shardwright.weights.weight_sources import Source

# (first, behind the last) of each of a weight's dimensions: whole blocks
_Region = tuple[tuple[int, int], ...]
_Parts = tuple[torch.Tensor, torch.Tensor]


def packed_source(source: Source, plan: ShardingPlan) -> Source:
    """``source`` with the weights that ``plan`` packs as codes, and their scales under names of their own.

    Blocks are read whole, and once. The host holds the codes of one weight, the scales that have not been asked for
    yet, and the numbers of one slice of dimension 0.
    """
    packed = {name: entry.packed for entry in plan.parameters if entry.packed for name in plan.members(entry.name)}
    codes = keeping_last(lambda name: dict[_Region, torch.Tensor]())
    scales: dict[tuple[str, _Region], torch.Tensor] = {}

    def read(name: str, part: Part, where: Slices, *, scale: bool) -> torch.Tensor:
        region, inside = _blocks(packed[name], part, where)
        if not (scale and (name, region) in scales) and region not in codes(name):
            codes(name)[region], scales[name, region] = _read(source, name, packed[name], region)
        return scales.pop((name, region))[inside] if scale else codes(name)[region][inside]

    def source_of_parts(name: str) -> Array:
        base = name.removesuffix(SCALE)
        if base not in packed:
            return source(name)
        how, scale = packed[base], name != base
        part = how.packing.scales(how.weight) if scale else how.packing.codes(how.weight)
        return LazyArray(part.shape, part.dtype, lambda where: read(base, part, where, scale=scale))

    return source_of_parts


def _blocks(how: Packed, part: Part, where: Slices) -> tuple[_Region, Slices]:
    """The weight's blocks around ``where`` of a part, and ``where`` as slices of that part of these blocks."""
    block = how.packing.block(how.weight)
    region, inside = [(0, 0)] * len(block), []
    for place, size, dim, step in zip(where, part.shape, part.dims, part.steps, strict=True):
        first, last, _ = place.indices(size)
        begin = first * step // block[dim] * block[dim]
        end = min(-(-last * step // block[dim]) * block[dim], how.weight.shape[dim])
        region[dim] = begin, end
        inside.append(slice(first - begin // step, last - begin // step))
    return tuple(region), tuple(inside)


def _read(source: Source, name: str, how: Packed, region: _Region) -> _Parts:
    """Codes and scales of a region; a slice of dimension 0 at a time, if there are three."""
    (first, last), *others = region
    if len(region) < 3:
        return _packed(source, name, how, region)
    # only the last two dimensions have blocks of more than one
    parts = [_packed(source, name, how, ((n, n + 1), *others)) for n in range(first, last)]
    codes, scales = zip(*parts, strict=True)
    return torch.cat(codes), torch.cat(scales)


def _packed(source: Source, name: str, how: Packed, region: _Region) -> _Parts:
    where = tuple(slice(*pair) for pair in region)
    try:
        return how.packing.pack(source(name)[where], how.weight)
    except ValueError as error:
        raise UserError(
            asked=f"{name} in {how.packing.title}",
            found=str(error),
            why="there is no code for it",
            instead="--base_dtype bfloat16, or a checkpoint without such values",
        ) from error
