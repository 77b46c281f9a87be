"""An experts module's own projections, in whichever storage the family uses."""

from __future__ import annotations

from typing import Any

import torch
import torch_xla.core.xla_model as xm

from models import partial_gradients


def mlp(experts: Any, x_ENH: torch.Tensor, scale_EN1: torch.Tensor | None = None) -> torch.Tensor:
    """The experts' own two projections on ``x`` [E, N, H] -> [E, N, H], in whichever storage the family uses.

    Attributes read are those that transformers' ``use_experts_implementation`` sets on every experts module.

    Args:
        scale_EN1: what each row of the result is multiplied by.
    """

    def project(x: torch.Tensor, name: str) -> torch.Tensor:
        weight = getattr(experts, name)
        y = partial_gradients.expert_linear(x, weight, bool(experts.is_transposed))
        return partial_gradients.expert_bias(y, getattr(experts, f"{name}_bias")) if experts.has_bias else y

    if experts.has_gate:
        hidden = experts._apply_gate(project(x_ENH, "gate_up_proj"))
    else:
        hidden = experts.act_fn(project(x_ENH, "up_proj"))
    linear = not (experts.has_bias or experts.has_post_expert_norm)
    if scale_EN1 is not None and linear:
        hidden = (hidden * scale_EN1).to(hidden.dtype)
    y = project(_GradientApart.apply(hidden), "down_proj")
    y = experts.post_expert_norm(y) if experts.has_post_expert_norm else y
    return y if scale_EN1 is None or linear else (y * scale_EN1).to(y.dtype)


@torch.library.custom_op("shardwright::apart", mutates_args=())
def _apart(x: torch.Tensor) -> torch.Tensor:
    copy = [torch.ops.aten.view_copy(x, x.shape)]
    if x.device.type == "xla":
        xm.optimization_barrier_(copy)
    return copy[0]


@_apart.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class _GradientApart(torch.autograd.Function):
    """The identity, whose gradient is computed before anything is made of it.

    A TPU runs a matrix product fused with the activation's gradient in nearly twice the product's own time.
    """

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):  # type: ignore[override]
        return _apart(grad)
