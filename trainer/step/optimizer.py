"""AdamW on sharded state, as a pure function of one tensor; which parameters decay; clipping by the global norm."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from transformers.trainer_pt_utils import get_parameter_names

# The names that transformers' own Trainer keeps weight decay away from (`Trainer.get_decay_parameter_names`, 5.23).
NO_DECAY = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay (arXiv:1711.05101), equal to `torch.optim.AdamW` step by step.

    torch's own class is not used. On XLA its state appears at the first step, replicated; its step count and learning
    rate are Python numbers, which recompile the graph; and ``capturable=True`` fails.

    Args:
        decay: names of the parameters that weight decay applies to.
    """

    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    decay: frozenset[str]

    def update(
        self,
        name: str,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        moments: tuple[torch.Tensor, torch.Tensor],
        learning_rate: torch.Tensor,
        step: torch.Tensor,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """The new parameter and its new moments after step number ``step`` (from 1), in float32.

        It computes in float32 whatever ``parameter`` and ``moments`` are stored in.
        """
        parameter, first, second = (t.to(torch.float32) for t in (parameter, *moments))
        first = self.beta1 * first + (1 - self.beta1) * gradient
        second = self.beta2 * second + (1 - self.beta2) * gradient * gradient
        if name in self.decay:
            parameter = parameter * (1 - learning_rate * self.weight_decay)
        # exp(step * log(beta)) for beta**step: on some backends `pow` of a base near 1 is less exact in fp32
        unbias1 = 1 - torch.exp(step * torch.log(torch.full_like(step, self.beta1)))
        unbias2 = 1 - torch.exp(step * torch.log(torch.full_like(step, self.beta2)))
        denominator = torch.sqrt(second) / torch.sqrt(unbias2) + self.epsilon
        return parameter - (learning_rate / unbias1) * (first / denominator), (first, second)


def decay_names(model: nn.Module) -> frozenset[str]:
    """Names of the parameters that weight decay applies to: by transformers' own rule, all but biases and norms."""
    names = get_parameter_names(model, [nn.LayerNorm], NO_DECAY)
    return frozenset(names) & frozenset(name for name, _ in model.named_parameters())


def global_norm(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """The 2-norm of all gradients as if they were one vector, in fp32; a 0-d tensor."""
    return torch.sqrt(torch.stack([gradient.float().pow(2).sum() for gradient in gradients]).sum())


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """The factor that brings gradients of norm ``norm`` to at most ``max_norm``, as `clip_grad_norm_` computes it."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)
