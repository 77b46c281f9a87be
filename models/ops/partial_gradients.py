"""Weight gradients that are summed over micro-batches first, and over devices once, at the end.

A weight's gradient is a sum over tokens, and tokens are split over the batch axes. The partitioner cannot express a
tensor that is still to be summed over devices, so it communicates in every iteration of a loop over micro-batches. A
*partial gradient* is the unfinished sum as a tensor of its own, [D, *parameter shape], with one entry for each of D
batch shards, laid out over the batch axes. Adding two of them needs no communication; the one reduction is the sum over
D after the loop. The price is memory: each device holds two gradients that the batch axes do not split, the running sum
and a micro-batch's, of 4 bytes a parameter, divided by the sizes of the other mesh axes that split the parameter.

The model's code is not changed: :func:`functional_call` intercepts its operations. Where a parameter enters one whose
gradient is known here (:data:`_HANDLERS`, :func:`expert_linear`, :func:`expert_bias`), its gradient goes to its partial
gradient; from any other it goes to the parameter, and is summed over devices at once. The two add up to the gradient.
"""

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardwright.models.ops import scopes
from shardwright.models.ops.collectives import exchange_sum
from shardwright.models.ops.during import during
from shardwright.models.ops.jax_call import Array, Manual, jax, jax_call, jnp
from shardwright.models.ops.operation import kernel, operation

# name -> tensor
Tensors = dict[str, Tensor]

# appended to a parameter's name to name its partial gradient's leaf
SUFFIX = " by batch shard"

# id of a parameter in use -> its partial gradient's leaf
_active: ContextVar[Mapping[int, Tensor]] = ContextVar("partial_gradients", default=MappingProxyType({}))


def functional_call(module: nn.Module, tensors: Tensors, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
    """``torch.func.functional_call`` that sends weight gradients to partial gradients where it can.

    ``tensors`` are parameters by name; and for each one with a partial gradient a leaf [D, *parameter shape], under its
    name with :data:`SUFFIX`, whose gradient is the partial gradient and whose values are never read. An operation on a
    number of rows that D does not divide sends its gradient to the parameter.
    """
    parameters = {name: t for name, t in tensors.items() if not name.endswith(SUFFIX)}
    partials = {id(p): tensors[name + SUFFIX] for name, p in parameters.items() if name + SUFFIX in tensors}
    if not partials:
        return torch.func.functional_call(module, parameters, args, kwargs)
    with during(_active, partials), _Watch():
        return torch.func.functional_call(module, parameters, args, kwargs)


def of(parameters: Tensors) -> dict[str, Tensor]:
    """The leaves of ``parameters`` in the running :func:`functional_call`, by name with :data:`SUFFIX`."""
    return {name + SUFFIX: _active.get()[id(p)] for name, p in parameters.items() if id(p) in _active.get()}


@dataclass(frozen=True)
class Sum:
    """The plan of summing a partial gradient over its batch shards."""

    name: str  # the parameter's; each has collectives of its own
    dim: int  # of the batch shards
    scatter: tuple[tuple[str, int], ...]  # (mesh axis, dimension of the sum) for each reduce-scatter, in mesh order
    add: tuple[str, ...]  # mesh axes to all-reduce over
    manual: Manual  # the layouts of the partial gradient and of the sum
    exchanged: bool = False  # whether `shardwright.models.ops.collectives.exchange_sum` replaces a reduce-scatter


def total(partial: Tensor, how: Sum) -> Tensor:
    """Sum ``partial``, on XLA devices, over its batch shards with the collectives of ``how``."""
    return _total([partial], how)


def expert_linear(x_ENH: Tensor, weight: Tensor, transposed: bool) -> Tensor:
    """Project each expert's N rows, to [E, N, F]. ``weight`` is [E, F, H], or [E, H, F] if ``transposed``."""
    return _apply(_EXPERT_TRANSPOSED if transposed else _EXPERT, x_ENH, weight)


def expert_bias(y_ENF: Tensor, bias_EF: Tensor) -> Tensor:
    """Add each expert's bias to its N rows, [E, N, F]."""
    return _apply(_EXPERT_BIAS, y_ENF, bias_EF)


@dataclass(frozen=True)
class _Rule:
    """An operation y = f(x, w) that treats each row of x by itself, and its gradients, from (gradient of y, x, w).

    For the gradient of w rows are split into [D, rows/D]: the result is the partial gradient, [D, *w.shape].
    """

    forward: Callable[..., Tensor]
    grad_x: Callable[[Tensor, Tensor, Tensor], Tensor]
    grad_w: Callable[[Tensor, Tensor, Tensor], Tensor]
    rows: int = 0  # the dimension of x and y that holds the rows
    rank: int = 2  # the least of x


def _sum_rows(t_DxH: Tensor) -> Tensor:
    return t_DxH.sum(dim=tuple(range(1, t_DxH.dim() - 1)))


@kernel("total", like=lambda partials, how: partials[0].new_empty(partials[0].select(how.dim, 0).shape))
def _total(partials: Sequence[Tensor], how: Sum) -> Tensor:
    with scopes.scope(how.name.rpartition(".")[0]):
        return jax_call(_sum_shards, *partials, manual=how.manual, how=how)[0]


def _sum_shards(x: Array, *, how: Sum) -> Array:
    x = x.squeeze(how.dim)  # this device has one entry
    if how.exchanged:
        for axis, scattered in how.scatter:
            x = exchange_sum(x, (axis,), scattered)
        return jax.lax.psum(x, how.add) if how.add else x
    last = x.ndim - 1
    # libtpu turns a reduce-scatter along the minor dimension into an all-reduce, so another dimension is made minor
    turned = last > 0 and any(scattered == last for _, scattered in how.scatter)
    x = x.swapaxes(last - 1, last) if turned else x
    for axis, scattered in how.scatter:
        where = {last - 1: last, last: last - 1}.get(scattered, scattered) if turned else scattered
        x = jax.lax.psum_scatter(x, axis, scatter_dimension=where, tiled=True)
    x = jax.lax.psum(x, how.add) if how.add else x
    return x.swapaxes(last - 1, last) if turned else x


@operation("add_rows", lambda x, _, V: x.new_empty((len(x), V, x.shape[-1]), dtype=torch.float32))
def _add_rows(rows_DtH: Tensor, ids_Dt: Tensor, V: int) -> Tensor:
    """Add up each shard's rows by id, in float32: [D, V, H]."""
    if rows_DtH.device.type == "xla":
        # a batched scatter of rows: torch's takes an index as large as the rows, and the partitioner gathers all of it
        return jax_call(_scatter_add, rows_DtH, ids_Dt, V=V)[0]
    D, _, H = rows_DtH.shape
    index = ids_Dt.unsqueeze(-1).expand(-1, -1, H)
    return torch.zeros((D, V, H), device=rows_DtH.device).scatter_add(1, index, rows_DtH.to(torch.float32))


def _scatter_add(rows_DtH: Array, ids_Dt: Array, V: int) -> Array:
    empty = jnp.zeros((V, rows_DtH.shape[-1]), jnp.float32)
    return jax.vmap(lambda rows_tH, ids_t: empty.at[ids_t].add(rows_tH.astype(empty.dtype)))(rows_DtH, ids_Dt)


def _expert_rule(weight: str) -> _Rule:
    """The rule of an expert projection; ``weight`` holds the einsum letters of the weight's dimensions."""
    return _Rule(
        lambda x, w: torch.einsum(f"erh,{weight}->erf", x, w),
        lambda g, x, w: torch.einsum(f"erf,{weight}->erh", g, w),
        lambda g, x, w: torch.einsum(f"edrf,edrh->d{weight}", g, x),
        rows=1,
        rank=3,
    )


# Letters in einsums: d batch shards, r rows, i inputs, o outputs, e experts, f expert width, h hidden width.
_LINEAR = _Rule(F.linear, lambda g, x, w: g @ w, lambda g, x, w: torch.einsum("d...o,d...i->doi", g, x))
_SCALE = _Rule(torch.mul, lambda g, x, w: g * w, lambda g, x, w: _sum_rows(g * x))
_SHIFT = _Rule(torch.add, lambda g, x, w: g, lambda g, x, w: _sum_rows(g))
_EMBEDDING = _Rule(
    F.embedding, lambda g, x, w: g, lambda g, x, w: _add_rows(g.flatten(1, -2), x.flatten(1), len(w)), rank=1
)
_EXPERT, _EXPERT_TRANSPOSED = _expert_rule("efh"), _expert_rule("ehf")
_EXPERT_BIAS = _Rule(
    lambda x, w: x + w.unsqueeze(1), lambda g, x, w: g, lambda g, x, w: g.sum(2).transpose(0, 1), rows=1, rank=3
)


def _apply(rule: _Rule, x: Tensor, weight: Tensor) -> Tensor:
    """Run ``rule.forward(x, weight)``; the weight's gradient goes to its partial gradient, if that exists and fits."""
    partial = _active.get().get(id(weight))
    if partial is None or x.dim() < rule.rank or x.shape[rule.rows] % len(partial):
        return rule.forward(x, weight)
    return _Apply.apply(rule, x, weight.detach(), partial)


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rule: _Rule, x: Tensor, w: Tensor, partial: Tensor):  # type: ignore[override]
        ctx.save_for_backward(x, w)
        ctx.rule, ctx.shards, ctx.dtype = rule, len(partial), partial.dtype
        return rule.forward(x, w)

    @staticmethod
    def backward(ctx, g: Tensor):  # type: ignore[override]
        (x, w), rule = ctx.saved_tensors, ctx.rule
        grad_x = rule.grad_x(g, x, w).to(x.dtype) if ctx.needs_input_grad[1] else None
        split_g, split_x = (t.unflatten(rule.rows, (ctx.shards, -1)) for t in (g, x))
        return None, grad_x, None, rule.grad_w(split_g, split_x, w).to(ctx.dtype)


class _Watch(TorchFunctionMode):
    """Runs the :data:`_HANDLERS` entry of an operation that an active parameter enters, if there is one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = func in _HANDLERS and any(id(arg) in _active.get() for arg in args)
        return (_HANDLERS[func] if known else func)(*args, **(kwargs or {}))


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = _apply(_LINEAR, x, weight)
    return y if bias is None else _apply(_SHIFT, y, bias)


def _embedding(ids: Tensor, weight: Tensor, padding_idx: int | None = None, **options: Any) -> Tensor:
    # torch passes the options by name, those at their defaults too
    if any(options.get(name) for name in ("max_norm", "scale_grad_by_freq", "sparse")):
        return F.embedding(ids, weight, padding_idx, **options)
    y = _apply(_EMBEDDING, ids, weight)
    return y if padding_idx is None else torch.where((ids == padding_idx).unsqueeze(-1), y.detach(), y)


def _elementwise(rule: _Rule) -> Callable[..., Tensor]:
    def handler(a: Any, b: Any, **options: Any) -> Tensor:
        x, weight = (b, a) if id(a) in _active.get() else (a, b)
        vector = isinstance(x, Tensor) and weight.dim() == 1 and x.shape[-1:] == weight.shape and not options
        return _apply(rule, x, weight) if vector else rule.forward(a, b, **options)

    return handler


_HANDLERS: dict[Callable[..., Any], Callable[..., Tensor]] = {
    F.linear: _linear,
    F.embedding: _embedding,
    **dict.fromkeys((torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__), _elementwise(_SCALE)),
    **dict.fromkeys((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__), _elementwise(_SHIFT)),
}
