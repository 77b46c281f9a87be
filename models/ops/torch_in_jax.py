"""A function that is written in torch as a JAX function, so that a kernel computes exactly what the model does.

It is traced once, on examples, into a list of ATen operations, which are replayed with JAX's; an unknown one is an
error.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

# semi-private: torch/utils/_python_dispatch.py, torch 2.9
from torch.utils._python_dispatch import _disable_current_modes

# ATen's operation → JAX's
Operations = Mapping[str, Callable[..., Any]]


@dataclass(frozen=True)
class _Value:
    """One of the inputs, or of the results of steps, counted on from these."""

    number: int


@dataclass(frozen=True)
class Steps:
    """A traced function, as a hashable list of steps; the last gives the result."""

    # operation, positional and keyword arguments
    steps: tuple[tuple[str, tuple[Any, ...], tuple[tuple[str, Any], ...]], ...]
    shape: tuple[int, ...]  # of the result

    def run(self, operations: Operations, *inputs: Any) -> Any:
        """Apply the function to JAX arrays."""
        values = [*inputs]

        def known(argument: Any) -> Any:
            return values[argument.number] if isinstance(argument, _Value) else argument

        for name, args, kwargs in self.steps:
            values.append(operations[name](*map(known, args), **{k: known(v) for k, v in kwargs}))
        return values[-1]


def trace(
    function: Callable[..., Tensor], operations: Operations, *inputs: tuple[tuple[int, ...], torch.dtype]
) -> Steps:
    """Trace ``function`` of tensors of these shapes and dtypes; what it makes of them becomes constants.

    Raises:
        ValueError: it has an operation that is none of ``operations`` (names it).
    """
    with _disable_current_modes():  # the layer around may be in tracing
        examples = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in inputs]
        graph = make_fx(lambda *given: function(*given))(*examples).graph
        shape = tuple(function(*examples).shape)
    numbers: dict[torch.fx.Node, Any] = {}
    steps: list[Any] = []
    for node in graph.nodes:
        if node.op == "placeholder":
            numbers[node] = _Value(len(numbers))
        elif node.op == "output":
            if numbers[node.args[0]].number != len(numbers) - 1:
                raise ValueError("a function whose result is not its last step")
        else:
            name = getattr(getattr(node.target, "overloadpacket", node.target), "__name__", str(node.target))
            if node.op != "call_function" or name not in operations:
                raise ValueError(f"a function with {name!r}: known are {', '.join(sorted(operations))}")
            args, kwargs = map_arg((node.args, node.kwargs), numbers.__getitem__)
            steps.append((name, _plain(args), tuple((k, _plain(v)) for k, v in kwargs.items())))
            numbers[node] = _Value(len(numbers))
    return Steps(tuple(steps), shape)


def _plain(argument: Any) -> Any:
    """``argument`` as a value with a hash, and with a text by `shardwright.models.ops.arguments_as_text`."""
    if isinstance(argument, list | tuple):
        return tuple(map(_plain, argument))
    return argument if isinstance(argument, bool | int | float | str | _Value | None) else str(argument)
