"""Experts for any routing, exactly: no token is dropped, shapes are static, and work follows the rows there are.

Each device sorts its (token, choice) pairs by expert, multiplies the sorted rows by their experts' weights
(`models.experts.grouped`) and gathers every token's k results. Activations move by gathers alone, in the backward too.

What crosses devices is written out (`jax.shard_map`), not left to the partitioner:

- Weights are gathered from their layout just before use, except over the axes that split the experts; their gradients
  leave reduce-scattered to that layout.
- Over the axes that split the experts, tokens are gathered a chunk at a time, each device adds what its experts make
  of them, and the sum is scattered back. So the largest buffer is the chunk's, whatever the routing: if all tokens
  want one expert, its device takes longer and holds no more. For n such devices, 2(n-1) rows a token cross; an
  all-to-all that serves each choice by itself would move 2k(n-1)/n rows, but in as many rounds as the fullest pair of
  devices needs, on a torus over a mean distance of n/4 hops. At k = 8, n = 8 the two cost the same.

The backward computes the first projection again and saves nothing but the inputs. The router's gradient needs no second
one: the product of the incoming gradient with an expert's output is that of the gradient, taken back through the second
projection, with what entered it.

Shape suffixes: T tokens, H hidden width, k experts a token.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from models.experts import activation, dropless_rows
from models.experts.interface import register_experts
from models.jax_call import Manual, jax_call

Axes = tuple[str, ...]
Spec = tuple[str | Axes | None, ...]


@dataclass(frozen=True)
class Dropless:
    """Experts bound to a layout. Call it as transformers calls experts functions (see `models.experts.capacity`).

    Args:
        axes: (name, size) of every mesh axis, in mesh order; none: one device.
        batch_axes: axes that split the tokens outside. Inside, all axes do: none multiplies what another does.
        expert_axes: axes that tokens cross and weights don't: they split dimension 0 of every parameter.
        weight_specs: parameter's name (``gate_up_proj``) -> its partition spec; replicated if not named.
        order: the device ids in mesh order; None: 0, 1, 2, …
        buffer_bytes: bound on the largest buffer of rows, of a few that live at once. A chunk's rows of hidden width
            keep to it, and a block's of the first projection's width.
        reduce_dtype: of the weight gradients that cross devices (``float32``); None: the weights' own.
    """

    axes: tuple[tuple[str, int], ...] = ()
    batch_axes: Axes = ()
    expert_axes: Axes = ()
    weight_specs: Mapping[str, Spec] = field(default_factory=dict)
    order: tuple[int, ...] | None = None
    buffer_bytes: int = 2**31
    reduce_dtype: str | None = None

    def __call__(
        self, experts: Any, x_TH: torch.Tensor, index_Tk: torch.Tensor, weight_Tk: torch.Tensor
    ) -> torch.Tensor:
        """[T, H] tokens, expert indices and routing weights [T, k] -> [T, H], in the dtype of the tokens.

        Raises:
            ValueError: tokens that the devices don't divide, a layout or an experts module that is not supported.
        """
        devices = math.prod(size for _, size in self.axes)
        if len(x_TH) % devices:
            raise ValueError(f"{len(x_TH)} tokens over {devices} devices: dropless experts need a multiple of them")
        names = _parameter_names(experts)
        parameters = [getattr(experts, name) for name in names]
        specs = tuple(self._spec(name, p.dim()) for name, p in zip(names, parameters, strict=True))
        sizes = dict(self.axes)
        local = dropless_rows.Local(
            activation=_activation(experts, parameters[0].shape[1 if not experts.is_transposed else 2]),
            out_first=not experts.is_transposed,
            axes=tuple(sizes),
            expert_axes=self.expert_axes,
            expert_shards=math.prod(sizes[axis] for axis in self.expert_axes),
            specs=specs,
            buffer_bytes=self.buffer_bytes,
            reduce_dtype=self.reduce_dtype,
        )
        call = _Call(local, self._manual(specs) if self.axes else None)
        key = repr(call)
        _calls[key] = call
        return _dropless(x_TH, index_Tk, weight_Tk, parameters, key)

    def _spec(self, name: str, rank: int) -> tuple[Axes, ...]:
        """The axes of each dimension of a parameter, with the expert axes on dimension 0 and nowhere else."""
        spec = self.weight_specs.get(name, (None,) * rank)
        axes = [() if a is None else (a,) if isinstance(a, str) else tuple(a) for a in spec]
        if len(axes) != rank:
            raise ValueError(f"a partition spec of {len(axes)} entries for {name}, which has {rank} dimensions")
        shared = set(axes[0]) & set(self.expert_axes)
        if shared and axes[0] != self.expert_axes:
            raise ValueError(f"{name} has experts split over {axes[0]}: expert_axes must be all of these or none")
        others = [tuple(axis for axis in a if axis not in self.expert_axes) for a in axes]
        return (self.expert_axes + others[0], *others[1:])

    def _manual(self, specs: tuple[tuple[Axes, ...], ...]) -> tuple[Manual, Manual]:
        """Where forward and backward get their inputs and leave their outputs."""
        rest = tuple(axis for axis, _ in self.axes if axis not in self.batch_axes)
        tokens: Spec = (self.batch_axes + rest, None)
        held: Spec = (self.expert_axes or None,)
        weights = tuple(tuple(a or None for a in spec) for spec in specs)
        inputs = (tokens, tokens, tokens, held, *weights)
        return (
            Manual(self.axes, inputs, (tokens,), self.order),
            Manual(self.axes, (tokens, *inputs), (tokens, tokens, *weights), self.order),
        )


def _parameter_names(experts: Any) -> list[str]:
    """First and second projection, then their biases, where the family has them."""
    if experts.has_post_expert_norm:
        raise ValueError(f"dropless experts know no norm after an expert, which {type(experts).__name__} has")
    names = ["gate_up_proj" if experts.has_gate else "up_proj", "down_proj"]
    return names + [f"{name}_bias" for name in names] if experts.has_bias else names


_activations: weakref.WeakKeyDictionary[Any, activation.Activation] = weakref.WeakKeyDictionary()


def _activation(experts: Any, width: int) -> activation.Activation:
    if experts not in _activations:
        _activations[experts] = activation.trace(experts._apply_gate if experts.has_gate else experts.act_fn, width)
    return _activations[experts]


@dataclass(frozen=True)
class _Call:
    local: dropless_rows.Local
    manual: tuple[Manual, Manual] | None


# An op's argument must be plain data: the text of a call stands for it.
_calls: dict[str, _Call] = {}


@torch.library.custom_op("shardwright::dropless", mutates_args=())
def _dropless(
    x_TH: torch.Tensor, index_Tk: torch.Tensor, weight_Tk: torch.Tensor, parameters: Sequence[torch.Tensor], key: str
) -> torch.Tensor:
    return _run(dropless_rows.forward, [x_TH], index_Tk, weight_Tk, parameters, key)[0]


@_dropless.register_fake
def _(x_TH, index_Tk, weight_Tk, parameters, key):
    return x_TH.new_empty(x_TH.shape)


@torch.library.custom_op("shardwright::dropless_backward", mutates_args=())
def _dropless_backward(
    grad_TH: torch.Tensor,
    x_TH: torch.Tensor,
    index_Tk: torch.Tensor,
    weight_Tk: torch.Tensor,
    parameters: Sequence[torch.Tensor],
    key: str,
) -> list[torch.Tensor]:
    """The gradients of the tokens, of the routing weights and of each parameter."""
    return list(_run(dropless_rows.backward, [grad_TH, x_TH], index_Tk, weight_Tk, parameters, key))


@_dropless_backward.register_fake
def _(grad_TH, x_TH, index_Tk, weight_Tk, parameters, key):
    return [t.new_empty(t.shape) for t in (x_TH, weight_Tk, *parameters)]


def _run(
    function: Callable[..., Any],
    rows: list[torch.Tensor],
    index_Tk: torch.Tensor,
    weight_Tk: torch.Tensor,
    parameters: Sequence[torch.Tensor],
    key: str,
) -> tuple[torch.Tensor, ...]:
    call, device = _calls[key], rows[0].device
    if device.type != "xla":
        raise ValueError(f"dropless experts run on XLA devices, and these tokens are on {device}")
    manual = call.manual[function is dropless_rows.backward] if call.manual else None
    # which experts a device holds is data: a position in the mesh may belong to any device
    experts = torch.arange(len(parameters[0]), dtype=torch.int32, device=device)
    return jax_call(function, *rows, index_Tk, weight_Tk, experts, *parameters, manual=manual, local=call.local)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x_TH, index_Tk, weight_Tk, parameters, ctx.key = inputs
    ctx.save_for_backward(x_TH, index_Tk, weight_Tk, *parameters)


def _differentiate(ctx: Any, grad_TH: torch.Tensor) -> tuple[Any, ...]:
    x_TH, index_Tk, weight_Tk, *parameters = ctx.saved_tensors
    grad_x, grad_weight, *gradients = _dropless_backward(grad_TH, x_TH, index_Tk, weight_Tk, parameters, ctx.key)
    return grad_x, None, grad_weight, gradients, None


_dropless.register_autograd(_differentiate, setup_context=_save_inputs)


register_experts("dropless", Dropless())
