"""Weight gradients summed over micro-batches before they are summed over devices.

A weight's gradient is a sum over tokens, and tokens are split over the batch axes. The partitioner has no tensor that
is "still to be summed over devices", so it communicates wherever that sum stands in the program: in a loop over
micro-batches, at every turn. A *partial gradient* gives the unfinished sum a shape of its own, [D, *parameter shape],
one entry for each of D batch shards, laid out over the batch axes. Adding two of them needs no communication; the one
reduction is the sum over D after the loop.

The price is memory. Each device holds gradients that the batch axes do not split, the sum and one micro-batch's: twice
4 bytes a parameter, divided by the mesh axes other than batch axes that split the parameter.

Operations are found where a parameter enters them, not in the model's code. :func:`functional_call` watches the model
run; where a parameter meets an operation whose gradient is known here (:data:`_HANDLERS`, :func:`expert_linear`), the
parameter's gradient goes to its partial. Under any other operation it goes to the parameter itself, reduced at once:
the sum of the two is the gradient in either case.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from models import scopes
from models.jax_call import Manual, jax, jax_call

Tensors = dict[str, torch.Tensor]

SUFFIX = " by batch shard"

# id of a parameter that is in use -> its partial gradient's leaf
_active: ContextVar[Mapping[int, torch.Tensor]] = ContextVar("partial_gradients", default=MappingProxyType({}))


def functional_call(module: nn.Module, tensors: Tensors, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
    """``torch.func.functional_call`` that sends gradients to partials where it can.

    Args:
        tensors: parameters by name; and under that name with :data:`SUFFIX` a tensor [D, *parameter shape], for each
            parameter that shall have a partial gradient: the gradient of that tensor. Its values are never read.
            An operation whose rows D does not divide is left as it is.
    """
    parameters = {name: t for name, t in tensors.items() if not name.endswith(SUFFIX)}
    partials = {id(p): tensors[name + SUFFIX] for name, p in parameters.items() if name + SUFFIX in tensors}
    if not partials:
        return torch.func.functional_call(module, parameters, args, kwargs)
    token = _active.set(partials)
    try:
        with _Watch():
            return torch.func.functional_call(module, parameters, args, kwargs)
    finally:
        _active.reset(token)


def of(parameters: Tensors) -> dict[str, torch.Tensor]:
    """What the :func:`functional_call` now running was given under the names of ``parameters`` with :data:`SUFFIX`."""
    return {name + SUFFIX: _active.get()[id(p)] for name, p in parameters.items() if id(p) in _active.get()}


@dataclass(frozen=True)
class Sum:
    """How a partial gradient is summed over its batch shards.

    Args:
        name: whose gradient: each has collectives of its own.
        dim: where the batch shards are.
        scatter: (mesh axis, dimension of the sum) for each reduce-scatter, in mesh order.
        add: mesh axes to sum over whose devices all get the sum.
        manual: layouts before and after.
    """

    name: str
    dim: int
    scatter: tuple[tuple[str, int], ...]
    add: tuple[str, ...]
    manual: Manual


def total(partial: torch.Tensor, how: Sum) -> torch.Tensor:
    """The sum of ``partial`` over its batch shards, in collectives that are written out; on XLA devices."""
    key = repr(how)
    _sums[key] = how
    return _total(partial, key, how.dim)


def expert_linear(x_ENH: torch.Tensor, weight: torch.Tensor, transposed: bool) -> torch.Tensor:
    """Each expert's projection of its N rows; ``weight`` is [E, F, H], or [E, H, F] if ``transposed``: [E, N, F]."""
    return _apply(_EXPERT_TRANSPOSED if transposed else _EXPERT, x_ENH, weight)


def expert_bias(y_ENF: torch.Tensor, bias_EF: torch.Tensor) -> torch.Tensor:
    """Each expert's bias added to its N rows."""
    return _apply(_EXPERT_BIAS, y_ENF, bias_EF)


@dataclass(frozen=True)
class _Rule:
    """An operation y = f(x, w) that treats each row of x by itself.

    Args:
        grad_x: (gradient of y, x, w) -> gradient of x.
        grad_w: (gradient of y, x, w), rows split in [D, rows/D] -> gradient of w for each of D, [D, *w.shape].
        rows: the dimension of x and y that holds the rows.
        rank: least rank of x.
    """

    forward: Callable[..., torch.Tensor]
    grad_x: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    grad_w: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    rows: int = 0
    rank: int = 2


def _sum_rows(t: torch.Tensor) -> torch.Tensor:
    """[D, ..., H] -> [D, H]."""
    return t.sum(dim=tuple(range(1, t.dim() - 1)))


def _embedding_grad(g_DtH: torch.Tensor, ids_Dt: torch.Tensor, w_VH: torch.Tensor) -> torch.Tensor:
    return _add_rows(g_DtH.flatten(1, -2), ids_Dt.flatten(1), len(w_VH))


# An op's argument must be plain data: the text of a sum stands for it.
_sums: dict[str, Sum] = {}


@torch.library.custom_op("shardwright::total", mutates_args=())
def _total(partial: torch.Tensor, key: str, dim: int) -> torch.Tensor:
    how = _sums[key]
    static = {"dim": dim, "scatter": how.scatter, "add": how.add, "name": how.name}
    with scopes.scope(how.name.rpartition(".")[0]):
        return jax_call(_sum_shards, partial, manual=how.manual, **static)[0]


@_total.register_fake
def _(partial: torch.Tensor, key: str, dim: int) -> torch.Tensor:
    return partial.new_empty((*partial.shape[:dim], *partial.shape[dim + 1 :]))


def _sum_shards(
    x: jax.Array, *, dim: int, scatter: tuple[tuple[str, int], ...], add: tuple[str, ...], name: str
) -> jax.Array:
    x = x.squeeze(dim)  # the one entry that this device has
    last = x.ndim - 1
    # of a reduce-scatter along its minor dimension libtpu makes an all-reduce: that dimension is not left the minor one
    turned = last > 0 and any(scattered == last for _, scattered in scatter)
    x = x.swapaxes(last - 1, last) if turned else x
    for axis, scattered in scatter:
        where = {last - 1: last, last: last - 1}.get(scattered, scattered) if turned else scattered
        x = jax.lax.psum_scatter(x, axis, scatter_dimension=where, tiled=True)
    x = jax.lax.psum(x, add) if add else x
    return x.swapaxes(last - 1, last) if turned else x


@torch.library.custom_op("shardwright::add_rows", mutates_args=())
def _add_rows(rows_DtH: torch.Tensor, ids_Dt: torch.Tensor, V: int) -> torch.Tensor:
    """Each shard's rows added up by id, in float32: [D, V, H]."""
    if rows_DtH.device.type == "xla":
        # a batched scatter of rows: torch's takes an index as large as the rows, and the partitioner gathers them all
        return jax_call(_scatter_add, rows_DtH, ids_Dt, V=V)[0]
    D, _, H = rows_DtH.shape
    index = ids_Dt.unsqueeze(-1).expand(-1, -1, H)
    return torch.zeros((D, V, H), device=rows_DtH.device).scatter_add(1, index, rows_DtH.to(torch.float32))


@_add_rows.register_fake
def _(rows_DtH: torch.Tensor, ids_Dt: torch.Tensor, V: int) -> torch.Tensor:
    return rows_DtH.new_empty((len(rows_DtH), V, rows_DtH.shape[-1]), dtype=torch.float32)


def _scatter_add(rows_DtH: jax.Array, ids_Dt: jax.Array, V: int) -> jax.Array:
    empty = jax.numpy.zeros((V, rows_DtH.shape[-1]), jax.numpy.float32)
    return jax.vmap(lambda rows_tH, ids_t: empty.at[ids_t].add(rows_tH.astype(empty.dtype)))(rows_DtH, ids_Dt)


def _expert_rule(weight: str) -> _Rule:
    return _Rule(
        lambda x, w: torch.einsum(f"erh,{weight}->erf", x, w),
        lambda g, x, w: torch.einsum(f"erf,{weight}->erh", g, w),
        lambda g, x, w: torch.einsum(f"edrf,edrh->d{weight}", g, x),
        rows=1,
        rank=3,
    )


# Letters: d batch shards, r rows, i and o inputs and outputs, e experts, f expert width, h hidden.
_LINEAR = _Rule(F.linear, lambda g, x, w: g @ w, lambda g, x, w: torch.einsum("d...o,d...i->doi", g, x))
_SCALE = _Rule(torch.mul, lambda g, x, w: g * w, lambda g, x, w: _sum_rows(g * x))
_SHIFT = _Rule(torch.add, lambda g, x, w: g, lambda g, x, w: _sum_rows(g))
_EMBEDDING = _Rule(F.embedding, lambda g, x, w: g, _embedding_grad, rank=1)
_EXPERT, _EXPERT_TRANSPOSED = _expert_rule("efh"), _expert_rule("ehf")
_EXPERT_BIAS = _Rule(
    lambda x, w: x + w.unsqueeze(1), lambda g, x, w: g, lambda g, x, w: g.sum(2).transpose(0, 1), rows=1, rank=3
)


def _apply(rule: _Rule, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    partial = _active.get().get(id(weight))
    if partial is None or x.dim() < rule.rank or x.shape[rule.rows] % len(partial):
        return rule.forward(x, weight)
    return _Apply.apply(rule, x, weight.detach(), partial)


class _Apply(torch.autograd.Function):
    """``rule.forward``, whose backward keeps the weight's gradient apart by batch shard."""

    @staticmethod
    def forward(ctx, rule: _Rule, x: torch.Tensor, w: torch.Tensor, partial: torch.Tensor):  # type: ignore[override]
        ctx.save_for_backward(x, w)
        ctx.rule, ctx.shards, ctx.dtype = rule, len(partial), partial.dtype
        return rule.forward(x, w)

    @staticmethod
    def backward(ctx, g: torch.Tensor):  # type: ignore[override]
        (x, w), rule = ctx.saved_tensors, ctx.rule
        grad_x = rule.grad_x(g, x, w).to(x.dtype) if ctx.needs_input_grad[1] else None
        split_g, split_x = (t.unflatten(rule.rows, (ctx.shards, -1)) for t in (g, x))
        return None, grad_x, None, rule.grad_w(split_g, split_x, w).to(ctx.dtype)


class _Watch(TorchFunctionMode):
    """Runs :data:`_HANDLERS` in place of operations that one of the active parameters enters."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = func in _HANDLERS and any(id(arg) in _active.get() for arg in args)
        return (_HANDLERS[func] if known else func)(*args, **(kwargs or {}))


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    y = _apply(_LINEAR, x, weight)
    return y if bias is None else _apply(_SHIFT, y, bias)


def _embedding(
    ids: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    if max_norm is not None or scale_grad_by_freq or sparse:
        return F.embedding(ids, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    y = _apply(_EMBEDDING, ids, weight)
    return y if padding_idx is None else torch.where((ids == padding_idx).unsqueeze(-1), y.detach(), y)


def _elementwise(rule: _Rule) -> Callable[..., torch.Tensor]:
    def handler(a: Any, b: Any, **options: Any) -> torch.Tensor:
        x, weight = (b, a) if id(a) in _active.get() else (a, b)
        vector = isinstance(x, torch.Tensor) and weight.dim() == 1 and x.shape[-1:] == weight.shape and not options
        return _apply(rule, x, weight) if vector else rule.forward(a, b, **options)

    return handler


_HANDLERS: dict[Callable[..., Any], Callable[..., torch.Tensor]] = {
    F.linear: _linear,
    F.embedding: _embedding,
    **dict.fromkeys((torch.mul, torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__), _elementwise(_SCALE)),
    **dict.fromkeys((torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__), _elementwise(_SHIFT)),
}
