"""Cross entropy of a language model's head in chunks of tokens: only one chunk's logits exist at a time.

The logits of 131,072 tokens over 128,256 words are 31 GiB in bfloat16. Each device computes those of a chunk of its own
tokens, and computes them again in the backward. There it accumulates the head's gradient, which is summed over devices
once.

Shape suffixes: R rows, S tokens of a row, T tokens of a device, N chunks, C tokens of a chunk, H hidden, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwright.models.ops.arguments_as_text import as_text, from_text
from shardwright.models.ops.jax_call import Axes, Manual, Spec, jax, jax_call

CHUNK = 1024


@dataclass(frozen=True)
class TokenLayout:
    """The layout of tokens [R, S] on the mesh: ``rows`` and ``sequence`` are the axes that split R and S.

    ``axes`` and ``order`` are as in :class:`~shardwright.models.ops.jax_call.Manual`; ``ignored`` is the target that is
    not scored.
    """

    axes: tuple[tuple[str, int], ...]
    rows: Axes
    sequence: str
    order: tuple[int, ...] | None
    ignored: int

    @property
    def split(self) -> Axes:
        """All axes that split tokens, in mesh order."""
        return tuple(axis for axis, _ in self.axes if axis in (*self.rows, self.sequence))

    @property
    def tokens(self) -> Spec:
        return (self.rows or None, self.sequence)

    def head(self, words: int) -> Spec:
        """The layout of the gradient of a head [V, H]: all axes that split tokens split its words, if they divide."""
        return (self.split if words % math.prod(dict(self.axes)[axis] for axis in self.split) == 0 else None, None)


def head_loss(hidden_RSH: Tensor, head_VH: Tensor, targets_RS: Tensor, layout: TokenLayout) -> tuple[Tensor, Tensor]:
    """Return the summed negative log-probability of the scored targets, and how many of them have the highest logit.

    Both are 0-d float32; the first is differentiable in hidden and head.
    """
    loss, hits, _ = _loss(hidden_RSH, head_VH, targets_RS, as_text(layout))
    return loss, hits


@torch.library.custom_op("shardwright::head_loss", mutates_args=())
def _loss(hidden: Tensor, head: Tensor, targets: Tensor, layout_text: str) -> tuple[Tensor, Tensor, Tensor]:
    layout: TokenLayout = from_text(layout_text)
    manual = Manual(layout.axes, (layout.tokens, (), layout.tokens), ((), (), layout.tokens), layout.order)
    loss, hits, logsumexp = jax_call(_forward, hidden, head, targets, manual=manual, layout=layout)
    return loss, hits, logsumexp


@_loss.register_fake
def _(hidden, head, targets, layout_text):
    return tuple(hidden.new_empty(shape, dtype=torch.float32) for shape in ((), (), targets.shape))


@torch.library.custom_op("shardwright::head_loss_backward", mutates_args=())
def _loss_backward(
    grad: Tensor, logsumexp: Tensor, hidden: Tensor, head: Tensor, targets: Tensor, layout_text: str
) -> tuple[Tensor, Tensor]:
    layout: TokenLayout = from_text(layout_text)
    inputs = ((), layout.tokens, layout.tokens, (), layout.tokens)
    manual = Manual(layout.axes, inputs, (layout.tokens, layout.head(len(head))), layout.order)
    grads = jax_call(_backward, grad, logsumexp, hidden, head, targets, manual=manual, layout=layout)
    return grads[0], grads[1]


@_loss_backward.register_fake
def _(grad, logsumexp, hidden, head, targets, layout_text):
    return hidden.new_empty(hidden.shape), head.new_empty(head.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.layout_text = inputs
    ctx.save_for_backward(output[2], *tensors)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    return *_loss_backward(grad, *ctx.saved_tensors, ctx.layout_text), None, None


_loss.register_autograd(_differentiate, setup_context=_save)


def _forward(
    hidden: jax.Array, head: jax.Array, targets: jax.Array, *, layout: TokenLayout
) -> tuple[jax.Array, jax.Array, jax.Array]:
    def chunk(x: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        logits_CV, own_CV, scored_C = _scored(x[0], head, x[1], layout)
        logsumexp_C = jax.nn.logsumexp(logits_CV, -1)
        own_C = jax.numpy.where(own_CV, logits_CV, 0).sum(-1)
        hits_C = scored_C & (own_C >= logits_CV.max(-1))
        losses_C = jax.numpy.where(scored_C, logsumexp_C - own_C, 0)
        return losses_C.sum(), hits_C.astype(jax.numpy.float32).sum(), logsumexp_C

    losses_N, hits_N, logsumexp_NC = jax.lax.map(chunk, _chunks(layout, hidden, targets))
    logsumexp = logsumexp_NC.reshape(-1)[: targets.size].reshape(targets.shape)
    loss, hits = (jax.lax.psum(x.sum(), layout.split) for x in (losses_N, hits_N))
    return loss, hits, logsumexp


def _backward(
    grad: jax.Array,
    logsumexp: jax.Array,
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    *,
    layout: TokenLayout,
) -> tuple[jax.Array, jax.Array]:
    precision = _precision(hidden)

    def chunk(grad_head_VH: jax.Array, x: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        hidden_CH, targets_C, logsumexp_C = x
        logits_CV, own_CV, scored_C = _scored(hidden_CH, head, targets_C, layout)
        off_CV = jax.numpy.exp(logits_CV - logsumexp_C[:, None]) - own_CV
        grads_CV = (off_CV * jax.numpy.where(scored_C, grad, 0)[:, None]).astype(hidden.dtype)
        more = jax.lax.dot_general(grads_CV, hidden_CH, (((0,), (0,)), ((), ())), precision, jax.numpy.float32)
        grad_hidden = jax.lax.dot_general(grads_CV, head, (((1,), (0,)), ((), ())), precision, jax.numpy.float32)
        return grad_head_VH + more, grad_hidden.astype(hidden.dtype)

    zeros = jax.numpy.zeros(head.shape, jax.numpy.float32)
    grad_head, grad_hidden_NCH = jax.lax.scan(chunk, zeros, _chunks(layout, hidden, targets, logsumexp))
    if layout.head(len(head))[0] is None:
        grad_head = jax.lax.psum(grad_head, layout.split)
    else:
        for axis in layout.split:
            grad_head = jax.lax.psum_scatter(grad_head, axis, scatter_dimension=0, tiled=True)
    grad_hidden = grad_hidden_NCH.reshape(-1, hidden.shape[-1])[: targets.size].reshape(hidden.shape)
    return grad_hidden, grad_head.astype(head.dtype)


def _scored(
    hidden_CH: jax.Array, head_VH: jax.Array, targets_C: jax.Array, layout: TokenLayout
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return a chunk's float32 logits, which of them is the target's, and which tokens are scored."""
    contracted = (((1,), (1,)), ((), ()))
    logits_CV = jax.lax.dot_general(hidden_CH, head_VH, contracted, _precision(hidden_CH), jax.numpy.float32)
    words = jax.lax.broadcasted_iota(jax.numpy.int32, logits_CV.shape, 1)
    return logits_CV, words == targets_C[:, None], targets_C != layout.ignored


def _chunks(layout: TokenLayout, hidden: jax.Array, targets: jax.Array, *more: jax.Array) -> tuple[jax.Array, ...]:
    """Split a device's tokens into equal chunks, the last padded with tokens that are not scored."""
    T = targets.size
    N = -(-T // CHUNK)
    C = -(-T // N)

    def split(x: jax.Array, width: tuple[int, ...], fill: int) -> jax.Array:
        rows = x.reshape(T, *width)
        padded = jax.numpy.pad(rows, [(0, N * C - T), *[(0, 0)] * len(width)], constant_values=fill)
        return padded.reshape(N, C, *width)

    return split(hidden, hidden.shape[-1:], 0), split(targets, (), layout.ignored), *(split(x, (), 0) for x in more)


def _precision(x: jax.Array) -> jax.lax.Precision:
    """Full precision for float32, which a TPU otherwise multiplies as bfloat16."""
    return jax.lax.Precision.HIGHEST if x.dtype == jax.numpy.float32 else jax.lax.Precision.DEFAULT
