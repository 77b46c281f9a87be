"""N equal decoder layers as one: parameters stored stacked, one `scan` instead of N copies of the graph; and remat.

It works for any transformers decoder whose loop is over ``self.layers``: that list is replaced by one that holds the
first layer under the name ``*`` (its parameters stacked along a new dimension 0, so that ``named_parameters()`` yields
the very names of a recipe's lines: ``model.layers.*.self_attn.q_proj.weight``) and that yields a single callable
running them all.

Remat (what the backward recomputes) is decided where AOTAutograd splits a layer into forward and backward, so it is
the same code with the scan and without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch_xla.core.xla_model as xm
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch_xla.experimental.pytreeify import pytreeify

# Semi-private, pinned: the parts of torch_xla's `scan` before and after its autograd function.
from torch_xla.experimental.scan import _scan_impl_pytree, value_and_grad_partitioned

from models import partial_gradients, scopes, side_outputs
from models.remat import REMAT

# (full name, parameter) -> what the layer uses, by full name: the parameter, and perhaps its partial gradient's leaf
Prepare = Callable[[str, torch.Tensor], dict[str, torch.Tensor]]


def find_layers(model: nn.Module) -> str:
    """The dotted name of the decoder's layer list; ValueError if the model has none."""
    names = [n for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and n.split(".")[-1] == "layers"]
    if not names:
        raise ValueError(f"{type(model).__name__} has no module list named 'layers'")
    return min(names, key=lambda name: name.count("."))


def stack_layers(model: nn.Module) -> tuple[str, int]:
    """Replace the decoder's layers by one stacked layer, in place; the model must be on meta.

    Returns:
        the layer list's dotted name and the number of layers.

    Raises:
        ValueError: the model has no layer list, or its layers differ (says in what).
    """
    name = find_layers(model)
    layers = model.get_submodule(name)
    assert isinstance(layers, nn.ModuleList)
    _check_equal(name, layers)
    template = layers[0]
    for module in template.modules():
        for key, parameter in list(module.named_parameters(recurse=False)):
            stacked = torch.empty((len(layers), *parameter.shape), dtype=parameter.dtype, device="meta")
            setattr(module, key, nn.Parameter(stacked))
    _replace(model, name, DecoderLayers(name, {"*": template}, count=len(layers)))
    return name, len(layers)


def wrap_layers(model: nn.Module) -> None:
    """Replace the decoder's layers by a list that runs them one by one, each with remat."""
    name = find_layers(model)
    _replace(model, name, DecoderLayers(name, dict(model.get_submodule(name).named_children()), count=None))


class DecoderLayers(nn.ModuleList):
    """The layer list of a decoder: iterating over it yields callables that run its layers (see the module's docstring).

    Args:
        name: the list's dotted name in the model.
        layers: child name -> layer; a stack has the one child ``*``.
        count: layers in the stack; None for plain layers.
    """

    def __init__(self, name: str, layers: dict[str, nn.Module], count: int | None) -> None:
        super().__init__()
        for key, layer in layers.items():
            self.add_module(key, layer)
        self.name, self.count = name, count
        self.runners = [_Runner(self, key, layer) for key, layer in layers.items()]
        self.configure(lambda name, parameter: {name: parameter}, "none")

    def configure(self, prepare: Prepare, remat: str) -> None:
        """Set what happens to a parameter just before use (cast, layout), by full name; and the remat policy."""
        self.prepare, self.partition = prepare, REMAT[remat]

    def __getitem__(self, index: Any) -> Any:
        return self.runners[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.runners)


class _Runner:
    """Stands for a layer in the decoder's loop; other attributes (``attention_type``, …) are the layer's own."""

    def __init__(self, owner: DecoderLayers, key: str, layer: nn.Module) -> None:
        # owner and layer know each other already through the module tree: no second registration
        self.owner, self.layer, self.prefix = owner, layer, f"{owner.name}.{key}"
        self.graphs: dict[Any, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)

    def __call__(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        leaves, spec = tree_flatten((args, kwargs))
        constants = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        static = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        # A scanned function sees nothing but its arguments, so constants ride in the carry, which must be floating
        # point (its gradient is traced). Integers here are positions and segment ids: exact in fp32 up to 2**24.
        carry = [t.detach() if t.is_floating_point() else t.to(torch.float32) for t in constants]
        zero = torch.zeros((), device=hidden.device)
        init = (hidden, zero, carry)
        parameters: dict[str, torch.Tensor] = dict(self.layer.named_parameters())
        parameters |= partial_gradients.of(parameters)
        dtypes = [t.dtype for t in constants]

        def body(state: Any, weights: dict[str, torch.Tensor]) -> Any:
            hidden, zero, carry = state
            values = iter(t.detach().to(dtype) for t, dtype in zip(carry, dtypes, strict=True))
            filled = [next(values) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            args, kwargs = tree_unflatten(filled, spec)
            prepared: dict[str, torch.Tensor] = {}
            for k, w in weights.items():  # a leaf that is given comes after, and instead of, the one made here
                full = self.owner.prepare(f"{self.prefix}.{k}", w)
                prepared |= {name.removeprefix(f"{self.prefix}."): t for name, t in full.items()}
            output, side = side_outputs.collect(
                lambda: partial_gradients.functional_call(self.layer, prepared, (hidden, *args), kwargs)
            )
            output = output[0] if isinstance(output, tuple) else output
            # every output of a scanned function must require grad: `zero` does, and changes nothing
            side = tree_map(lambda t: t if t.requires_grad else t + zero, side)
            return (output, zero, carry), side

        key = (
            self.layer.training,
            side_outputs.wanted(),
            str(static),
            tuple((t.shape, t.dtype) for t in (hidden, *constants)),
            tuple((k, w.dtype) for k, w in parameters.items()),
        )
        if key not in self.graphs:
            xs = parameters if self.owner.count else {k: w.unsqueeze(0) for k, w in parameters.items()}
            with scopes.tracing():
                self.graphs[key] = value_and_grad_partitioned(
                    body, init, xs, partition_fn=scopes.scoped(self.owner.partition), is_fn_pure=False
                )
        count = self.owner.count
        (output, _, _), side = _Layers.apply(*self.graphs[key], count is not None, init, parameters)
        side_outputs.replay(side, count)
        return output


@pytreeify
class _Layers(torch.autograd.Function):
    """Run a layer's forward graph once, or over all slices of the stack; its backward graph likewise.

    torch_xla's own `Scan` would do but for its backward, which needs jax (`shard_as`) to lay gradients out as the
    parameters are. The plan says so already, through ``prepare``.
    """

    @staticmethod
    def forward(ctx, forward, alias_input, backward, scanned, init, parameters):  # type: ignore[override]
        with torch.no_grad():
            run = _scan_impl_pytree if scanned else _once
            carry, (side, partial) = run(forward, init, parameters)
        flat, ctx.spec = tree_flatten(alias_input(partial, parameters))
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
    return function(carry, x)


def _barrier(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Keep the compiler from merging what the backward recomputes with the forward (it would undo remat)."""
    copies = [t.clone() for t in tensors]
    xm.optimization_barrier_(copies)
    return copies


def _check_equal(name: str, layers: nn.ModuleList) -> None:
    """Raise ValueError unless all layers have the same modules, shapes and settings."""
    first, *others = ([*_signature(layer)] for layer in layers)
    for i, other in enumerate(others, start=1):
        for mine, theirs in zip(first, other, strict=False):
            if mine != theirs:
                raise ValueError(f"{name}.0 has {mine}, {name}.{i} has {theirs}")
        if len(first) != len(other):
            raise ValueError(f"{name}.0 has {len(first)} settings and parameters, {name}.{i} has {len(other)}")


def _signature(layer: nn.Module) -> Iterator[str]:
    for name, module in layer.named_modules():
        yield f"{name or 'the layer'}: {type(module).__name__}"
        for key, value in sorted(vars(module).items()):
            if isinstance(value, bool | int | float | str) and key != "layer_idx":
                yield f"{name}.{key} = {value!r}"
        for key, parameter in module.named_parameters(recurse=False):
            yield f"{name}.{key} of shape {list(parameter.shape)}, {parameter.dtype}"


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
