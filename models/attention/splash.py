"""Causal attention in blocks, jax's "splash attention", as two operations of the torch graph.

Blocks of queries meet blocks of keys, and pairs that the mask empties are skipped. On a TPU scores exist only in VMEM,
so HBM holds nothing of [sequence, sequence]. Query heads of a group share their key head without copies. The device's
own kernel (`shardwright.models.ops.device_kernels`) computes each pair.

Shape suffixes: B batch, H query heads, K key and value heads, S sequence, D head dimension of query and key, E that
of value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from shardwright.models.attention.kernel_layout import KernelLayout
from shardwright.models.attention.portable import Scoring
from shardwright.models.attention.splash_masks import BlockSizes, Mask, causal
from shardwright.models.ops.arguments_as_text import as_text, from_text
from shardwright.models.ops.device_kernels import kernels

# configures jax: it must come before jax itself
from shardwright.models.ops.jax_call import jax_call

# isort: split
import jax
import jax.numpy as jnp

# semi-private: splash_attention_kernel.py there, jax 0.7.1
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel import SegmentIds

# Tokens of a block of queries and of keys, and keys that are multiplied at once. A block twice as large overflows VMEM
# on v4, v5e, v5p and v6e. In float32 (v5p) and with heads wider than 128 (v4) this block does too, and is halved.
BLOCK = 1024
COMPUTE = 512
# lanes of a TPU's vector registers; every block is a multiple of them
LANES = 128


@dataclass(frozen=True)
class KernelSettings:
    """The parameters of a kernel call besides its tensors."""

    scoring: Scoring
    layout: KernelLayout


def attend(
    query_BHSD: Tensor,
    key_BKSD: Tensor,
    value_BKSE: Tensor,
    segments_BS: Tensor | None,
    sinks_H: Tensor | None,
    settings: KernelSettings,
) -> Tensor:
    """Return attention ``[B, H, S, E]`` at any length, differentiable in query, key, value and sinks.

    The query is multiplied by the scale in its own dtype. In bfloat16 this rounds once more than scaling the scores
    would, unless the scale is a power of two. Segment 0 is padding: rows of zeros, with zero gradients.
    """
    key_BKSD, value_BKSE = settings.layout.shared_heads(query_BHSD.shape[1], key_BKSD, value_BKSE)
    if segments_BS is not None:
        segments_BS = segments_BS.to(torch.int32)
    out_BHSE, _ = _splash(query_BHSD, key_BKSD, value_BKSE, segments_BS, sinks_H, as_text(settings))
    if segments_BS is None:
        return out_BHSE
    # the kernel treats padding as a segment, so that none of its sums is empty
    # (no comparison here: torch_xla's scan cannot differentiate a function with bools)
    present_BS = segments_BS.abs().clamp(max=1).to(out_BHSE.dtype)
    return out_BHSE * present_BS[:, None, :, None]


@torch.library.custom_op("shardwright::splash", mutates_args=())
def _splash(
    query: Tensor, key: Tensor, value: Tensor, segments: Tensor | None, sinks: Tensor | None, settings_text: str
) -> tuple[Tensor, Tensor]:
    """Return ``[B, H, S, E]``, and each row's logsumexp ``[B, H, S]`` for the backward."""
    settings: KernelSettings = from_text(settings_text)
    extra, letters = present(segments, sinks)
    manual = settings.layout.manual(query.shape[1], f"bh bh bh {letters}", "bh bh")
    tensors = (query, key, value, *extra)
    out, logsumexp = jax_call(_forward, *tensors, manual=manual, settings=settings, extra=letters)
    return out, logsumexp


@_splash.register_fake
def _(query, key, value, segments, sinks, settings_text):
    rows = query.shape[:-1]
    return query.new_empty(*rows, value.shape[-1]), query.new_empty(rows, dtype=torch.float32)


# the signature is a torch.library schema: tensors one by one
@torch.library.custom_op("shardwright::splash_backward", mutates_args=())
def _splash_backward(
    grad_out: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Tensor | None,
    sinks: Tensor | None,
    settings_text: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, and each sequence's part of the sinks' gradient, ``[B, H]``."""
    settings: KernelSettings = from_text(settings_text)
    extra, letters = present(segments, sinks)
    manual = settings.layout.manual(query.shape[1], f"bh bh bh bh bh bh {letters}", "bh bh bh bh")
    tensors = (grad_out, out, logsumexp, query, key, value, *extra)
    grads = jax_call(_backward, *tensors, manual=manual, settings=settings, extra=letters)
    grad_query, grad_key, grad_value, grad_sinks = grads
    return grad_query, grad_key, grad_value, grad_sinks


@_splash_backward.register_fake
def _(grad_out, out, logsumexp, query, key, value, *_):
    # not empty_like: the gradients are dense whatever the inputs' strides
    return *(t.new_empty(t.shape) for t in (query, key, value)), logsumexp.new_empty(logsumexp.shape[:2])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.settings_text = inputs
    ctx.save_for_backward(*output, *tensors)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_out: Tensor, grad_logsumexp: None) -> tuple[Tensor | None, ...]:
    sinks = ctx.saved_tensors[-1]
    *grads, grad_sinks = _splash_backward(grad_out, *ctx.saved_tensors, ctx.settings_text)
    return *grads, None, None if sinks is None else grad_sinks.sum(0).to(sinks.dtype), None


_splash.register_autograd(_differentiate, setup_context=_save)


@register_flop_formula(torch.ops.shardwright.splash)
def _flops(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], _: Any, __: Any, text: str, **___: Any
) -> int:
    return causal_flops(query, value, from_text(text).scoring)


def causal_flops(query: Sequence[int], value: Sequence[int], scoring: Scoring) -> int:
    """Count the FLOPs of every query with the keys that it may see: half a sequence, or a window."""
    batch, heads, length, width = query
    seen = min(length / 2, scoring.window or length, scoring.chunk or length)
    return int(2 * batch * heads * length * seen * (width + value[3]))


def present(segments: Tensor | None, sinks: Tensor | None, word: str = "b") -> tuple[list[Tensor], str]:
    """Return the tensors that are given, and their words for :meth:`KernelLayout.manual`: ``word``, "h" or both."""
    pairs = [(t, letter) for t, letter in ((segments, word), (sinks, "h")) if t is not None]
    return [t for t, _ in pairs], " ".join(letter for _, letter in pairs)


def _forward(
    query_BHSD: jax.Array, key: jax.Array, value: jax.Array, *optional: jax.Array, settings: KernelSettings, extra: str
) -> tuple[jax.Array, jax.Array]:
    sizes = sizes_of(query_BHSD)
    segments, sinks = _optional(optional, extra, sizes)
    return forward((query_BHSD, key, value), segments, sinks, causal(sizes, settings.scoring), settings)


def forward(
    tensors: tuple[jax.Array, jax.Array, jax.Array],
    segments: SegmentIds | None,
    sinks: jax.Array | None,
    mask: Mask,
    settings: KernelSettings,
) -> tuple[jax.Array, jax.Array]:
    """Return the output for query, key and value of one length, and each row's logsumexp.

    A query that meets no block of keys gets an output of NaN and a logsumexp of -inf.
    """
    length, sizes, scoring = tensors[0].shape[2], mask.sizes, settings.scoring
    query, key, value = (_lengthen(x, sizes) for x in (_scaled(tensors[0], scoring.scale), *tensors[1:]))
    with _precision(query):
        out, logsumexp = kernels().attention((query, key, value), segments, sinks, mask, scoring.softcap)
    return out[:, :, :length], logsumexp[:, :, :length]


def _backward(
    grad_out: jax.Array, out: jax.Array, logsumexp: jax.Array, *inputs: jax.Array, settings: KernelSettings, extra: str
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """``inputs`` are those of :func:`_forward`."""
    query_BHSD, key, value, *optional = inputs
    sizes = sizes_of(query_BHSD)
    segments, sinks = _optional(optional, extra, sizes)
    dot_BHS = jnp.einsum("bhse,bhse->bhs", out.astype(jnp.float32), grad_out.astype(jnp.float32))
    grad_sinks = jnp.zeros(dot_BHS.shape[:2], jnp.float32)
    if sinks is not None:
        grad_sinks = -(jnp.exp(sinks[:, None] - logsumexp) * dot_BHS).sum(2)
    mask = causal(sizes, settings.scoring)
    grads = backward((query_BHSD, key, value), (logsumexp, dot_BHS), grad_out, segments, mask, settings)
    return *grads, grad_sinks


def backward(
    tensors: tuple[jax.Array, jax.Array, jax.Array],
    rows: tuple[jax.Array, jax.Array],
    grad_out: jax.Array,
    segments: SegmentIds | None,
    mask: Mask,
    settings: KernelSettings,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradients of query, key and value.

    ``rows`` are each query's logsumexp over all keys that it sees, these or others, and the dot product of its output
    with the output's gradient.
    """
    length, scoring, sizes = tensors[0].shape[2], settings.scoring, mask.sizes
    query = _scaled(tensors[0], scoring.scale)
    padded = [_lengthen(x[..., None], sizes)[..., 0] for x in rows]
    lengthened = [_lengthen(x, sizes) for x in (query, *tensors[1:])], padded, _lengthen(grad_out, sizes)
    with _precision(query):
        grad_query, grad_key, grad_value = kernels().attention_backward(*lengthened, segments, mask, scoring.softcap)
    grad_query = (grad_query.astype(jnp.float32) * scoring.scale).astype(query.dtype)
    return grad_query[:, :, :length], grad_key[:, :, :length], grad_value[:, :, :length]


def sizes_of(query_BHSD: jax.Array) -> BlockSizes:
    """The sizes with the fewest blocks that hold the sequence, and the least padding for that number."""
    length, width = query_BHSD.shape[2:]
    whole = query_BHSD.dtype.itemsize <= 2 and width <= 128
    count = -(-length // (BLOCK if whole else BLOCK // 2))
    lanes = -(-length // (count * LANES))
    compute = max(n for n in range(1, lanes + 1) if lanes % n == 0 and n * LANES <= COMPUTE)
    return BlockSizes(count * lanes * LANES, lanes * LANES, compute * LANES)


def _scaled(query: jax.Array, scale: float) -> jax.Array:
    return (query.astype(jnp.float32) * scale).astype(query.dtype)


def _lengthen(x: jax.Array, sizes: BlockSizes) -> jax.Array:
    """Append zeros to ``x``, ``[…, S, width]``, along S. Under a causal mask no token sees them."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, sizes.length - x.shape[-2]), (0, 0)])


def _optional(
    optional: Sequence[jax.Array], extra: str, sizes: BlockSizes
) -> tuple[SegmentIds | None, jax.Array | None]:
    named = dict(zip(extra.split(), optional, strict=True))
    segments, sinks = named.get("b"), named.get("h")
    return (
        None if segments is None else segment_ids(segments, segments, sizes),
        None if sinks is None else sinks.astype(jnp.float32),
    )


def segment_ids(queries: jax.Array, keys: jax.Array, sizes: BlockSizes) -> SegmentIds:
    return SegmentIds(*(_lengthen(x[..., None], sizes)[..., 0] for x in (queries, keys)))


def _precision(query: jax.Array) -> Any:
    """Full precision for float32 inputs, which a TPU otherwise multiplies as bfloat16."""
    return jax.default_matmul_precision("highest" if query.dtype == jnp.float32 else "default")
