"""The learning rate of each step, by transformers' schedulers, on the host."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from transformers import get_scheduler


class Schedule:
    """A learning rate for each step, by transformers' schedulers; the rate travels to the device as data.

    Args:
        kind: a name of transformers' ``SchedulerType`` (``linear``, ``cosine``, ``constant``, …).
    """

    def __init__(
        self, kind: str, learning_rate: float, warmup_steps: int, total_steps: int, options: Mapping | None = None
    ) -> None:
        # transformers' schedulers want an optimizer to write into; this one has nothing to optimise
        self._carrier = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=learning_rate)
        self._scheduler = get_scheduler(
            kind,
            self._carrier,
            num_warmup_steps=warmup_steps,
            num_training_steps=total_steps,
            scheduler_specific_kwargs=dict(options or {}),
        )
        self._carrier.step()  # a scheduler that steps before its optimizer warns; it counts steps from its own making

    @property
    def learning_rate(self) -> float:
        """The rate of the step that comes next."""
        return self._scheduler.get_last_lr()[0]

    def advance(self) -> None:
        self._scheduler.step()

    def skip(self, steps: int) -> None:
        """Go to where ``steps`` advances lead, from the start: what a resumed run needs."""
        if steps and isinstance(self._scheduler, torch.optim.lr_scheduler.LambdaLR):  # a function of the step alone
            self._scheduler.last_epoch, steps = steps - 1, 1
        for _ in range(steps):
            self.advance()
