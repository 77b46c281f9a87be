"""Functions that are one operation of the torch graph, ``torch.ops.shardwright.<name>``: AOTAutograd keeps them whole.

An operation takes tensors, numbers and text. A *kernel* takes a list of tensors and settings, which it gets as text
(:mod:`shardwright.models.ops.arguments_as_text`).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, get_type_hints

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from shardwright.models.ops.arguments_as_text import as_text, from_text

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


def kernel(
    name: str,
    like: Callable[..., Any],
    gradients: Callable[..., list[Tensor | None]] | None = None,
    saved: Callable[[Sequence[Tensor], Any], Iterable[Tensor]] = lambda tensors, _: tensors,
    flops: Callable[..., int] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make ``function(tensors, *settings)`` the operation ``name``, which is called likewise.

    Args:
        like: of the same arguments; returns empty tensors like the results, a tensor or a list of them.
        gradients: maps the gradient of the result (a list of them, if it returns a list; None: not used), the saved
            tensors and the settings to the gradient of each tensor; None: it has none.
        saved: chooses the tensors, of the kernel's and its results, that ``gradients`` needs.
        flops: of the tensors' shapes and the settings; lets remat policies keep the results.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        results = "Tensor" if get_type_hints(function)["return"] is Tensor else "Tensor[]"
        made = torch.library.custom_op(
            f"shardwright::{name}",
            lambda tensors, text: function(tensors, *from_text(text)),
            mutates_args=(),
            schema=f"(Tensor[] tensors, str text) -> {results}",
        )
        made.register_fake(lambda tensors, text: like(tensors, *from_text(text)))
        if gradients is not None:

            def save(ctx: Any, inputs: tuple[list[Tensor], str], output: Any) -> None:
                tensors, ctx.text = inputs
                ctx.save_for_backward(*saved(tensors, output))
                ctx.set_materialize_grads(False)

            def backward(ctx: Any, gradient: Any) -> tuple[list[Tensor | None], None]:
                return gradients(gradient, ctx.saved_tensors, *from_text(ctx.text)), None

            made.register_autograd(backward, setup_context=save)
        if flops is not None:
            formula = register_flop_formula(getattr(torch.ops.shardwright, name))
            formula(lambda shapes, text, **_: flops(shapes, *from_text(text)))
        return lambda tensors, *settings: made(list(tensors), as_text(settings))

    return register


class LinearMap(torch.autograd.Function):
    """``LinearMap.apply(forward, transposed, x)``: ``forward(x)``, a linear map, whose gradient is ``transposed``'s."""

    @staticmethod
    def forward(ctx, forward: Map, transposed: Map, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.transposed = transposed
        return forward(x)

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[override]
        return None, None, ctx.transposed(gradient)
