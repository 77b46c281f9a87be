"""What a step gathers on the device, as one tensor: where each number stands in it, and what they mean once read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from shardwright.files.arrays import Array
from shardwright.report.expert_load import ExpertLoad
from shardwright.step.router_load import Routing
from shardwright.step.spikes import Spike, SpikeWatch

# behind them stand what a preference objective logs, the shares of `Routing.shares`, the run's steps without a scored
# token, never reset, and last the state of a `SpikeWatch`, if there is one
METRICS = ("loss", "grad_norm", "dropped_fraction", "steps", "bad_step", "router_z_loss", "router_balance_loss")


@dataclass(frozen=True)
class StepMetrics:
    """What the device has gathered since the last reading.

    Args:
        loss: mean over the steps since then; nats a token, auxiliary loss included.
        grad_norm: of the last step, before clipping.
        dropped_fraction: share of the (token, choice) pairs that no expert had room for, mean over layers and steps;
            None where no layer has a capacity.
        steps: optimizer steps since the last reading.
        bad_step: the first step that ended the run, since its loss or gradient norm was not finite or was a spike; 0
            if none did.
        router_losses: ``router_z_loss`` and ``router_balance_loss``, means over the steps, without their coefficients;
            empty if none is added.
        expert_load: of each layer with experts, all these steps together.
        unscored_steps: steps of the whole run whose batch had no scored token; they are in none of the others.
        preferences: what a preference objective logs, under trl's names, means over the steps; else empty.
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
    preferences: Mapping[str, float] = field(default_factory=dict)
    spike: Spike | None = None


@dataclass(frozen=True)
class MetricsLayout:
    """Where each number stands.

    Args:
        names: of the first ones: :data:`METRICS`, and what an objective logs.
    """

    names: tuple[str, ...]
    routing: Routing
    spikes: SpikeWatch | None

    @property
    def unscored(self) -> int:
        """Where the steps without a scored token are counted."""
        return len(self.names) + self.routing.size

    def start(self, restored: Callable[[str], Array] | None) -> torch.Tensor:
        """The metrics to begin with; what was not saved, since an older version or other options had fewer, is 0."""
        size = self.unscored + 1
        metrics = torch.zeros(size + (0 if self.spikes is None else self.spikes.size))
        if restored:
            saved = restored("metrics")
            # of another window nothing can be used
            known = len(metrics) if saved.shape[0] == len(metrics) else min(saved.shape[0], size)
            metrics[:known] = saved[(slice(0, known),)]
        return metrics

    def read(self, values: Sequence[float], has_router_losses: bool) -> StepMetrics:
        """What the numbers say."""
        loss, grad_norm, dropped, steps, bad_step, *router_losses = values[: len(METRICS)]
        preferences = dict(zip(self.names[len(METRICS) :], values[len(METRICS) :], strict=False))
        count = max(int(steps), 1)
        names = METRICS[-len(router_losses) :] if has_router_losses else ()
        return StepMetrics(
            loss=loss / count,
            grad_norm=grad_norm,
            dropped_fraction=None if dropped < 0 else dropped / count,
            steps=int(steps),
            bad_step=int(bad_step),
            router_losses={name: value / count for name, value in zip(names, router_losses, strict=False)},
            expert_load=self.routing.loads(values[len(self.names) : self.unscored], capacity=dropped >= 0),
            unscored_steps=int(values[self.unscored]),
            preferences={name: value / count for name, value in preferences.items()},
            spike=None if self.spikes is None else self.spikes.read(values[self.unscored + 1 :]),
        )
