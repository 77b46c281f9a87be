"""Warnings of a plan: what it allows, and nobody is likely to have meant."""

from collections.abc import Iterator

from shardwright.layout.partition import shards_of
from shardwright.layout.plan import ShardingPlan
from shardwright.report.units import size

_SHARE, _LEAST = 0.01, 16 << 20  # of what a device holds; bytes that no device misses


def plan_warnings(plan: ShardingPlan) -> Iterator[str]:
    """A text for each axis that splits nothing, and each line whose replicated tensors take much of a device."""
    layouts = [entry.layout for entry in plan.parameters]
    layouts += [shards_of(layout, plan.mesh) for layout in plan.activations.values()]
    used = {*plan.token_axes}.union(*layouts)
    for axis, count in plan.mesh.items():
        if count > 1 and axis not in used:
            yield f"axis {axis} splits nothing: {count} devices along it hold and do the same"
    held = sum(plan.totals.values())
    for pattern in dict.fromkeys(entry.pattern for entry in plan.parameters if not entry.layout):
        whole = [entry for entry in plan.parameters if entry.pattern == pattern and not entry.layout]
        took = sum(plan.held(whole).values())
        if plan.devices > 1 and took > max(_SHARE * held, _LEAST):
            each = f"{size(took, decimals=2)} of {size(held, decimals=2)}"
            yield f"{pattern} is replicated: with gradients and state {each} on every device"
