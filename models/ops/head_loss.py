"""Cross entropy of a language model's head in chunks of tokens: only one chunk's logits exist at a time.

The logits of 131,072 tokens over 128,256 words are 31 GiB in bfloat16. Each device computes those of a chunk of its own
tokens, and again in the backward, where it accumulates the head's gradient, which is summed over devices once.

Shape suffixes: R rows, S tokens of a row, T tokens of a device, N chunks, C tokens of a chunk, H hidden, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.models.ops.jax_call import Array, Axes, Manual, Spec, jax, jax_call, jnp, lax
from shardwright.models.ops.operation import kernel
from shardwright.models.ops.token_loss import TokenTerms

CHUNK = 1024
PLAIN = TokenTerms()


@dataclass(frozen=True)
class TokenLayout:
    """The layout of tokens [R, S] on the mesh; see also :class:`~shardwright.models.ops.jax_call.Manual`."""

    axes: tuple[tuple[str, int], ...]
    rows: Axes  # they split R
    sequence: str  # it splits S
    order: tuple[int, ...] | None
    ignored: int  # the target that is not scored

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


def head_loss(
    hidden_RSH: Tensor, head_VH: Tensor, targets_RS: Tensor, layout: TokenLayout, terms: TokenTerms = PLAIN
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scored targets' summed loss (with gradients) and top hits, 0-d float32, and logsumexps [R, S]."""
    loss, hits, logsumexp = _loss([hidden_RSH, head_VH, targets_RS], layout, terms)
    return loss, hits, logsumexp.detach()


@kernel(
    "head_loss",
    like=lambda tensors, *_: [tensors[0].new_empty(s, dtype=torch.float32) for s in ((), (), tensors[2].shape)],
    gradients=lambda grads, saved, *settings: [*_loss_backward([grads[0], *saved], *settings), None],
    saved=lambda tensors, results: [results[2], *tensors],
)
def _loss(tensors: Sequence[Tensor], layout: TokenLayout, terms: TokenTerms) -> list[Tensor]:
    """Map hidden, head and targets to the loss, the hits and each token's logsumexp."""
    manual = Manual(layout.axes, (layout.tokens, (), layout.tokens), ((), (), layout.tokens), layout.order)
    return jax_call(_forward, *tensors, manual=manual, layout=layout, terms=terms)


@kernel("head_loss_backward", like=lambda tensors, *_: [t.new_empty(t.shape) for t in tensors[2:4]])
def _loss_backward(tensors: Sequence[Tensor], layout: TokenLayout, terms: TokenTerms) -> list[Tensor]:
    """Map the loss's gradient, logsumexps, hidden, head and targets to the gradients of hidden and head."""
    inputs = ((), layout.tokens, layout.tokens, (), layout.tokens)
    manual = Manual(layout.axes, inputs, (layout.tokens, layout.head(len(tensors[3]))), layout.order)
    return jax_call(_backward, *tensors, manual=manual, layout=layout, terms=terms)


def _forward(
    hidden: Array, head: Array, targets: Array, *, layout: TokenLayout, terms: TokenTerms
) -> tuple[Array, Array, Array]:
    def chunk(x: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        logits_CV, own_CV, scored_C = _scored(x[0], head, x[1], layout)
        logsumexp_C = jax.nn.logsumexp(logits_CV, -1)
        own_C = jnp.where(own_CV, logits_CV, 0).sum(-1)
        hits_C = scored_C & (own_C >= logits_CV.max(-1))
        expected_C = own_C  # the logit that the loss wants high
        if terms.smoothing:
            expected_C = (1 - terms.smoothing) * own_C + terms.smoothing * logits_CV.mean(-1)
        losses_C = logsumexp_C - expected_C
        if terms.z:
            losses_C = losses_C + terms.z * jnp.square(logsumexp_C)
        losses_C = jnp.where(scored_C, losses_C, 0)
        return losses_C.sum(), hits_C.astype(jnp.float32).sum(), logsumexp_C

    losses_N, hits_N, logsumexp_NC = lax.map(chunk, _chunks(layout, hidden, targets))
    logsumexp = logsumexp_NC.reshape(-1)[: targets.size].reshape(targets.shape)
    loss, hits = (lax.psum(x.sum(), layout.split) for x in (losses_N, hits_N))
    return loss, hits, logsumexp


def _backward(
    grad: Array,
    logsumexp: Array,
    hidden: Array,
    head: Array,
    targets: Array,
    *,
    layout: TokenLayout,
    terms: TokenTerms,
) -> tuple[Array, Array]:
    precision = _precision(hidden)

    def chunk(grad_head_VH: Array, x: tuple[Array, ...]) -> tuple[Array, Array]:
        hidden_CH, targets_C, logsumexp_C = x
        logits_CV, own_CV, scored_C = _scored(hidden_CH, head, targets_C, layout)
        softmax_CV, expected_CV = jnp.exp(logits_CV - logsumexp_C[:, None]), own_CV
        if terms.z:
            softmax_CV = softmax_CV * (1 + 2 * terms.z * logsumexp_C)[:, None]
        if terms.smoothing:
            expected_CV = (1 - terms.smoothing) * own_CV + terms.smoothing / len(head)
        off_CV = softmax_CV - expected_CV
        grads_CV = (off_CV * jnp.where(scored_C, grad, 0)[:, None]).astype(hidden.dtype)
        more = lax.dot_general(grads_CV, hidden_CH, (((0,), (0,)), ((), ())), precision, jnp.float32)
        grad_hidden = lax.dot_general(grads_CV, head, (((1,), (0,)), ((), ())), precision, jnp.float32)
        return grad_head_VH + more, grad_hidden.astype(hidden.dtype)

    zeros = jnp.zeros(head.shape, jnp.float32)
    grad_head, grad_hidden_NCH = lax.scan(chunk, zeros, _chunks(layout, hidden, targets, logsumexp))
    if layout.head(len(head))[0] is None:
        grad_head = lax.psum(grad_head, layout.split)
    else:
        for axis in layout.split:
            grad_head = lax.psum_scatter(grad_head, axis, scatter_dimension=0, tiled=True)
    grad_hidden = grad_hidden_NCH.reshape(-1, hidden.shape[-1])[: targets.size].reshape(hidden.shape)
    return grad_hidden, grad_head.astype(head.dtype)


def _scored(hidden_CH: Array, head_VH: Array, targets_C: Array, layout: TokenLayout) -> tuple[Array, Array, Array]:
    """Return a chunk's float32 logits, which of them is the target's, and which tokens are scored."""
    contracted = (((1,), (1,)), ((), ()))
    logits_CV = lax.dot_general(hidden_CH, head_VH, contracted, _precision(hidden_CH), jnp.float32)
    words = lax.broadcasted_iota(jnp.int32, logits_CV.shape, 1)
    return logits_CV, words == targets_C[:, None], targets_C != layout.ignored


def _chunks(layout: TokenLayout, hidden: Array, targets: Array, *more: Array) -> tuple[Array, ...]:
    """Split a device's tokens into equal chunks, the last padded with tokens that are not scored."""
    T = targets.size
    N = -(-T // CHUNK)
    C = -(-T // N)

    def split(x: Array, width: tuple[int, ...], fill: int) -> Array:
        rows = x.reshape(T, *width)
        padded = jnp.pad(rows, [(0, N * C - T), *[(0, 0)] * len(width)], constant_values=fill)
        return padded.reshape(N, C, *width)

    return split(hidden, hidden.shape[-1:], 0), split(targets, (), layout.ignored), *(split(x, (), 0) for x in more)


def _precision(x: Array) -> lax.Precision:
    """Full precision for float32, which a TPU otherwise multiplies as bfloat16."""
    return lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
