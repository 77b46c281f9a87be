"""A weight in the layout that it is stored in, so that a loop over stacked layers does not copy the whole stack.

The TPU compiler chooses the layout of what goes into a loop, and takes the one that the loop's products like best.
Where that is not the stored one, all layers are copied before the loop, and both copies live as long as it runs. Behind
this operation each layer is laid out by itself.
"""

from __future__ import annotations

import torch

from models.jax_call import Manual, jax, jax_call
from models.op_arguments import as_text, from_text


def as_stored(weight: torch.Tensor, manual: Manual) -> torch.Tensor:
    """``weight``, of any shape, in row-major order on each device; its gradient is not touched.

    Args:
        manual: how it lies on the mesh, as its one input and its one output.
    """
    return _as_stored(weight, as_text(manual))


@torch.library.custom_op("shardwright::as_stored", mutates_args=())
def _as_stored(weight: torch.Tensor, manual: str) -> torch.Tensor:
    return jax_call(_row_major, weight, manual=from_text(manual))[0]


@_as_stored.register_fake
def _(weight: torch.Tensor, manual: str) -> torch.Tensor:
    return torch.empty_like(weight)


def _pass(ctx: object, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    return gradient, None


_as_stored.register_autograd(_pass)


def _row_major(x: jax.Array) -> jax.Array:
    from jax.experimental.layout import Layout, with_layout_constraint

    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))
