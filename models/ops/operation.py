"""Functions that are one operation of the torch graph, ``torch.ops.shardwright.<name>``: AOTAutograd keeps them whole.

They take tensors, numbers and text; any other value is passed as text
(:mod:`shardwright.models.ops.arguments_as_text`). A *kernel* takes a list of tensors and one text.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

# a kernel's gradient of the result (a list of them, if it returns a list; None: not used), saved tensors and text
# -> the gradient of each tensor; None: it has none
Gradients = Callable[[Any, Sequence[Tensor], str], list[Tensor | None]]
Map = Callable[[Tensor], Tensor]


def operation(name: str, like: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Make a function the operation ``name``; ``like``, of the same arguments, returns empty tensors like its results.

    The annotations are a ``torch.library`` schema. No result may be an argument, or a view of one.
    """

    def register(function: Callable[..., Any]) -> Any:
        made = torch.library.custom_op(f"shardwright::{name}", function, mutates_args=())
        made.register_fake(like)
        return made

    return register


def differentiate(
    kernel: Any,
    gradients: Gradients,
    saved: Callable[[list[Tensor], Any], Iterable[Tensor]] = lambda tensors, _: tensors,
) -> None:
    """Give a kernel gradients; the backward needs those of its tensors and its results that ``saved`` chooses."""

    def save(ctx: Any, inputs: tuple[list[Tensor], str], output: Any) -> None:
        tensors, ctx.text = inputs
        ctx.save_for_backward(*saved(tensors, output))
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, gradient: Any) -> tuple[list[Tensor | None], None]:
        return gradients(gradient, ctx.saved_tensors, ctx.text), None

    kernel.register_autograd(backward, setup_context=save)


def count_flops(name: str, formula: Callable[[list[Sequence[int]], str], int]) -> None:
    """Let remat policies keep a kernel's results; ``formula`` takes the shapes of its tensors, and its text."""
    register_flop_formula(getattr(torch.ops.shardwright, name))(lambda shapes, text, **_: formula(shapes, text))


class LinearMap(torch.autograd.Function):
    """``LinearMap.apply(forward, transposed, x)``: ``forward(x)``, a linear map, whose gradient is ``transposed``'s."""

    @staticmethod
    def forward(ctx, forward: Map, transposed: Map, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.transposed = transposed
        return forward(x)

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[override]
        return None, None, ctx.transposed(gradient)
