"""Lion."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardwright.step.optimizers.rule import State, decayed


@dataclass(frozen=True)
class Lion:
    """Lion (arXiv:2302.06675, program 1): each number moves by the learning rate, the way that the momentum points."""

    beta1: float
    beta2: float

    def __call__(
        self,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        state: State,
        learning_rate: torch.Tensor,
        step: torch.Tensor,
        weight_decay: float,
    ) -> tuple[torch.Tensor, State]:
        (momentum,) = state
        direction = torch.sign(self.beta1 * momentum + (1 - self.beta1) * gradient)
        momentum = self.beta2 * momentum + (1 - self.beta2) * gradient
        return decayed(parameter, learning_rate, weight_decay) - learning_rate * direction, (momentum,)
