"""Causal ring attention: a row's tokens are split over devices, and keys and values pass from each device to the next.

Tokens lie in the order of :mod:`shardwright.models.attention.pieces`, two pieces a device. Of the arriving keys every
device sees two of four pairs of pieces, whole; the pairs that the mask empties are not computed. Keys and values are
sent on while they are used. In the backward their gradients follow them, one device behind (Liu, Zaharia and Abbeel,
"Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023; the balanced order: Brandon et al.,
"Striped Attention", 2023, and the zigzag order in use since). Only the inputs, the output and each row's logsumexp are
saved: memory is linear in a device's tokens.

Shape suffixes: B batch, H query heads, K key and value heads, S sequence (on a device: its two pieces), D head
dimension of query and key, E that of value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from shardwright.models.attention import piece_pairs, pieces
from shardwright.models.attention.piece_pairs import PiecePair, without_chunk
from shardwright.models.attention.splash import KernelSettings, causal_flops, present
from shardwright.models.ops.arguments_as_text import as_text, from_text
from shardwright.models.ops.jax_call import jax_call

# isort: split
import jax
import jax.numpy as jnp


def attend(
    query_BHSD: Tensor,
    key_BKSD: Tensor,
    value_BKSE: Tensor,
    segments_BS: Tensor | None,
    sinks_H: Tensor | None,
    settings: KernelSettings,
) -> Tensor:
    """Return attention ``[B, H, S, E]`` of tokens in pieces' order, differentiable in query, key, value and sinks.

    Segment 0 is padding: rows of zeros, with zero gradients. Twice the layout's `sequence_shards` divides S.
    """
    layout, chunk = settings.layout, settings.scoring.chunk
    B, H, S, _ = query_BHSD.shape
    key_BKSD, value_BKSE = layout.shared_heads(H, key_BKSD, value_BKSE)
    length = S // (2 * layout.sequence_shards)
    starts = pieces.numbers(layout.sequence_shards, query_BHSD.device) * length
    segments = None if segments_BS is None else segments_BS.to(torch.int32)
    if chunk is not None:
        within = torch.arange(length, dtype=torch.int32, device=starts.device)
        chunks = ((starts.unsqueeze(1) + within) // chunk).flatten().expand(B, S)
        segments = chunks if segments is None else segments * (-(-S // chunk)) + chunks
    out_BHSE, _ = _ring(query_BHSD, key_BKSD, value_BKSE, starts, segments, sinks_H, as_text(without_chunk(settings)))
    if segments_BS is None:
        return out_BHSE
    # as in splash.attend: the ring treats padding as a segment, and a comparison can't be used here
    present_BS = segments_BS.abs().clamp(max=1).to(out_BHSE.dtype)
    return out_BHSE * present_BS[:, None, :, None]


@torch.library.custom_op("shardwright::ring", mutates_args=())
def _ring(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    segments: Tensor | None,
    sinks: Tensor | None,
    settings_text: str,
) -> tuple[Tensor, Tensor]:
    """Return ``[B, H, S, E]``, and each row's logsumexp ``[B, H, S]`` for the backward."""
    settings: KernelSettings = from_text(settings_text)
    extra, letters = present(segments, sinks, "bs")
    manual = settings.layout.manual(query.shape[1], f"bhs bhs bhs s {letters}", "bhs bhs")
    tensors = (query, key, value, starts, *extra)
    out, logsumexp = jax_call(_forward, *tensors, manual=manual, extra=letters, settings=settings)
    return out, logsumexp


@_ring.register_fake
def _(query, key, value, starts, segments, sinks, settings_text):
    rows = query.shape[:-1]
    return query.new_empty(*rows, value.shape[-1]), query.new_empty(rows, dtype=torch.float32)


# the signature is a torch.library schema: tensors one by one
@torch.library.custom_op("shardwright::ring_backward", mutates_args=())
def _ring_backward(
    grad_out: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    segments: Tensor | None,
    sinks: Tensor | None,
    settings_text: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, and each device's part of the sinks' gradient, ``[B, H, n]``."""
    settings: KernelSettings = from_text(settings_text)
    extra, letters = present(segments, sinks, "bs")
    manual = settings.layout.manual(query.shape[1], f"bhs bhs bhs bhs bhs bhs s {letters}", "bhs bhs bhs bhs")
    tensors = (grad_out, out, logsumexp, query, key, value, starts, *extra)
    grads = jax_call(_backward, *tensors, manual=manual, extra=letters, settings=settings)
    grad_query, grad_key, grad_value, grad_sinks = grads
    return grad_query, grad_key, grad_value, grad_sinks


@_ring_backward.register_fake
def _(grad_out, out, logsumexp, query, key, value, starts, segments, sinks, settings_text):
    grads = (t.new_empty(t.shape) for t in (query, key, value))
    return *grads, logsumexp.new_empty(*logsumexp.shape[:2], from_text(settings_text).layout.sequence_shards)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.settings_text = inputs
    ctx.save_for_backward(*output, *tensors)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_out: Tensor, grad_logsumexp: None) -> tuple[Tensor | None, ...]:
    sinks = ctx.saved_tensors[-1]
    *grads, grad_sinks = _ring_backward(grad_out, *ctx.saved_tensors, ctx.settings_text)
    return *grads, None, None, None if sinks is None else grad_sinks.sum((0, 2)).to(sinks.dtype), None


_ring.register_autograd(_differentiate, setup_context=_save)


@register_flop_formula(torch.ops.shardwright.ring)
def _flops(query: Sequence[int], key: Sequence[int], value: Sequence[int], *others: Any, **_: Any) -> int:
    return causal_flops(query, value, from_text(others[-1]).scoring)


class _Keys(NamedTuple):
    """The tensors that go round: two pieces of keys, their values, first positions [2] and segments."""

    key: jax.Array
    value: jax.Array
    starts: jax.Array
    segments: jax.Array | None

    def sent_on(self, settings: KernelSettings) -> _Keys:
        segments = None if self.segments is None else _next(self.segments, settings)
        key, value, starts = (_next(x, settings) for x in (self.key, self.value, self.starts))
        return _Keys(key, value, starts, segments)


def _next(x: jax.Array, settings: KernelSettings) -> jax.Array:
    """Receive ``x`` from the previous device of the ring."""
    axis, count = settings.layout.sequence_axis, settings.layout.sequence_shards
    return jax.lax.ppermute(x, axis, [(i, (i + 1) % count) for i in range(count)])


class _Rows(NamedTuple):
    """The tensors that stay: queries ``BHSD``, the pieces' first positions [2], segments ``BS``."""

    query: jax.Array
    starts: jax.Array
    segments: jax.Array | None

    def own(self, keys: _Keys) -> list[tuple[jax.Array | int, jax.Array | int, PiecePair]]:
        """The pairs with the device's own keys, as (piece of queries, piece of keys, pair)."""
        later = self.starts[1] - self.starts[0]
        return [self._pair(keys, 0, 0, None), self._pair(keys, 1, 1, None), self._pair(keys, 1, 0, later)]

    def others(self, keys: _Keys) -> list[tuple[jax.Array | int, jax.Array | int, PiecePair]]:
        """The pairs with another device's keys: the first piece of an earlier device, both pieces of a later one."""
        behind = (keys.starts[0] > self.starts[0]).astype(jnp.int32)
        distance = self.starts[behind] - keys.starts[behind]
        return [self._pair(keys, 1, 0, self.starts[1] - keys.starts[0]), self._pair(keys, behind, behind, distance)]

    def _pair(
        self, keys: _Keys, of_queries: jax.Array | int, of_keys: jax.Array | int, distance: jax.Array | None
    ) -> tuple[jax.Array | int, jax.Array | int, PiecePair]:
        segments = None
        if self.segments is not None and keys.segments is not None:
            segments = _piece(self.segments, of_queries, 1), _piece(keys.segments, of_keys, 1)
        key, value = (_piece(x, of_keys) for x in (keys.key, keys.value))
        return of_queries, of_keys, PiecePair(_piece(self.query, of_queries), key, value, segments, distance)


def _piece(x: jax.Array, which: jax.Array | int, dim: int = 2) -> jax.Array:
    length = x.shape[dim] // 2
    return jax.lax.dynamic_slice_in_dim(x, which * length, length, dim)


def _with(x: jax.Array, which: jax.Array | int, piece: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(x, piece, which * piece.shape[2], 2)


def _forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    starts: jax.Array,
    *optional: jax.Array,
    extra: str,
    settings: KernelSettings,
) -> tuple[jax.Array, jax.Array]:
    named = dict(zip(extra.split(), optional, strict=True))
    segments, sinks = named.get("bs"), named.get("h")
    rows, keys = _Rows(query, starts, segments), _Keys(key, value, starts, segments)
    *same, later = rows.own(keys)
    parts = [piece_pairs.forward(pair, settings) for _, _, pair in same]
    out, logsumexp = (jnp.concatenate(halves, 2) for halves in zip(*parts, strict=True))

    def merged(
        found: tuple[jax.Array, jax.Array], which: jax.Array | int, pair: PiecePair
    ) -> tuple[jax.Array, jax.Array]:
        old_out, old = (_piece(x, which) for x in found)
        new_out, new = piece_pairs.forward(pair, settings)
        total = jnp.logaddexp(old, new)
        joined = old_out * jnp.exp(old - total)[..., None] + new_out * jnp.exp(new - total)[..., None]
        return _with(found[0], which, joined), _with(found[1], which, total)

    found = merged((out, logsumexp), later[0], later[2])

    def turn(carry: tuple[_Keys, tuple[jax.Array, jax.Array]], _: None) -> tuple[Any, None]:
        keys, found = carry
        for which, _of_keys, pair in rows.others(keys):
            found = merged(found, which, pair)
        return (keys.sent_on(settings), found), None

    turns = settings.layout.sequence_shards - 1
    (_, (out, logsumexp)), _ = jax.lax.scan(turn, (keys.sent_on(settings), found), None, length=turns)
    if sinks is not None:
        total = jnp.logaddexp(logsumexp, sinks.astype(jnp.float32)[:, None])
        out, logsumexp = out * jnp.exp(logsumexp - total)[..., None], total
    return out.astype(query.dtype), logsumexp


def _backward(
    grad_out: jax.Array,
    out: jax.Array,
    logsumexp: jax.Array,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    starts: jax.Array,
    *optional: jax.Array,
    extra: str,
    settings: KernelSettings,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    named = dict(zip(extra.split(), optional, strict=True))
    segments, sinks = named.get("bs"), named.get("h")
    rows, keys = _Rows(query, starts, segments), _Keys(key, value, starts, segments)
    dot = jnp.einsum("bhse,bhse->bhs", out.astype(jnp.float32), grad_out.astype(jnp.float32))
    grad_sinks = jnp.zeros(dot.shape[:2], jnp.float32)
    if sinks is not None:
        grad_sinks = -(jnp.exp(sinks[:, None] - logsumexp) * dot).sum(2)
    Grads = tuple[jax.Array, jax.Array, jax.Array]

    def added(grads: Grads, found: Sequence[tuple[jax.Array | int, jax.Array | int, PiecePair]]) -> Grads:
        grad_query, grad_key, grad_value = grads
        for of_queries, of_keys, pair in found:
            own = _piece(logsumexp, of_queries), _piece(dot, of_queries)
            more = piece_pairs.backward(pair, own, _piece(grad_out, of_queries), settings)
            grad_query = _add(grad_query, of_queries, more[0])
            grad_key, grad_value = _add(grad_key, of_keys, more[1]), _add(grad_value, of_keys, more[2])
        return grad_query, grad_key, grad_value

    zeros = [jnp.zeros(x.shape, jnp.float32) for x in (query, key, value)]
    grads = added((zeros[0], zeros[1], zeros[2]), rows.own(keys))

    def turn(carry: tuple[_Keys, Grads], _: None) -> tuple[Any, None]:
        keys, (grad_query, *behind) = carry
        # the gradients of the current keys arrive while this device's part is computed
        arrived = [_next(x, settings) for x in behind]
        grad_query, own_key, own_value = added((grad_query, zeros[1], zeros[2]), rows.others(keys))
        return (keys.sent_on(settings), (grad_query, arrived[0] + own_key, arrived[1] + own_value)), None

    turns = settings.layout.sequence_shards - 1
    (_, (grad_query, *others)), _ = jax.lax.scan(turn, (keys.sent_on(settings), grads), None, length=turns)
    grad_key, grad_value = (_next(x, settings) for x in others)  # back to the keys' own device
    grad_key, grad_value = grad_key.astype(key.dtype), grad_value.astype(value.dtype)
    return grad_query.astype(query.dtype), grad_key, grad_value, grad_sinks[..., None]


def _add(x: jax.Array, which: jax.Array | int, piece: jax.Array) -> jax.Array:
    return _with(x, which, _piece(x, which) + piece)
