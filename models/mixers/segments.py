"""A JAX function of whole rows as one differentiable operation of the torch graph, and the loop over a row's segments.

The backward runs the forward again, segment by segment: only the inputs are saved. So a layer that mixes tokens by a
recurrence costs memory in proportion to the tokens, with or without remat.
"""

import pkgutil
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.models.ops.jax_call import Array, jax, jax_call, jnp, lax
from shardwright.models.ops.operation import kernel


def apply(function: Callable[..., Array], *tensors: Tensor, **options: Any) -> Tensor:
    """Return ``function(*arrays, **options)``, with gradients for every tensor.

    ``function`` is a module-level JAX function, whose result has the shape and dtype of its first argument.
    """
    name = f"{function.__module__}:{function.__qualname__}"
    return _mix(tensors, name, tuple(options.items()))


def over_segments(
    step: Callable[[Any, tuple[Array, ...]], tuple[Any, Array]], state: Any, arrays: Sequence[Array], length: int
) -> Array:
    """Run ``step`` from segment to segment of each row, and join its outputs: [B, T, …].

    It maps the state (float32) and the ``arrays`` [B, T, …] of one segment to the next state and the segment's output.
    Rows are filled with zeros to a multiple of ``length``. The backward computes intermediate values again, and keeps
    one state a segment.
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


def _dense(t: Tensor) -> Tensor:
    return torch.empty_like(t, memory_format=torch.contiguous_format)


@kernel(
    "mix",
    like=lambda tensors, *_: _dense(tensors[0]),
    gradients=lambda gradient, tensors, *settings: _mix_backward([*tensors, gradient], *settings),
)
def _mix(tensors: Sequence[Tensor], function: str, options: tuple[tuple[str, Any], ...]) -> Tensor:
    return jax_call(pkgutil.resolve_name(function), *tensors, **dict(options))[0]


@kernel("mix_backward", like=lambda tensors, *_: [_dense(t) for t in tensors[:-1]])
def _mix_backward(tensors: Sequence[Tensor], function: str, options: tuple[tuple[str, Any], ...]) -> list[Tensor]:
    return jax_call(_gradients, *tensors, kernel=pkgutil.resolve_name(function), **dict(options))
