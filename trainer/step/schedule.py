"""The learning rate of each step, by transformers' schedulers, on the host."""

from __future__ import annotations

import torch
from torch import nn
from transformers import get_scheduler


class Schedule:
    """A learning rate for each step, by one of transformers' schedulers; the rate goes to the device as data.

    Args:
        kind: a name of transformers' ``SchedulerType`` (``linear``, ``cosine``, ``constant``, …).
    """

    def __init__(self, kind: str, learning_rate: float, warmup_steps: int, total_steps: int) -> None:
        # transformers' schedulers want an optimizer to write the rate into; this one optimises nothing
        self._carrier = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=learning_rate)
        self._scheduler = get_scheduler(
            kind, self._carrier, num_warmup_steps=warmup_steps, num_training_steps=total_steps
        )
        self._carrier.step()  # else the scheduler would warn that it steps before its optimizer

    @property
    def learning_rate(self) -> float:
        """The rate of the step that comes next."""
        return self._scheduler.get_last_lr()[0]

    def advance(self) -> None:
        self._scheduler.step()

    def skip(self, steps: int) -> None:
        """Go where ``steps`` calls of :meth:`advance` would lead from the start, as a resumed run must."""
        # a LambdaLR is a function of the step alone: one call goes to any step
        if steps and isinstance(self._scheduler, torch.optim.lr_scheduler.LambdaLR):
            self._scheduler.last_epoch, steps = steps - 1, 1
        for _ in range(steps):
            self.advance()
