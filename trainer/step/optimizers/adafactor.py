"""Adafactor."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardwright.step.optimizers.rule import State, decayed

_SQUARE_EPSILON, _SCALE_EPSILON = 1e-30, 1e-3  # of squared gradients, and the least scale of a parameter


@dataclass(frozen=True)
class Adafactor:
    """Adafactor (arXiv:1804.04235) at a learning rate that is given, without a first moment.

    It equals `transformers.optimization.Adafactor(relative_step=False, warmup_init=False)` step by step. The second
    moment of a matrix is the outer product of its rows' and its columns' means, which are all that is kept; that of
    experts is factored for each of them.

    Args:
        clip_threshold: the most that the root mean square of an update may be, of a parameter as the model has it.
        decay_rate: the second moment's decay at update n is 1 - n**decay_rate.
        scale_parameter: whether the learning rate is multiplied by the root mean square of the parameter.
        stacked: whether dimension 0 is layers, each a parameter of its own.
    """

    clip_threshold: float
    decay_rate: float
    scale_parameter: bool
    stacked: bool

    def __call__(
        self,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        state: State,
        learning_rate: torch.Tensor,
        step: torch.Tensor,
        weight_decay: float,
    ) -> tuple[torch.Tensor, State]:
        new_share = torch.exp(self.decay_rate * torch.log(step))  # exp of a log: as in AdamW
        squares = gradient * gradient + _SQUARE_EPSILON
        factored = len(state) == 2
        news = (squares.mean(-1), squares.mean(-2)) if factored else (squares,)
        state = tuple((1 - new_share) * old + new_share * new for old, new in zip(state, news, strict=True))
        if factored:
            rows, columns = state
            row_factor = torch.rsqrt(rows / rows.mean(-1, keepdim=True)).unsqueeze(-1)
            update = row_factor * torch.rsqrt(columns).unsqueeze(-2) * gradient
        else:
            update = torch.rsqrt(state[0]) * gradient
        update = update / (self._root_mean_square(update) / self.clip_threshold).clamp(min=1.0)
        if self.scale_parameter:
            learning_rate = learning_rate * self._root_mean_square(parameter).clamp(min=_SCALE_EPSILON)
        return decayed(parameter, learning_rate, weight_decay) - learning_rate * update, state

    def _root_mean_square(self, tensor: torch.Tensor) -> torch.Tensor:
        """Of each parameter by itself, to be multiplied with ``tensor``."""
        dims = list(range(int(self.stacked), tensor.dim()))
        squares = tensor * tensor
        return torch.sqrt(squares.mean(dims, keepdim=True) if dims else squares)
