"""Causal attention on TPU: jax's Pallas kernel "splash attention" as two operations of the torch graph.

The kernel walks blocks of queries against blocks of keys and skips the blocks that the mask empties; scores live in
VMEM alone, so HBM holds nothing of [sequence, sequence]. Grouped queries share their key head: no copies.
What is used of the kernel is private to jax 0.7.1, where it is pinned: the public function makes its block lists by
evaluating the mask block by block (25 s for each of three kernels at 131,072 tokens; `_blocks` takes none), and
differentiating it would run the forward a second time. The lists are [blocks, blocks] in scalar memory, so the compiler
refuses sequences of more than some 500 blocks without a window.

Shape suffixes: B batch, H query heads, K key and value heads, S sequence, D head dimension of query and key, E that
of value.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch

# sets jax up: it must come before jax itself
from models.jax_call import Manual, Spec, jax_call

# isort: split
import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

# Tokens of a block of queries and of keys, and how many keys are multiplied at once. On v4, v5e, v5p and v6e twice
# the block overflows VMEM, and so does this one in float32 (v5p) or with heads wider than 128 (v4): there it is half.
BLOCK = 1024
COMPUTE = 512
# The lanes of a TPU's vector registers: every block is a multiple.
LANES = 128


@dataclass(frozen=True)
class KernelLayout:
    """How query, key and value lie on the mesh while the kernel runs. No axes: one device.

    Args:
        axes: (name, size) of every mesh axis, in mesh order.
        batch_axes: those that split the batch; their sizes divide it.
        head_axes: those that split the heads. Query heads that they do not divide stay whole on every device. Key
            heads that they do not divide are repeated until each device has its own: no more than one is added to
            a device (two devices that share a key head each hold it).
        order: the device ids in mesh order; None: 0, 1, 2, …
    """

    axes: tuple[tuple[str, int], ...] = ()
    batch_axes: tuple[str, ...] = ()
    head_axes: tuple[str, ...] = ()
    order: tuple[int, ...] | None = None

    def split(self, heads: int) -> int:
        """How many shards ``heads`` query heads are cut into."""
        shards = math.prod(dict(self.axes)[axis] for axis in self.head_axes)
        return shards if heads % shards == 0 else 1

    def manual(self, heads: int, inputs: str, outputs: str) -> Manual | None:
        """``inputs`` and ``outputs`` name the split dimensions of each tensor: ``"bh b h"`` is [batch, heads, …],
        [batch, …] and [heads, …]."""
        if not self.axes:
            return None
        split = {"b": self.batch_axes or None, "h": (self.head_axes if self.split(heads) > 1 else None) or None}

        def specs(letters: str) -> tuple[Spec, ...]:
            return tuple(tuple(split[letter] for letter in word) for word in letters.split())

        return Manual(self.axes, specs(inputs), specs(outputs), self.order)


class Options(NamedTuple):
    """What the kernel does with scores, the same for every head.

    ``interpret`` is 0 for the TPU's kernel; else the tokens of a block at which Pallas's interpreter runs it.
    """

    scale: float
    softcap: float | None
    window: int | None
    interpret: int = 0


def attend(
    query_BHSD: torch.Tensor,
    key_BKSD: torch.Tensor,
    value_BKSE: torch.Tensor,
    segments_BS: torch.Tensor | None,
    sinks_H: torch.Tensor | None,
    options: Options,
    layout: KernelLayout,
) -> torch.Tensor:
    """``[B, H, S, E]``, differentiable in query, key, value and sinks; of any length.

    The scale is multiplied into the query, in its own dtype: with bfloat16 and a scale that is no power of two that is
    one rounding that scaled scores would not have. Segment 0 is padding: rows of zeros, with zero gradients.
    """
    (heads, keys), shards = (query_BHSD.shape[1], key_BKSD.shape[1]), layout.split(query_BHSD.shape[1])
    assert heads % keys == 0
    copies = shards // math.gcd(keys, shards)
    if copies > 1:
        key_BKSD, value_BKSE = (
            t.unsqueeze(2).expand(-1, -1, copies, -1, -1).reshape(t.shape[0], -1, *t.shape[2:])
            for t in (key_BKSD, value_BKSE)
        )
    if segments_BS is not None:
        segments_BS = segments_BS.to(torch.int32)
    text = json.dumps(asdict(layout))  # an op takes no objects
    out_BHSE, _ = _splash(query_BHSD, key_BKSD, value_BKSE, segments_BS, sinks_H, *options, text)
    if segments_BS is None:
        return out_BHSE
    # To the kernel padding is a segment, so that none of its sums is empty. No comparison: scan knows no bool.
    present_BS = segments_BS.abs().clamp(max=1).to(out_BHSE.dtype)
    return out_BHSE * present_BS[:, None, :, None]


@torch.library.custom_op("shardwright::splash", mutates_args=())
def _splash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: torch.Tensor | None,
    sinks: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    window: int | None,
    interpret: int,
    layout: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``[B, H, S, E]``, and the logarithm of each row's sum of exponents, ``[B, H, S]``, for the backward."""
    extra, letters = _present(segments, sinks)
    manual = _layout(layout).manual(query.shape[1], f"bh bh bh {letters}", "bh bh")
    static = {"options": Options(scale, softcap, window, interpret), "extra": letters}
    out, logsumexp = jax_call(_forward, query, key, value, *extra, manual=manual, **static)
    return out, logsumexp


@_splash.register_fake
def _(query, key, value, segments, sinks, scale, softcap, window, interpret, layout):
    rows = query.shape[:-1]
    return query.new_empty(*rows, value.shape[-1]), query.new_empty(rows, dtype=torch.float32)


@torch.library.custom_op("shardwright::splash_backward", mutates_args=())
def _splash_backward(
    grad_out: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: torch.Tensor | None,
    sinks: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    window: int | None,
    interpret: int,
    layout: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of query, key and value, and of each sequence's share of the sinks, ``[B, H]``."""
    extra, letters = _present(segments, sinks)
    manual = _layout(layout).manual(query.shape[1], f"bh bh bh bh bh bh {letters}", "bh bh bh bh")
    static = {"options": Options(scale, softcap, window, interpret), "extra": letters}
    tensors = (grad_out, out, logsumexp, query, key, value, *extra)
    grad_query, grad_key, grad_value, grad_sinks = jax_call(_backward, *tensors, manual=manual, **static)
    return grad_query, grad_key, grad_value, grad_sinks


@_splash_backward.register_fake
def _(grad_out, out, logsumexp, query, key, value, *_):
    # new_empty, not empty_like: the gradients are dense whatever the inputs' strides
    return *(t.new_empty(t.shape) for t in (query, key, value)), logsumexp.new_empty(logsumexp.shape[:2])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(*output, *inputs[:5])
    ctx.options = inputs[5:]
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_out: torch.Tensor, grad_logsumexp: None) -> tuple[torch.Tensor | None, ...]:
    sinks = ctx.saved_tensors[-1]
    *grads, grad_sinks = _splash_backward(grad_out, *ctx.saved_tensors, *ctx.options)
    return *grads, None, None if sinks is None else grad_sinks.sum(0).to(sinks.dtype), *[None] * len(ctx.options)


_splash.register_autograd(_differentiate, setup_context=_save)


def _present(segments: torch.Tensor | None, sinks: torch.Tensor | None) -> tuple[list[torch.Tensor], str]:
    """The optional tensors that are there, and the dimension that splits each: "b", "h", "b h" or ""."""
    pairs = [(t, letter) for t, letter in ((segments, "b"), (sinks, "h")) if t is not None]
    return [t for t, _ in pairs], " ".join(letter for _, letter in pairs)


@functools.cache
def _layout(text: str) -> KernelLayout:
    fields = json.loads(text)
    axes = tuple((name, size) for name, size in fields["axes"])
    order = None if fields["order"] is None else tuple(fields["order"])
    return KernelLayout(axes, tuple(fields["batch_axes"]), tuple(fields["head_axes"]), order)


def _forward(
    query_BHSD: jax.Array, key: jax.Array, value: jax.Array, *optional: jax.Array, options: Options, extra: str
) -> tuple[jax.Array, jax.Array]:
    length = query_BHSD.shape[2]
    sizes = _sizes(query_BHSD, options)
    segments, sinks = _optional(optional, extra, sizes)
    run = functools.partial(
        kernel._splash_attention_forward,
        _blocks(sizes, options.window, "queries"),
        mask_value=kernel.DEFAULT_MASK_VALUE,
        is_mqa=False,
        block_sizes=kernel.BlockSizes(block_q=sizes.block, block_kv=sizes.block, block_kv_compute=sizes.compute),
        residual_checkpoint_name=None,
        save_residuals=True,
        mask_function=_mask(options.window),
        attn_logits_soft_cap=options.softcap,
        interpret=options.interpret > 0,
    )
    query, key, value = (_lengthen(x, sizes) for x in (_scaled(query_BHSD, options.scale), key, value))
    axes = (0, 0, 0, None if segments is None else 0, None)
    with _precision(query):
        out, (logsumexp,) = jax.vmap(run, in_axes=axes)(query, key, value, segments, sinks)
    return out[:, :, :length], logsumexp[:, :, :length]


def _backward(
    grad_out: jax.Array,
    out: jax.Array,
    logsumexp: jax.Array,
    query_BHSD: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *optional: jax.Array,
    options: Options,
    extra: str,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    length = query_BHSD.shape[2]
    sizes = _sizes(query_BHSD, options)
    segments, sinks = _optional(optional, extra, sizes)
    dot_BHS = jnp.einsum("bhse,bhse->bhs", out.astype(jnp.float32), grad_out.astype(jnp.float32))
    grad_sinks = jnp.zeros(dot_BHS.shape[:2], jnp.float32)
    if sinks is not None:
        grad_sinks = -(jnp.exp(sinks[:, None] - logsumexp) * dot_BHS).sum(2)
    query = _scaled(query_BHSD, options.scale)
    rows = [_lengthen(x[..., None], sizes)[..., 0] for x in (logsumexp, dot_BHS)]
    tensors = [_lengthen(x, sizes) for x in (query, key, value)], rows, _lengthen(grad_out, sizes)
    run = functools.partial(_backward_of_one, options=options, sizes=sizes)
    with _precision(query):
        grad_query, grad_key, grad_value = jax.vmap(run)(*tensors, segments)
    grad_query = (grad_query.astype(jnp.float32) * options.scale).astype(query.dtype)
    return grad_query[:, :, :length], grad_key[:, :, :length], grad_value[:, :, :length], grad_sinks


def _backward_of_one(
    tensors: list[jax.Array],
    rows: list[jax.Array],
    grad_out: jax.Array,
    segments: kernel.SegmentIds | None,
    *,
    options: Options,
    sizes: _Sizes,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    logsumexp, dot = rows
    # the sinks are in the logsumexp already
    arguments = (*tensors, segments, None, logsumexp, grad_out, dot)
    common: dict[str, Any] = {
        "bq": sizes.block,
        "bkv": sizes.block,
        "is_mqa": False,
        "mask_value": kernel.DEFAULT_MASK_VALUE,
        "attn_logits_soft_cap": options.softcap,
        "mask_function": _mask(options.window),
        "interpret": options.interpret > 0,
        **{f"{name}_layout": kernel.QKVLayout.HEAD_DIM_MINOR for name in "qkv"},
    }
    _, grad_key, grad_value = kernel._splash_attention_bwd_dkv(
        *arguments,
        bkv_compute=sizes.compute,
        # fused with dq it writes a dq for each block of keys: memory quadratic in the sequence
        use_fused_bwd_kernel=False,
        mask_info=_blocks(sizes, options.window, "keys"),
        **common,
    )
    grad_query = kernel._splash_attention_bwd_dq(
        *arguments, mask_info=_blocks(sizes, options.window, "queries"), **common
    )
    return grad_query, grad_key, grad_value


class _Sizes(NamedTuple):
    """Tokens: the padded length, a block of it, and the part of a block that is multiplied at once."""

    length: int
    block: int
    compute: int


def _sizes(query_BHSD: jax.Array, options: Options) -> _Sizes:
    """As few blocks as hold the sequence, each as small as they may be: little padding, and few blocks."""
    length, width = query_BHSD.shape[2:]
    whole = query_BHSD.dtype.itemsize <= 2 and width <= 128
    count = -(-length // (options.interpret or (BLOCK if whole else BLOCK // 2)))
    lanes = -(-length // (count * LANES))
    compute = max(n for n in range(1, lanes + 1) if lanes % n == 0 and n * LANES <= COMPUTE)
    return _Sizes(count * lanes * LANES, lanes * LANES, compute * LANES)


def _blocks(sizes: _Sizes, window: int | None, rows: str) -> MaskInfo:
    """For each block of ``rows`` (queries, or keys), the blocks of the other that it meets, in order.

    The lists are of one width, filled up in front with blocks that are not run but already fetched.
    """
    count = sizes.length // sizes.block
    reach = count - 1 if window is None else min(-(-(window - 1) // sizes.block), count - 1)
    # all of it is arithmetic of the graph: a numpy array would be a constant of its text
    own = jnp.arange(count, dtype=jnp.int32)[:, None]
    first, last = (own - reach, own) if rows == "queries" else (own, own + reach)
    first, last = jnp.maximum(first, 0), jnp.minimum(last, count - 1)
    met = last - jnp.arange(reach, -1, -1, dtype=jnp.int32)
    fetched = jnp.maximum(met, first).astype(jnp.int8 if count <= 128 else jnp.int16)
    run = (met >= first).astype(jnp.int8)
    if rows == "keys":
        fetched, run = fetched.T, run.T
    positions: Any = jnp.arange(sizes.length, dtype=jnp.int32)
    return MaskInfo(fetched[None], None, run[None], None, positions)


def _mask(window: int | None) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Whether a query sees a key, from their positions."""

    def sees(query: jax.Array, key: jax.Array) -> jax.Array:
        causal = query >= key
        return causal if window is None else causal & (query - key < window)

    return sees


def _scaled(query: jax.Array, scale: float) -> jax.Array:
    return (query.astype(jnp.float32) * scale).astype(query.dtype)


def _lengthen(x: jax.Array, sizes: _Sizes) -> jax.Array:
    """Zeros after the last position of ``[…, S, width]``: what is causal never sees them."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, sizes.length - x.shape[-2]), (0, 0)])


def _optional(
    optional: tuple[jax.Array, ...], extra: str, sizes: _Sizes
) -> tuple[kernel.SegmentIds | None, jax.Array | None]:
    named = dict(zip(extra.split(), optional, strict=True))
    segments, sinks = named.get("b"), named.get("h")
    if segments is not None:
        segments = _lengthen(segments[..., None], sizes)[..., 0]
    return (
        None if segments is None else kernel.SegmentIds(segments, segments),
        None if sinks is None else sinks.astype(jnp.float32),
    )


def _precision(query: jax.Array) -> Any:
    """Float32 inputs are asked for in full: a TPU multiplies them as bfloat16 otherwise."""
    return jax.default_matmul_precision("highest" if query.dtype == jnp.float32 else "default")
