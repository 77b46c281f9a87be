"""The plan of a model under adapters: LoRA factors, and packed weights, each laid out by the line of its weight."""

import math
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shardwright.errors import UserError
from shardwright.layout.partition import shards_of
from shardwright.layout.placement import Shard
from shardwright.layout.plan import Packed, ParameterPlan, ShardingPlan
from shardwright.models.adapters.lora import A0, A, T, base_of
from shardwright.models.adapters.packings.registry import SCALE, Packing, Part, Weight


def with_factors(plan: ShardingPlan, adapted: nn.Module, dtype: torch.dtype) -> ShardingPlan:
    """The plan of the model ``adapted`` (on meta), whose trained parameters are of ``dtype``; all else is frozen.

    ``plan`` is that of the model without factors.
    """
    entries: list[ParameterPlan] = []
    for name, parameter in adapted.named_parameters():
        base = base_of(name)
        if base is None:
            own = parameter.requires_grad
            entries.append(replace(plan[name], trained=own, dtype=dtype if own else plan[name].dtype))
            continue
        transposed = _is_transposed(adapted, base)
        suffix, shape = name.removeprefix(base), tuple(parameter.shape)
        # the weight's dimension that the factor has too, and that dimension in the factor, whose other is the rank
        columns = len(plan[base].shape) - 1
        shared, long = (
            (columns - transposed, columns) if suffix in (A, A0, T) else (columns - 1 + transposed, columns - 1)
        )
        layout = _factor_layout(plan, plan[base], shared, shape, long)
        like = replace(plan[base], name=name, pattern=plan[base].pattern + suffix, shape=shape)
        entries.append(replace(like, dtype=dtype, layout=layout, trained=parameter.requires_grad))
    return replace(plan, parameters=tuple(entries))


def _factor_layout(
    plan: ShardingPlan, weight: ParameterPlan, shared: int, shape: tuple[int, ...], long: int
) -> dict[str, Shard]:
    """The layout of a factor of ``weight``.

    An axis that splits the weight's experts or the dimension shared with the factor splits the factor likewise. A batch
    axis that splits the weight's other dimension splits the factor's long one, since it only stores: the factor is
    gathered before use, as the weight is. Other axes replicate the factor.
    """
    experts = weight.axes_of(0) if len(shape) == 3 else ()
    found = dict.fromkeys(experts, Shard(0)) | dict.fromkeys(weight.axes_of(shared), Shard(long))
    for axis in weight.layout:
        splits = math.prod(plan.mesh[a] for a in found if found[a] == Shard(long))
        if axis not in found and axis in plan.batch and shape[long] % (splits * plan.mesh[axis]) == 0:
            found[axis] = Shard(long)
    return shards_of(found, plan.mesh)


def with_packed(plan: ShardingPlan, adapted: nn.Module, packing: Packing, names: Collection[str]) -> ShardingPlan:
    """``plan`` with the frozen ``names`` of ``adapted``, but for tied ones and those it can't hold, in ``packing``.

    Codes and scales are laid out by the line of their weight. An axis that does not divide the scales' blocks
    replicates the scales, which are small.

    Raises:
        UserError: an axis divides a weight, but not its codes.
    """
    tied = {*plan.aliases, *plan.aliases.values()}
    entries: list[ParameterPlan] = []
    for entry in plan.parameters:
        packs = entry.name in names and entry.name not in tied and not entry.trained
        weight = _as_packed(entry, adapted) if packs else None
        if weight is None or packing.lacking(weight):
            entries.append(entry)
            continue
        codes, scales = packing.codes(weight), packing.scales(weight)
        cut = _undivided(entry, codes)
        if cut is not None:
            raise _uncut(plan, entry, packing, *cut)
        packed = Packed(packing, weight, entry)
        entries.append(replace(entry, packed=packed, **_stored(entry, codes)))
        name, pattern = entry.name + SCALE, entry.pattern + SCALE
        entries.append(replace(entry, name=name, pattern=pattern, **_stored(entry, scales)))
    return replace(plan, parameters=tuple(entries))


def _as_packed(entry: ParameterPlan, adapted: nn.Module) -> Weight:
    splits = tuple(size // local for size, local in zip(entry.shape, entry.local_shape, strict=True))
    return Weight(entry.shape, -2 if _is_transposed(adapted, entry.name) else -1, splits)


def _is_transposed(adapted: nn.Module, name: str) -> bool:
    """Does the module of the weight ``name`` hold it as ``[in, out]``, as some experts do?"""
    return bool(getattr(adapted.get_submodule(name.rpartition(".")[0]), "is_transposed", False))


def _undivided(entry: ParameterPlan, part: Part) -> tuple[int, int] | None:
    """The first dimension of the weight that its devices cut through a unit of ``part``, and the unit."""
    for dim, unit in zip(part.dims, part.units, strict=True):
        if entry.axes_of(dim) and entry.local_shape[dim] % unit:
            return dim, unit
    return None


def _stored(entry: ParameterPlan, part: Part) -> dict[str, Any]:
    """Shape, dtype and layout of a part, laid out as the weight ``entry`` where devices cut between its units."""
    layout = {}
    for axis, shard in entry.layout.items():
        place = part.dims.index(shard.dim)
        if entry.local_shape[shard.dim] % part.units[place] == 0:
            layout[axis] = Shard(place)
    return {"shape": part.shape, "dtype": part.dtype, "layout": layout}


def _uncut(plan: ShardingPlan, entry: ParameterPlan, packing: Packing, dim: int, unit: int) -> UserError:
    axes = entry.axes_of(dim)
    devices, size = math.prod(plan.mesh[axis] for axis in axes), entry.shape[dim]
    others = [n for n, length in enumerate(entry.shape) if n != dim and not entry.axes_of(n) and length % devices == 0]
    return UserError(
        asked=f"{entry.name} in {packing.title}, its dimension {dim} over {devices} devices along {' × '.join(axes)}",
        found=f"{size} numbers, {entry.local_shape[dim]} a device",
        why=f"{unit} of them are packed together, and lie on one device",
        instead=f"a mesh whose axes divide {size // unit}, "
        + "".join(f"Shard({n}) on the recipe's line {entry.pattern!r}, " for n in others[:1])
        + "or --base_dtype int8",
    )
