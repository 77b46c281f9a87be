"""A model's own activation, which is written in torch, as a JAX function, so that a kernel computes exactly that.

It is a few pointwise operations (silu, clamp, a product of two halves), and each family has its own.
"""

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwright.models.ops import torch_in_jax
from shardwright.models.ops.device_kernels import kernels
from shardwright.models.ops.jax_call import jax, jnp
from shardwright.models.ops.torch_in_jax import Steps


@dataclass(frozen=True)
class Activation:
    """A pointwise function of rows, ``[rows, width] -> [rows, width']``."""

    steps: Steps

    @property
    def width(self) -> int:
        """The width of the result."""
        return self.steps.shape[-1]

    def __call__(self, x: Any) -> Any:
        """Apply to a JAX array, in its dtype. (In float32, a TPU would keep the whole array in float32.)"""
        return self.steps.run(_OPERATIONS, x)


def trace(function: Callable[[Tensor], Tensor], width: int) -> Activation:
    """Trace ``function`` of a tensor [rows, ``width``], which must treat all rows alike.

    Raises:
        ValueError: it has an unknown operation (names it).
    """
    return Activation(torch_in_jax.trace(function, _OPERATIONS, ((2, width), torch.float32)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _split(x: Any, size: int, dim: int = 0) -> Any:
    return jnp.split(x, list(range(size, x.shape[dim], size)), axis=dim)


def _split_backward(size: int, dim: int, first: Any, gradients: Any) -> tuple[Any]:
    """Write each gradient into its place: a TPU would run a concatenation as an operation of its own."""
    shape = list(gradients[0].shape)
    shape[dim] = sum(piece.shape[dim] for piece in gradients)
    # Nothing else may read a gradient, or the compiler would materialise it and copy it into its place: so the result
    # is allocated after the input's first row.
    whole = kernels().unwritten(tuple(shape), gradients[0].dtype, first)
    for number, piece in enumerate(gradients):
        whole = jax.lax.dynamic_update_slice_in_dim(whole, piece, number * size, dim)
    return (whole,)


_split.defvjp(lambda x, size, dim: (_split(x, size, dim), x[:1]), _split_backward)


def _slice(x: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    index = [slice(None)] * x.ndim
    index[dim] = slice(start, None if end is None else min(end, x.shape[dim]), step)
    return x[tuple(index)]


# ATen's operation → JAX's
_OPERATIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in ("getitem", "mul", "neg", "pow")},
    **{name: getattr(jnp, name) for name in ("exp", "tanh", "square", "minimum", "maximum")},
    **{name: getattr(jax.nn, name) for name in ("sigmoid", "silu", "relu")},
    "split": _split,
    "slice": _slice,
    "_to_copy": lambda x, **_: x,  # between the steps of a fusion the compiler rounds as it likes
    "add": lambda x, y, alpha=1: x + alpha * y,
    "sub": lambda x, y, alpha=1: x - alpha * y,
    "div": operator.truediv,
    "gelu": lambda x, approximate="none": jax.nn.gelu(x, approximate=approximate == "tanh"),
    "clamp": lambda x, min=None, max=None: jnp.clip(x, min, max),
    "clamp_min": jnp.maximum,
    "clamp_max": jnp.minimum,
}
