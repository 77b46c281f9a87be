"""Experts that all run on every token: the exact reference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwright.models.experts.projections import mlp
from shardwright.models.experts.routing import count, weights_of_all


def dense(experts: Any, x_TH: Tensor, index_Tk: Tensor, weight_Tk: Tensor) -> Tensor:
    """Sum all E experts' outputs for tokens [T, H], weighted by the router, at E/k times the routing's FLOPs."""
    count(experts, index_Tk)
    E = experts.num_experts
    y_ETH = mlp(experts, x_TH.expand(E, -1, -1))
    weight_TE = weights_of_all(index_Tk, weight_Tk, E)
    return torch.einsum("eth,te->th", y_ETH, weight_TE.to(y_ETH.dtype)).to(x_TH.dtype)
