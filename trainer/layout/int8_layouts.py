"""The plan of frozen weights in int8, each with its scales."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch

from shardwright.layout.partition import shards_of
from shardwright.layout.plan import ParameterPlan, ShardingPlan, plan_parameter
from shardwright.models.adapters.int8 import SCALE


def with_int8(plan: ShardingPlan, names: Collection[str]) -> ShardingPlan:
    """``plan`` with the weights ``names``, except tied ones, in int8, and a scale for each row of a last dimension."""
    tied = {*plan.aliases, *plan.aliases.values()}
    entries: list[ParameterPlan] = []
    for entry in plan.parameters:
        if entry.name not in names or entry.name in tied:
            entries.append(entry)
            continue
        last = len(entry.shape) - 1
        layout = {axis: shard for axis, shard in shards_of(entry.layout).items() if shard.dim != last}
        shape = (*entry.shape[:-1], 1)
        scale = plan_parameter(entry.name + SCALE, entry.pattern + SCALE, shape, torch.float32, dict(layout), plan.mesh)
        size = entry.bytes_per_device // entry.dtype.itemsize
        entries += [replace(entry, dtype=torch.int8, bytes_per_device=size), replace(scale, trained=False)]
    return replace(plan, parameters=tuple(entries))
