"""Placed parameters back on the CPU, under the model's own names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from trainer.layout.plan import ShardingPlan
from trainer.xla import sharding


def unstacked(plan: ShardingPlan, parameters: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (the model's own name, values on the CPU), fetching one placed parameter at a time."""
    for name, parameter in parameters.items():
        members = plan.members(name)
        values = sharding.fetch(parameter.detach())
        yield from zip(members, values.unbind() if members != [name] else [values], strict=True)
