"""The plan of a model under adapters: LoRA factors, each laid out by the line of its weight, and weights in int8."""

import math
from collections.abc import Collection
from dataclasses import replace

import torch
from torch import nn

from shardwright.layout.partition import shards_of
from shardwright.layout.placement import Shard
from shardwright.layout.plan import ParameterPlan, ShardingPlan
from shardwright.models.adapters.int8 import SCALE
from shardwright.models.adapters.lora import A0, A, base_of


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
        transposed = bool(getattr(adapted.get_submodule(base.rpartition(".")[0]), "is_transposed", False))
        suffix, shape = name.removeprefix(base), tuple(parameter.shape)
        # the weight's dimension that the factor has too, and that dimension in the factor, whose other is the rank
        columns = len(plan[base].shape) - 1
        shared, long = (columns - transposed, columns) if suffix in (A, A0) else (columns - 1 + transposed, columns - 1)
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


def with_int8(plan: ShardingPlan, names: Collection[str]) -> ShardingPlan:
    """``plan`` with the frozen ``names``, except tied ones, in int8, and a scale for each row of a last dimension."""
    tied = {*plan.aliases, *plan.aliases.values()}
    entries: list[ParameterPlan] = []
    for entry in plan.parameters:
        if entry.name not in names or entry.name in tied or entry.trained:
            entries.append(entry)
            continue
        name, pattern, shape = entry.name + SCALE, entry.pattern + SCALE, (*entry.shape[:-1], 1)
        layout = {axis: shard for axis, shard in entry.layout.items() if shard.dim != len(shape) - 1}
        scale = replace(entry, name=name, pattern=pattern, shape=shape, dtype=torch.float32, layout=layout)
        entries += [replace(entry, dtype=torch.int8), scale]
    return replace(plan, parameters=tuple(entries))
