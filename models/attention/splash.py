"""Causal attention in blocks, jax's "splash attention", as an operation of the torch graph.

Blocks of queries meet blocks of keys, and pairs that the mask empties are skipped. On a TPU scores exist only in VMEM,
so HBM holds nothing of [sequence, sequence]. Query heads of a group share their key head without copies. The device's
own kernel (`shardwright.models.ops.device_kernels`) computes each pair.

Shape suffixes: B batch, H query heads, K key and value heads, S sequence, D head dimension of query and key, E that
of value.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwright.models.attention.kernel_layout import KernelLayout
from shardwright.models.attention.portable import Scoring
from shardwright.models.attention.splash_masks import BlockSizes, Mask, causal
from shardwright.models.ops.device_kernels import kernels

# configures jax: it must come before jax itself
from shardwright.models.ops.jax_call import Array, jax, jax_call, jnp
from shardwright.models.ops.operation import kernel

# isort: split
# semi-private: splash_attention_kernel.py there, jax 0.7.1
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel import SegmentIds

# Tokens of a block of queries and of keys, and keys that are multiplied at once. A block twice as large overflows VMEM
# on v4, v5e, v5p and v6e. In float32 (v5p) and with heads wider than 128 (v4) this block does too, and is halved.
BLOCK = 1024
COMPUTE = 512
# lanes of a TPU's vector registers; every block is a multiple of them
LANES = 128

QueryKeyValue = tuple[Array, Array, Array]


@dataclass(frozen=True)
class KernelSettings:
    """The parameters of a kernel call besides its tensors."""

    scoring: Scoring
    layout: KernelLayout


def attend(
    tensors: Sequence[Tensor], segments_BS: Tensor | None, sinks_H: Tensor | None, settings: KernelSettings
) -> Tensor:
    """Return attention ``[B, H, S, E]`` of query, key and value at any length, differentiable in these and sinks.

    The query is multiplied by the scale in its own dtype. In bfloat16 this rounds once more than scaling the scores
    would, unless the scale is a power of two. Segment 0 is padding: rows of zeros, with zero gradients.
    """
    if segments_BS is not None:
        segments_BS = segments_BS.to(torch.int32)
    return _splash(tensors, {"b": segments_BS, "h": sinks_H}, segments_BS, settings)


def _without_padding(out_BHSE: Tensor, segments_BS: Tensor | None) -> Tensor:
    """Set the output of padding to zeros. Kernels treat it as a segment, so that none of their sums is empty."""
    if segments_BS is None:
        return out_BHSE
    # no comparison: torch_xla's scan cannot differentiate a function with bools
    present_BS = segments_BS.abs().clamp(max=1).to(out_BHSE.dtype)
    return out_BHSE * present_BS[:, None, :, None]


def attention_kernel(
    name: str, forward: Callable[..., Any], backward: Callable[..., Any], word: str
) -> Callable[..., Tensor]:
    """Make attention of two JAX functions on a device's shards, differentiable in query, key, value and sinks.

    Both get query, key and value, more tensors, and the words of these (:meth:`KernelLayout.manual`; ``word`` is that
    of the others). ``forward`` returns ``[B, H, S, E]`` and each row's logsumexp ``[B, H, S]``. ``backward`` gets the
    gradient of the first, and both, before all these; it returns the gradients of query, key and value, and each
    device's part of that of the sinks, ``[B, H, …]``.
    """

    def run(
        function: Any, tensors: Sequence[Tensor], settings: KernelSettings, words: str, count: int, results: int
    ) -> list[Tensor]:
        manual = settings.layout.manual(tensors[0].shape[1], f"{word} " * count + words, f"{word} " * results)
        return jax_call(function, *tensors, manual=manual, settings=settings, words=words)

    def like(tensors: Sequence[Tensor], *_: Any) -> list[Tensor]:
        query, _key, value, *_more = tensors
        rows = query.shape[:-1]
        return [query.new_empty(*rows, value.shape[-1]), query.new_empty(rows, dtype=torch.float32)]

    def gradients_like(tensors: Sequence[Tensor], settings: KernelSettings, words: str) -> list[Tensor]:
        parts = (settings.layout.sequence_shards,) if "s" in word else ()
        # not empty_like: the gradients are dense whatever the inputs' strides
        return [*(t.new_empty(t.shape) for t in tensors[3:6]), tensors[2].new_empty(*tensors[2].shape[:2], *parts)]

    @kernel(f"{name}_backward", gradients_like)
    def backward_kernel(tensors: Sequence[Tensor], settings: KernelSettings, words: str) -> list[Tensor]:
        return run(backward, tensors, settings, words, 6, 4)

    def gradients(
        grads: Sequence[Tensor], saved: Sequence[Tensor], settings: KernelSettings, words: str
    ) -> list[Tensor | None]:
        *found, parts = backward_kernel([grads[0], *saved], settings, words)
        more = dict(zip(words.split(), saved[5:], strict=True))
        total = parts.sum([0, *range(2, parts.dim())]).to(more["h"].dtype) if "h" in more else None
        return [*found, *(total if name == "h" else None for name in more)]

    @kernel(name, like, gradients, saved=lambda tensors, results: [*results, *tensors], flops=_causal_flops)
    def forward_kernel(tensors: Sequence[Tensor], settings: KernelSettings, words: str) -> list[Tensor]:
        return run(forward, tensors, settings, words, 3, 2)

    def attend(
        tensors: Sequence[Tensor], more: Mapping[str, Tensor | None], segments: Tensor | None, settings: KernelSettings
    ) -> Tensor:
        query, *shared = tensors
        given = {word: t for word, t in more.items() if t is not None}
        inputs = [query, *settings.layout.shared_heads(query.shape[1], *shared), *given.values()]
        out, _ = forward_kernel(inputs, settings, " ".join(given))
        return _without_padding(out, segments)

    return attend


def _causal_flops(shapes: Sequence[Sequence[int]], settings: KernelSettings, words: str) -> int:
    """Count the FLOPs of every query with the keys that it may see: half a sequence, or a window."""
    (batch, heads, length, width), _, value, *_ = shapes
    seen = min(length / 2, settings.scoring.window or length, settings.scoring.chunk or length)
    return int(2 * batch * heads * length * seen * (width + value[3]))


def _forward(
    query_BHSD: Array, key: Array, value: Array, *optional: Array, settings: KernelSettings, words: str
) -> tuple[Array, Array]:
    sizes = sizes_of(query_BHSD)
    segments, sinks = _optional(optional, words, sizes)
    return forward((query_BHSD, key, value), segments, sinks, causal(sizes, settings.scoring), settings)


def forward(
    tensors: QueryKeyValue, segments: SegmentIds | None, sinks: Array | None, mask: Mask, settings: KernelSettings
) -> tuple[Array, Array]:
    """Return the output for query, key and value of one length, and each row's logsumexp."""
    # a query that meets no block of keys gets an output of NaN and a logsumexp of -inf
    length, sizes, scoring = tensors[0].shape[2], mask.sizes, settings.scoring
    query, key, value = (_lengthen(x, sizes) for x in (_scaled(tensors[0], scoring.scale), *tensors[1:]))
    with _precision(query):
        out, logsumexp = kernels().attention((query, key, value), segments, sinks, mask, scoring.softcap)
    return out[:, :, :length], logsumexp[:, :, :length]


def _backward(
    grad_out: Array, out: Array, logsumexp: Array, *inputs: Array, settings: KernelSettings, words: str
) -> tuple[Array, Array, Array, Array]:
    query_BHSD, key, value, *optional = inputs
    sizes = sizes_of(query_BHSD)
    segments, sinks = _optional(optional, words, sizes)
    dot_BHS, grad_sinks = row_products(grad_out, out, logsumexp, sinks)
    mask = causal(sizes, settings.scoring)
    grads = backward((query_BHSD, key, value), (logsumexp, dot_BHS), grad_out, segments, mask, settings)
    return *grads, grad_sinks


def row_products(grad_out: Array, out: Array, logsumexp: Array, sinks: Array | None) -> tuple[Array, Array]:
    """Return the dot product of each row's output with the output's gradient, and the sinks' gradient, [B, H]."""
    dot_BHS = jnp.einsum("bhse,bhse->bhs", out.astype(jnp.float32), grad_out.astype(jnp.float32))
    grad_sinks = jnp.zeros(dot_BHS.shape[:2], jnp.float32)
    if sinks is not None:
        grad_sinks = -(jnp.exp(sinks[:, None] - logsumexp) * dot_BHS).sum(2)
    return dot_BHS, grad_sinks


def backward(
    tensors: QueryKeyValue,
    rows: tuple[Array, Array],
    grad_out: Array,
    segments: SegmentIds | None,
    mask: Mask,
    settings: KernelSettings,
) -> QueryKeyValue:
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


def sizes_of(query_BHSD: Array) -> BlockSizes:
    """The sizes with the fewest blocks that hold the sequence, and the least padding for that number."""
    length, width = query_BHSD.shape[2:]
    whole = query_BHSD.dtype.itemsize <= 2 and width <= 128
    count = -(-length // (BLOCK if whole else BLOCK // 2))
    lanes = -(-length // (count * LANES))
    compute = max(n for n in range(1, lanes + 1) if lanes % n == 0 and n * LANES <= COMPUTE)
    return BlockSizes(count * lanes * LANES, lanes * LANES, compute * LANES)


def _scaled(query: Array, scale: float) -> Array:
    return (query.astype(jnp.float32) * scale).astype(query.dtype)


def _lengthen(x: Array, sizes: BlockSizes) -> Array:
    """Append zeros to ``x``, ``[…, S, width]``, along S. Under a causal mask no token sees them."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, sizes.length - x.shape[-2]), (0, 0)])


def _optional(more: Sequence[Array], words: str, sizes: BlockSizes) -> tuple[SegmentIds | None, Array | None]:
    named = dict(zip(words.split(), more, strict=True))
    segments, sinks = named.get("b"), named.get("h")
    ids = None if segments is None else segment_ids(segments, segments, sizes)
    return ids, None if sinks is None else sinks.astype(jnp.float32)


def segment_ids(queries: Array, keys: Array, sizes: BlockSizes) -> SegmentIds:
    return SegmentIds(*(_lengthen(x[..., None], sizes)[..., 0] for x in (queries, keys)))


def _precision(query: Array) -> Any:
    """Full precision for float32 inputs, which a TPU otherwise multiplies as bfloat16."""
    return jax.default_matmul_precision("highest" if query.dtype == jnp.float32 else "default")


_splash = attention_kernel("splash", _forward, _backward, "bh")
