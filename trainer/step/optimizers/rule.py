"""An update rule: from a parameter, its gradient and its state to the next parameter and the next state.

A rule is a pure function of float32 tensors. It is called with the parameter, its gradient, its state as
`shardwright.layout.optimizer_state` lists it, the learning rate and the number of this update (from 1), both 0-d
tensors since a Python number would recompile the step, and the weight decay. torch's own optimizers are not used: on
XLA their state appears at the first step, replicated, and their step count and learning rate are Python numbers.
"""

from __future__ import annotations

from typing import Protocol

import torch

State = tuple[torch.Tensor, ...]


class UpdateRule(Protocol):
    """See the module."""

    def __call__(
        self,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        state: State,
        learning_rate: torch.Tensor,
        step: torch.Tensor,
        weight_decay: float,
    ) -> tuple[torch.Tensor, State]: ...


def decayed(parameter: torch.Tensor, learning_rate: torch.Tensor, weight_decay: float) -> torch.Tensor:
    """``parameter`` after decoupled weight decay (arXiv:1711.05101)."""
    return parameter * (1 - learning_rate * weight_decay) if weight_decay else parameter
