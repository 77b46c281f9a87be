"""A tensor that the compiler makes by itself, in the order in which it is written down."""

from __future__ import annotations

import torch
import torch_xla.core.xla_model as xm


@torch.library.custom_op("shardwright::apart", mutates_args=())
def apart(x: torch.Tensor) -> torch.Tensor:
    """A copy of ``x`` that the compiler fuses with nothing that reads it.

    A reader in another order turns it. Without this XLA has the product make that order itself, by swapping its
    operands.
    """
    copy = [torch.ops.aten.view_copy(x, x.shape)]
    if x.device.type == "xla":
        xm.optimization_barrier_(copy)
    return copy[0]


@apart.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)
