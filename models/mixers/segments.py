"""A JAX function of whole rows as one differentiable operation of the torch graph, and the loop over a row's segments.

The backward runs the forward again, segment by segment: only the inputs are saved. So a layer that mixes tokens by a
recurrence costs memory in proportion to the tokens, with or without remat.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.models.ops.arguments_as_text import as_text, from_text
from shardwright.models.ops.jax_call import jax, jax_call

jnp, lax = jax.numpy, jax.lax

# a jax.Array, when it is traced
Array = Any


def apply(function: Callable[..., Array], *tensors: Tensor, **options: Any) -> Tensor:
    """Return ``function(*arrays, **options)``, with gradients for every tensor.

    ``function`` is a module-level JAX function, whose result has the shape and dtype of its first argument.
    """
    name = f"{function.__module__}:{function.__qualname__}"
    return _mix(name, as_text(tuple(options.items())), list(tensors))


def over_segments(
    step: Callable[[Array, tuple[Array, ...]], tuple[Array, Array]], state: Array, arrays: Sequence[Array], length: int
) -> Array:
    """Run ``step`` from segment to segment of each row, and join its outputs: [B, T, …].

    Args:
        step: (state, arrays of one segment) -> (state, output of the segment [B, length, …]). The backward computes its
            intermediate values again, and keeps one state a segment.
        state: before the first token; float32.
        arrays: each [B, T, …]. Rows are filled with zeros to a multiple of ``length``.
    """
    tokens = arrays[0].shape[1]
    count = -(-tokens // length)

    def split(array: Array) -> Array:
        filled = jnp.pad(array, [(0, 0), (0, count * length - tokens)] + [(0, 0)] * (array.ndim - 2))
        return jnp.moveaxis(filled.reshape(array.shape[0], count, length, *array.shape[2:]), 1, 0)

    _, out = lax.scan(jax.checkpoint(step), state, tuple(map(split, arrays)))
    return jnp.moveaxis(out, 0, 1).reshape(out.shape[1], count * length, *out.shape[3:])[:, :tokens]


def _gradients(*arrays: Array, kernel: Callable[..., Array], **options: Any) -> tuple[Array, ...]:
    *inputs, gradient = arrays
    _, pull = jax.vjp(lambda *given: kernel(*given, **options), *inputs)
    return pull(gradient)


@torch.library.custom_op("shardwright::mix", mutates_args=())
def _mix(function: str, options: str, tensors: Sequence[Tensor]) -> Tensor:
    return jax_call(pkgutil.resolve_name(function), *tensors, **dict(from_text(options)))[0]


@_mix.register_fake
def _(function: str, options: str, tensors: Sequence[Tensor]) -> Tensor:
    return torch.empty_like(tensors[0], memory_format=torch.contiguous_format)


@torch.library.custom_op("shardwright::mix_backward", mutates_args=())
def _mix_backward(function: str, options: str, tensors: Sequence[Tensor], gradient: Tensor) -> list[Tensor]:
    kernel = pkgutil.resolve_name(function)
    return list(jax_call(_gradients, *tensors, gradient, kernel=kernel, **dict(from_text(options))))


@_mix_backward.register_fake
def _(function: str, options: str, tensors: Sequence[Tensor], gradient: Tensor) -> list[Tensor]:
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors]


def _save(ctx: Any, inputs: tuple[str, str, Sequence[Tensor]], output: Tensor) -> None:
    ctx.function, ctx.options, tensors = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[None, None, list[Tensor]]:
    return None, None, _mix_backward(ctx.function, ctx.options, list(ctx.saved_tensors), gradient)


_mix.register_autograd(_differentiate, setup_context=_save)
