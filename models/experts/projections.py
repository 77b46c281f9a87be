"""The two projections of an experts module, for each way that families store them, and their plain use."""

from typing import Any

import torch
from torch import Tensor

from shardwright.models.adapters.lora import SCALE, A, B
from shardwright.models.experts.routing import count, weights_of_all
from shardwright.models.ops import partial_gradients
from shardwright.models.ops.fusion_barrier import apart
from shardwright.models.ops.operation import LinearMap


def mlp(experts: Any, x_ENH: Tensor, scale_EN1: Tensor | None = None) -> Tensor:
    """Return each expert's output for its N rows, [E, N, H]; ``scale_EN1`` is a factor for each row of the result."""
    # transformers' ``use_experts_implementation`` sets the attributes that are read here on every experts module

    def project(x: Tensor, name: str) -> Tensor:
        weight = getattr(experts, name)
        y = partial_gradients.expert_linear(x, weight, bool(experts.is_transposed))
        if hasattr(experts, name + A):
            low = partial_gradients.expert_linear(x, getattr(experts, name + A), False)
            (scale,) = getattr(experts, name + SCALE)
            y = y + partial_gradients.expert_linear(low, getattr(experts, name + B), False) * scale
        return partial_gradients.expert_bias(y, getattr(experts, f"{name}_bias")) if experts.has_bias else y

    if experts.has_gate:
        # semi-private: transformers/integrations/moe.py, transformers 5.23
        hidden = experts._apply_gate(project(x_ENH, "gate_up_proj"))
    else:
        hidden = experts.act_fn(project(x_ENH, "up_proj"))
    linear = not (experts.has_bias or experts.has_post_expert_norm)
    if scale_EN1 is not None and linear:
        hidden = (hidden * scale_EN1).to(hidden.dtype)
    # a TPU takes nearly twice as long for a matrix product that is fused with the activation's gradient
    y = project(LinearMap.apply(lambda x: x.view_as(x), apart, hidden), "down_proj")
    y = experts.post_expert_norm(y) if experts.has_post_expert_norm else y
    return y if scale_EN1 is None or linear else (y * scale_EN1).to(y.dtype)


def dense(experts: Any, x_TH: Tensor, index_Tk: Tensor, weight_Tk: Tensor) -> Tensor:
    """The exact reference: the sum of all E experts' outputs for tokens [T, H], at E/k times the routing's FLOPs."""
    count(experts, index_Tk)
    E = experts.num_experts
    y_ETH = mlp(experts, x_TH.expand(E, -1, -1))
    weight_TE = weights_of_all(index_Tk, weight_Tk, E)
    return torch.einsum("eth,te->th", y_ETH, weight_TE.to(y_ETH.dtype)).to(x_TH.dtype)
