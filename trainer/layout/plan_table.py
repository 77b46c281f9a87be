"""A plan as the rows of a table."""

from __future__ import annotations

from shardwright.layout.optimizer_state import TITLES
from shardwright.layout.plan import ParameterPlan, ShardingPlan
from shardwright.layout.recipe import layout_text
from shardwright.report.units import size

PLAN_HEADER = ("pattern", "match", "shape", "placements", "on a device", "bytes")


def plan_rows(plan: ShardingPlan) -> list[list[str]]:
    """A row under :data:`PLAN_HEADER` for each pattern and shape, with the bytes of all its parameters together."""
    groups: dict[tuple[str, tuple[int, ...]], list[ParameterPlan]] = {}
    for parameter in plan.parameters:
        groups.setdefault((parameter.pattern, parameter.shape), []).append(parameter)
    return [
        [
            pattern,
            str(len(parameters)),
            "×".join(map(str, shape)) or "scalar",
            "\n".join(f"{axis}: {text}" for axis, text in layout_text(parameters[0].layout).items()) or "replicated",
            "×".join(map(str, parameters[0].local_shape)) or "scalar",
            size(sum(parameter.bytes_per_device for parameter in parameters), decimals=2),
        ]
        for (pattern, shape), parameters in groups.items()
    ]


def held_by_a_device(plan: ShardingPlan) -> list[tuple[str, int]]:
    """(what, bytes) that a device holds of weights, gradients and the optimizer's state."""
    totals, state = plan.totals, f"{TITLES[plan.optim]} state"
    names = {"parameters": "parameters_bytes", "gradients": "gradients_bytes", state: "optimizer_bytes"}
    return [(what, totals[name]) for what, name in names.items()]
