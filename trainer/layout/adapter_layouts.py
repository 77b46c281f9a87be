"""Layouts of LoRA factors, each from the line of its weight."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from shardwright.layout.placement import Placement, Shard
from shardwright.layout.plan import ParameterPlan, ShardingPlan, plan_parameter
from shardwright.models.adapters.lora import A, base_of


def with_factors(plan: ShardingPlan, adapted: nn.Module, dtype: torch.dtype) -> ShardingPlan:
    """The plan of a model with factors, which are trained while everything else is frozen, from the ``plan`` without.

    Args:
        adapted: the model with factors, on meta.
        dtype: of the factors.
    """
    entries: list[ParameterPlan] = []
    for name, parameter in adapted.named_parameters():
        base = base_of(name)
        if base is None:
            entries.append(replace(plan[name], trained=False))
            continue
        transposed = bool(getattr(adapted.get_submodule(base.rpartition(".")[0]), "is_transposed", False))
        entry, shape = plan[base], tuple(parameter.shape)
        rank = len(shape)
        shared, long = (rank - 1 - transposed, rank - 1) if name.endswith(A) else (rank - 2 + transposed, rank - 2)
        layout = _factor_layout(entry, shared, shape, plan, long=long)
        pattern = entry.pattern + name.removeprefix(base)
        entries.append(plan_parameter(name, pattern, shape, dtype, layout, plan.mesh))
    return replace(plan, parameters=tuple(entries))


def _factor_layout(
    entry: ParameterPlan, shared: int, shape: Sequence[int], plan: ShardingPlan, *, long: int
) -> dict[str, Placement]:
    """The layout of a factor of the weight ``entry``.

    An axis that splits the weight's experts or the dimension shared with the factor splits the factor likewise. A batch
    axis that splits the weight's other dimension splits the factor's long one, since it only stores: the factor is
    gathered before use, as the weight is. Other axes replicate the factor.

    Args:
        shared: the weight's dimension that the factor has too.
        long: that dimension in the factor; the other is the rank.
    """
    found: dict[str, Placement] = {}
    for axis in plan.mesh:
        if len(shape) == 3 and axis in entry.axes_of(0):
            found[axis] = Shard(0)
        elif axis in entry.axes_of(shared):
            found[axis] = Shard(long)
    for axis in entry.layout:
        splits = math.prod(plan.mesh[a] for a in found if found[a] == Shard(long))
        if axis not in found and axis in plan.batch and shape[long] % (splits * plan.mesh[axis]) == 0:
            found[axis] = Shard(long)
    return {axis: found[axis] for axis in plan.mesh if axis in found}
