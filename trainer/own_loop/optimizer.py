"""LoopOptimizer: the optimizer of a loop of one's own, whose updates are a part of the step's graph."""

from collections.abc import Callable
from typing import Any

import torch

from shardwright.errors import UserError
from shardwright.own_loop.placed_loop import PlacedLoop
from shardwright.step.own_step import OwnStep


class LoopOptimizer(torch.optim.Optimizer):
    """Stands for torch's AdamW ``own``, whose groups and rate it shares; its state lies on the mesh.

    ``active`` is asked whether this is a step, or a micro-batch before the last.
    """

    def __init__(self, own: torch.optim.Optimizer, loop: PlacedLoop, active: Callable[[], bool]) -> None:
        # not torch's constructor, which would take the parameters
        self.own, self._loop, self._active = own, loop, active
        self.defaults, self.state = own.defaults, own.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.own.param_groups

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters by the gradients so far, at the groups' rate, and drop the gradients."""
        if closure is not None:
            raise UserError(
                asked="optimizer.step(closure)",
                found="a function that computes the loss again",
                why="AdamW computes it once, before",
                instead="accelerator.backward(loss); optimizer.step()",
            )
        if not self._active():
            return
        rates = {float(group["lr"]) for group in self.param_groups}
        step = with_gradients("optimizer.step()", self._loop.step)
        if len(rates) > 1:
            raise UserError(
                asked="optimizer.step()",
                found=f"groups with the rates {', '.join(map(str, sorted(rates)))}",
                why="a step has one rate for all parameters",
                instead="one lr for all groups",
            )
        step.update(rates.pop())
        # semi-private: torch/optim/lr_scheduler.py, torch 2.9: a schedule asks it whether a step came before its own
        self.own._opt_called = self._opt_called = True  # type: ignore[attr-defined]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients so far."""
        if self._active() and self._loop.step is not None:
            self._loop.step.gradients = {}

    def state_dict(self) -> Any:  # type: ignore[override]
        raise UserError(
            asked="optimizer.state_dict()",
            found="a state that lies on the mesh, in stacks of layers",
            why="it has no place in a file of torch's",
            instead="shardwright.Trainer, whose runs are saved and go on; the weights: unwrap_model(model)",
        )

    def __repr__(self) -> str:
        return f"LoopOptimizer({self.own!r})"


def with_gradients(asked: str, step: OwnStep | None) -> OwnStep:
    """``step``, which has gradients; UserError if it has none."""
    if step is None or not step.gradients:
        raise UserError(
            asked=asked,
            found="no gradients",
            why="none were computed since the last step, or since they were cleared",
            instead="accelerator.backward(loss), in place of loss.backward(), before it",
        )
    return step


class LoopSchedule:
    """A schedule of rates, which stands still on micro-batches before a step's last."""

    def __init__(self, own: Any, active: Callable[[], bool]) -> None:
        self.own, self._active = own, active

    def step(self, *how: Any, **more: Any) -> None:
        if self._active():
            self.own.step(*how, **more)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.own, name)
