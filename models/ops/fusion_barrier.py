"""A fusion barrier: a tensor that the compiler computes on its own, in the dimension order that the code gives."""

import torch
import torch_xla.core.xla_model as xm
from torch import Tensor

from shardwright.models.ops.operation import operation


@operation("apart", torch.empty_like)
def apart(x: Tensor) -> Tensor:
    """Return a copy of ``x`` that the compiler fuses with none of its readers."""
    # A reader that wants another dimension order transposes the copy. Without the barrier XLA makes the matrix product
    # produce that order, by swapping its operands.
    copy = [torch.ops.aten.view_copy(x, x.shape)]
    if x.device.type == "xla":
        xm.optimization_barrier_(copy)
    return copy[0]
