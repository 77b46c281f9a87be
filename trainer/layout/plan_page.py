"""A plan as one HTML page: the mesh as a grid, each kind of tensor cut on it, and a token's way to its experts."""

import json
from collections.abc import Sequence
from typing import Any

from shardwright.layout.plan import ParameterPlan, ShardingPlan
from shardwright.layout.plan_table import PLAN_HEADER, held_by_a_device, plan_rows, shape_text
from shardwright.report.html import render
from shardwright.report.units import mesh_text, size


def plan_page(
    plan: ShardingPlan,
    title: str,
    experts: Sequence[str] = (),
    routing: tuple[int, int] | None = None,
    warnings: Sequence[str] = (),
) -> str:
    """The page of ``plan``.

    Args:
        experts: names of the model's modules that hold experts.
        routing: (experts that a token goes to, all experts); None: there are none, or nothing says it.
    """
    data = {
        "axes": list(plan.mesh.items()),
        "batch": plan.batch,
        "tensors": [_tensor(plan, group) for group in plan.kinds],
        "way": _way(plan, experts, routing),
    }
    held = held_by_a_device(plan)
    parts = [(f"{group[0].pattern}, {shape_text(group[0].shape)}", _bytes(plan, group)) for group in plan.kinds]
    return render(
        "plan.html.j2",
        title=title,
        data=json.dumps(data, separators=(",", ":")),
        tensors=data["tensors"],
        way=data["way"],
        mesh=mesh_text(plan.mesh),
        devices=plan.devices,
        batch=mesh_text(plan.mesh, plan.batch),
        rows=plan.batch_shards,
        whole=size(sum(count for _, count in held), decimals=2),
        held=[(what, count, size(count, decimals=2)) for what, count in held],
        kinds=[(what, count, size(count, decimals=2)) for what, count in sorted(parts, key=lambda part: -part[1])],
        table_header=PLAN_HEADER,
        table_rows=plan_rows(plan),
        warnings=warnings,
    )


def _bytes(plan: ShardingPlan, group: Sequence[ParameterPlan]) -> int:
    """A device's share of parameters, their gradients and their optimizer state."""
    return sum(plan.held(group).values())


def _tensor(plan: ShardingPlan, group: Sequence[ParameterPlan]) -> dict[str, Any]:
    """One kind of tensor: its dimensions, each with the axes that cut it."""
    first = group[0]
    return {
        "name": first.pattern,
        "count": len(group),
        "shape": shape_text(first.shape),
        "local": shape_text(first.local_shape),
        "dims": [(length, first.axes_of(dim)) for dim, length in enumerate(first.shape)],
        "bytes": size(_bytes(plan, group), decimals=2),
        "trained": first.trained,
    }


def _way(plan: ShardingPlan, experts: Sequence[str], routing: tuple[int, int] | None) -> dict[str, Any] | None:
    """A token's way to its experts: their number, those that it goes to, and the axes that their dimension is on."""
    if routing is None:
        return None
    chosen, count = routing
    inside = tuple(f"{name}." for name in experts)
    held = [each for each in plan.parameters if each.name.startswith(inside) and each.shape[:1] == (count,)]
    if not held:
        return None
    axes = held[0].axes_of(0)
    others = [axis for axis in held[0].layout if axis not in axes]
    return {"experts": count, "chosen": chosen, "axes": axes, "cut": others, "spread": set(axes) <= set(plan.batch)}
