"""A model's own activation, which is written in torch, as a JAX function, so that a kernel computes exactly that.

It is a few pointwise operations (silu, clamp, a product of two halves), and each family has its own. It is traced once,
on two rows, into a list of ATen operations, which are replayed with JAX's; an unknown operation is an error.
"""

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

# semi-private: torch/utils/_python_dispatch.py, torch 2.9
from torch.utils._python_dispatch import _disable_current_modes

from shardwright.models.ops.device_kernels import kernels
from shardwright.models.ops.jax_call import jax, jnp


@dataclass(frozen=True)
class _Value:
    """The result of step ``number``, counted from 1; 0 is the input."""

    number: int


@dataclass(frozen=True)
class Activation:
    """A pointwise function of rows, ``[rows, width] -> [rows, width']``, as a hashable list of steps."""

    # operation, positional and keyword arguments; the last gives the result
    steps: tuple[tuple[str, tuple[Any, ...], tuple[tuple[str, Any], ...]], ...]
    width: int  # of the result

    def __call__(self, x: Any) -> Any:
        """Apply to a JAX array, in its dtype. (In float32, a TPU would keep the whole array in float32.)"""
        values = [x]

        def known(argument: Any) -> Any:
            return values[argument.number] if isinstance(argument, _Value) else argument

        for name, args, kwargs in self.steps:
            values.append(_OPERATIONS[name](*map(known, args), **{k: known(v) for k, v in kwargs}))
        return values[-1]


def trace(function: Callable[[Tensor], Tensor], width: int) -> Activation:
    """Trace ``function`` of a tensor [rows, ``width``], which must treat all rows alike.

    Raises:
        ValueError: it has an unknown operation (names it).
    """
    with _disable_current_modes():  # the layer around may be in tracing
        example = torch.zeros(2, width)
        graph = make_fx(lambda x: function(x))(example).graph
        result = function(example)
    numbers: dict[torch.fx.Node, Any] = {}
    steps: list[Any] = []
    for node in graph.nodes:
        if node.op == "placeholder":
            numbers[node] = _Value(0)
        elif node.op == "output":
            if numbers[node.args[0]].number != len(steps):
                raise ValueError("an activation whose result is not its last step")
        else:
            name = getattr(getattr(node.target, "overloadpacket", node.target), "__name__", str(node.target))
            if node.op != "call_function" or name not in _OPERATIONS:
                raise ValueError(f"an activation with {name!r}: known are {', '.join(sorted(_OPERATIONS))}")
            args, kwargs = map_arg((node.args, node.kwargs), numbers.__getitem__)
            if name == "_to_copy":  # between the steps of a fusion the compiler rounds as it likes
                kwargs = {}
            steps.append((name, _plain(args), tuple((k, v) for k, v in kwargs.items())))
            numbers[node] = _Value(len(steps))
    return Activation(tuple(steps), result.shape[-1])


def _plain(args: Any) -> Any:  # lists have no hash
    return tuple(map(_plain, args)) if isinstance(args, list | tuple) else args


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
    "_to_copy": lambda x: x,
    "add": lambda x, y, alpha=1: x + alpha * y,
    "sub": lambda x, y, alpha=1: x - alpha * y,
    "div": operator.truediv,
    "gelu": lambda x, approximate="none": jax.nn.gelu(x, approximate=approximate == "tanh"),
    "clamp": lambda x, min=None, max=None: jnp.clip(x, min, max),
    "clamp_min": jnp.maximum,
    "clamp_max": jnp.minimum,
}
