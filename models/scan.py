"""Running decoder layers: N equal layers as one `scan` in place of N copies of the graph, and each layer with remat.

A layer is traced by AOTAutograd into a forward and a backward graph. Where it is split into the two, remat is decided
(what the backward computes again), so that is the same code for a scan and for a single layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch_xla.core.xla_model as xm
from torch import nn

# semi-private: torch/utils/_pytree.py, torch 2.9
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch_xla.experimental.pytreeify import pytreeify

# semi-private: torch_xla/experimental/scan.py, torch_xla 2.9 (the parts of `scan` around its autograd function)
from torch_xla.experimental.scan import _scan_impl_pytree, value_and_grad_partitioned

from models import partial_gradients, randomness, scopes, side_outputs
from models.partial_gradients import Tensors
from models.remat import REMAT

# (full name, parameter) -> what the layer uses, by full name: the parameter, and perhaps its partial gradient's leaf
Prepare = Callable[[str, torch.Tensor], dict[str, torch.Tensor]]


class LayerRunner:
    """A callable that runs a layer, or a stack of layers, in the decoder's loop.

    Its other attributes (``attention_type``, …) are the layer's own, because decoders read them.

    Args:
        name: the layer's dotted name in the model, ``model.layers.*`` for a stack.
        layer: the layer; for a stack one whose parameters are stacked along dimension 0.
        count: how many layers the stack has; None: the layer is not stacked.
        first: the number of the layer, or of the stack's first, among the decoder's layers.
    """

    def __init__(self, name: str, layer: nn.Module, count: int | None, first: int) -> None:
        self.name, self.layer, self.count, self.first = name, layer, count, first
        self.prepare: Prepare = lambda name, parameter: {name: parameter}
        self.partition: Callable[..., Any] = REMAT["none"]
        # for each kind of call: forward and backward graph, and whether the layer draws
        self.graphs: dict[Any, tuple[Any, bool]] = {}

    def __getattr__(self, name: str) -> Any:
        # A copy in the making has no layer yet. Special methods (`__setstate__`, …) are never the layer's.
        if name == "layer" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.layer, name)

    def __getstate__(self) -> dict[str, Any]:
        """The attributes for a copy. It has no graphs, because those here run this runner's layer."""
        return {**vars(self), "graphs": {}}

    def __call__(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        leaves, spec = tree_flatten((args, kwargs, side_outputs.real_tokens()))
        constants = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        # A scanned function sees nothing but its arguments, so constants are part of the carry.
        carry = [_as_floats(t.detach()) for t in constants]
        init = (hidden, torch.zeros((), device=hidden.device), carry)
        parameters: dict[str, torch.Tensor] = dict(self.layer.named_parameters())
        parameters |= partial_gradients.of(parameters)
        key = (
            self.layer.training,
            side_outputs.wanted(),
            str([None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]),
            tuple((t.shape, t.dtype) for t in (hidden, *constants)),
            tuple((k, w.dtype) for k, w in parameters.items()),
        )
        if key not in self.graphs:
            self.graphs[key] = self._trace(leaves, spec, init, parameters)
        graphs, keyed = self.graphs[key]
        random_keys = [randomness.active().layer_keys(self.first, self.count or 1)] if keyed else []
        xs = (parameters, random_keys if self.count else [keys[0] for keys in random_keys])
        (output, _, _), side = _Layers.apply(*graphs, self.count is not None, init, xs)
        side_outputs.replay(side, self.count)
        return output

    def _trace(self, leaves: list[Any], spec: Any, init: Any, parameters: Tensors) -> tuple[Any, bool]:
        """The layer's graphs, and whether they take a key beside the parameters: only those of a layer that draws do.

        Args:
            leaves: the arguments of a call besides the hidden state, flattened as ``spec`` says.
            init: the carry of a call: hidden state, zero, and the tensors among ``leaves``.
        """
        dtypes = [leaf.dtype for leaf in leaves if isinstance(leaf, torch.Tensor)]

        def body(state: Any, x: tuple[Tensors, list[torch.Tensor]]) -> Any:
            (hidden, zero, carry), (weights, random_keys) = state, x
            values = iter(_from_floats(t.detach(), dtype) for t, dtype in zip(carry, dtypes, strict=True))
            filled = [next(values) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            args, kwargs, real_tokens = tree_unflatten(filled, spec)
            with randomness.drawing(*random_keys), side_outputs.given(real_tokens):
                output, side = self._run_once(weights, (hidden, *args), kwargs)
            # every output of a scanned function must require a gradient: `zero` does, and changes no value
            side = tree_map(lambda t: t if t.requires_grad else t + zero, side)
            return (output, zero, carry), side

        def trace(random_keys: list[torch.Tensor]) -> Any:
            stacked = parameters if self.count else {k: w.unsqueeze(0) for k, w in parameters.items()}
            partition = scopes.scoped(self.partition)
            with scopes.tracing():
                return value_and_grad_partitioned(
                    body, init, (stacked, random_keys), partition_fn=partition, is_fn_pure=False
                )

        try:
            return trace([]), False
        except randomness.UnknownDraw:
            if randomness.active().key is None:
                raise
            return trace([randomness.active().layer_keys(self.first, 1)]), True

    def _run_once(self, weights: Tensors, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, Any]:
        """One layer's output and side outputs, with ``weights`` prepared for it."""
        prepared: dict[str, torch.Tensor] = {}
        for key, weight in weights.items():  # leaves come last: one that was given replaces one that `prepare` made
            full = self.prepare(f"{self.name}.{key}", weight)
            prepared |= {name.removeprefix(f"{self.name}."): t for name, t in full.items()}
        output, side = side_outputs.collect(
            lambda: partial_gradients.functional_call(self.layer, prepared, args, kwargs)
        )
        return output[0] if isinstance(output, tuple) else output, side


def _as_floats(t: torch.Tensor) -> torch.Tensor:
    """``t`` as a carry holds it, which must be floating point, for its gradient is traced.

    Complex numbers (RoPE's, in some families) become pairs. Integers here are positions and segment ids, exact in
    float32 up to 2**24.
    """
    if t.is_complex():
        return torch.stack((t.real, t.imag), dim=-1)  # torch_xla can put no barrier behind a `view_as_real`
    return t if t.is_floating_point() else t.to(torch.float32)


def _from_floats(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What :func:`_as_floats` was given, of ``dtype``."""
    return torch.view_as_complex(t) if dtype.is_complex else t.to(dtype)


@pytreeify
class _Layers(torch.autograd.Function):
    """Runs a layer's forward graph once, or over all slices of the stack; its backward graph likewise.

    The backward of torch_xla's own `Scan` needs jax (`shard_as`), to lay gradients out as the parameters are. Here
    ``prepare`` has done so already.
    """

    @staticmethod
    def forward(ctx, forward, alias_input, backward, scanned, init, xs):  # type: ignore[override]
        with torch.no_grad():
            run = _scan_impl_pytree if scanned else _once
            carry, (side, partial) = run(forward, init, xs)
        flat, ctx.spec = tree_flatten(alias_input(partial, xs))
        ctx.save_for_backward(*flat)
        ctx.run_backward, ctx.scanned = backward, scanned
        return carry, side

    @staticmethod
    def backward(ctx, grad_carry, grad_side):  # type: ignore[override]
        saved = list(ctx.saved_tensors) if ctx.scanned else _barrier(list(ctx.saved_tensors))
        run = _scan_impl_pytree if ctx.scanned else _once
        with torch.no_grad():
            activations = tree_unflatten(saved, ctx.spec)
            gradients = run(ctx.run_backward, grad_carry, (grad_side, activations), reverse=True)
        return None, None, None, None, *gradients


def _once(function: Callable[..., Any], carry: Any, x: Any, *, reverse: bool = False) -> Any:
    """``function`` called once, with the signature of torch_xla's scan."""
    return function(carry, x)


def _barrier(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of ``tensors`` behind a barrier.

    Without it the compiler would merge what the backward computes again with the forward, and undo remat.
    """
    copies = [t.clone() for t in tensors]
    xm.optimization_barrier_(copies)
    return copies
