"""StepMetrics, and the layout of the one tensor on the device that gathers them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardwright.files.arrays import Array
from shardwright.report.expert_load import ExpertLoad
from shardwright.step.router_load import Routing
from shardwright.step.spikes import Spike, SpikeWatch

# sums over the steps since the last reading, but for grad_norm and bad_step; the objective's logged values follow
METRICS = ("loss", "grad_norm", "dropped_fraction", "steps", "bad_step", "router_z_loss", "router_balance_loss")
_ROUTER_LOSSES = METRICS[-2:]


@dataclass(frozen=True)
class StepMetrics:
    """Metrics gathered on the device since the last reading: means over the ``steps`` since then.

    Args:
        loss: nats a token, auxiliary loss included.
        grad_norm: of the last step, before clipping.
        dropped_fraction: share of the (token, choice) pairs that no expert had room for, over all layers; None where
            no layer has a capacity.
        bad_step: the first step that ended the run, since its loss or gradient norm was not finite or was a spike; 0 if
            none did.
        router_losses: ``router_z_loss`` and ``router_balance_loss``, without their coefficients, if they are added.
        expert_load: of each layer with experts, all these steps together.
        unscored_steps: steps of the whole run whose batch had no scored token; they are in none of the others.
        logged: the objective's logged values, and ``mtp_loss``, without its weight, if MTP layers are trained.
        spike: the last one; None: nobody looks for any.
    """

    loss: float
    grad_norm: float
    dropped_fraction: float | None
    steps: int
    bad_step: int
    router_losses: dict[str, float]
    expert_load: tuple[ExpertLoad, ...]
    unscored_steps: int = 0
    logged: Mapping[str, float] = field(default_factory=dict)
    spike: Spike | None = None


class MetricsLayout:
    """The place of each number: ``slots`` has it by name.

    First stand ``names``, a number each: :data:`METRICS`, and ``logged``, the objective's; then ``expert_shares``
    (`Routing.shares`), ``unscored_steps`` and ``spikes`` (the state of a `SpikeWatch`; empty without one). ``gathered``
    is all up to the shares, which begins anew with a reading.
    """

    def __init__(self, logged: tuple[str, ...], routing: Routing, spikes: SpikeWatch | None) -> None:
        self.routing, self.spikes, self.logged, self.names = routing, spikes, logged, METRICS + logged
        behind = {"expert_shares": routing.size, "unscored_steps": 1, "spikes": spikes.size if spikes else 0}
        self.slots, self.size = dict[str, slice](), 0
        for name, size in (dict.fromkeys(self.names, 1) | behind).items():
            self.slots[name] = slice(self.size, self.size + size)
            self.size += size
        self.slots["gathered"] = slice(0, self.slots["expert_shares"].stop)

    def number(self, metrics: Tensor, name: str) -> Tensor:
        return metrics[self.slots[name].start]

    def with_replaced(self, gathered: Tensor, replaced: Mapping[str, Tensor]) -> Tensor:
        """All metrics: those of ``gathered`` but for the ``replaced``, which come in the order of the slots."""
        pieces, end = [], 0
        for name, values in replaced.items():
            slot = self.slots[name]
            if end < min(slot.start, len(gathered)):
                pieces.append(gathered[end : slot.start])
            pieces.append(values.view(slot.stop - slot.start))
            end = slot.stop
        return torch.cat(pieces)

    def start(self, restored: Callable[[str], Array] | None, logged: tuple[str, ...]) -> Tensor:
        """The metrics to begin with; 0 where an older version or other options saved none.

        ``logged`` are the saved run's: each that one of the two lacks moves what lies behind it.
        """
        metrics = torch.zeros(self.size)
        if restored:
            saved, then = restored("metrics"), MetricsLayout(logged, self.routing, None).slots
            then["spikes"] = slice(then["spikes"].start, saved.shape[0])
            for name, slot in self.slots.items():
                size, old = slot.stop - slot.start, then.get(name, slice(0, 0))
                # the spikes' state of another window is of no use
                if name != "gathered" and old.stop <= saved.shape[0] and old.stop - old.start == size:
                    metrics[slot] = saved[(old,)]
        return metrics

    def read(self, values: Sequence[float], has_router_losses: bool) -> StepMetrics:
        found = {name: values[self.slots[name].start] for name in (*self.names, "unscored_steps")}
        count, dropped = max(int(found["steps"]), 1), found["dropped_fraction"]
        return StepMetrics(
            loss=found["loss"] / count,
            grad_norm=found["grad_norm"],
            dropped_fraction=None if dropped < 0 else dropped / count,
            steps=int(found["steps"]),
            bad_step=int(found["bad_step"]),
            router_losses={name: found[name] / count for name in (_ROUTER_LOSSES if has_router_losses else ())},
            expert_load=self.routing.loads(values[self.slots["expert_shares"]], capacity=dropped >= 0),
            unscored_steps=int(found["unscored_steps"]),
            logged={name: found[name] / count for name in self.logged},
            spike=None if self.spikes is None else self.spikes.read(values[self.slots["spikes"]]),
        )
