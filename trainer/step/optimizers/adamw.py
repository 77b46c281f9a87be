"""AdamW."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardwright.step.optimizers.rule import State, decayed


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay (arXiv:1711.05101), equal to `torch.optim.AdamW` step by step."""

    beta1: float
    beta2: float
    epsilon: float

    def __call__(
        self,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        state: State,
        learning_rate: torch.Tensor,
        step: torch.Tensor,
        weight_decay: float,
    ) -> tuple[torch.Tensor, State]:
        first, second = state
        first = self.beta1 * first + (1 - self.beta1) * gradient
        second = self.beta2 * second + (1 - self.beta2) * gradient * gradient
        parameter = decayed(parameter, learning_rate, weight_decay)
        # exp(step * log(beta)) for beta**step: on some backends `pow` of a base near 1 is less exact in fp32
        unbias1 = 1 - torch.exp(step * torch.log(torch.full_like(step, self.beta1)))
        unbias2 = 1 - torch.exp(step * torch.log(torch.full_like(step, self.beta2)))
        denominator = torch.sqrt(second) / torch.sqrt(unbias2) + self.epsilon
        return parameter - (learning_rate / unbias1) * (first / denominator), (first, second)
