"""Flash attention for an NVIDIA GPU, in Pallas for Triton, which XLA's compiler for CUDA has inside.

Dao, "FlashAttention-2", arXiv:2307.08691, with two kernels for the backward instead of sums that depend on the order in
which programs end, as atomic additions would. A program keeps one block, and visits the range of blocks of the other
kind of which it sees anything. Where it sees all of them, no mask is computed.

Shape suffixes: B batch, H query heads, K key heads, S queries, T keys, D head dimension of query and key, E that of
value, Q and C tokens of a block of queries and of keys, X and Y such blocks.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

# configures jax: it must come before jax itself
from shardwright.models.ops.jax_call import Array, jax, jnp, lax

# isort: split
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

INTERPRETED = False  # tests have Pallas interpret the kernels

_LOG2E = math.log2(math.e)
_LOWEST = -1e30  # finite, because infinity less infinity is NaN


@dataclass(frozen=True)
class _Tile:
    """The tokens of a block of queries and of keys, and the warps and pipeline stages that Triton gives a program."""

    queries: int
    keys: int
    warps: int
    stages: int


# kernel, and the wider head dimension up to which → tile of 16-bit numbers: the fastest of those tried on an H100; for
# the last width one that compiles
_TILES = {
    ("forward", 64): _Tile(128, 64, 4, 3),
    ("forward", 128): _Tile(64, 64, 4, 3),
    ("forward", 256): _Tile(64, 64, 8, 2),
    ("dq", 64): _Tile(64, 64, 4, 3),
    ("dq", 128): _Tile(64, 64, 4, 2),
    ("dq", 256): _Tile(64, 32, 8, 1),
    ("dkv", 64): _Tile(64, 64, 4, 3),
    ("dkv", 128): _Tile(64, 64, 4, 2),
    ("dkv", 256): _Tile(32, 64, 8, 1),
}
_EXACT = _Tile(32, 32, 4, 1)  # of float32, whose exact products are made of registers


def attention(
    tensors: Sequence[Array], segments: Any, sinks: Array | None, mask: Any, softcap: float | None
) -> tuple[Array, Array]:
    """See `shardwright.models.ops.tpu_kernels.attention`."""
    query, key, value = tensors
    call = _Call.of("forward", tensors, segments, mask, softcap)
    more = [] if sinks is None else [sinks.astype(jnp.float32)]
    out = [jax.ShapeDtypeStruct((*query.shape[:3], value.shape[3]), query.dtype), _rows_like(query)]
    found = call.run(_forward, query.shape[2] // call.tile.queries, query.shape[:2], out)(
        *call.numbers(segments, mask, "queries"), query, key, value, *more
    )
    return found[0], found[1]


def attention_backward(
    tensors: Sequence[Array], rows: Sequence[Array], grad_out: Array, segments: Any, mask: Any, softcap: float | None
) -> tuple[Array, Array, Array]:
    """See `shardwright.models.ops.tpu_kernels.attention_backward`."""
    query, key, value = tensors
    logsumexp, dot = rows
    # a row without any key has none to exponentiate against
    logsumexp = jnp.where(logsumexp > _LOWEST, logsumexp * _LOG2E, 0)
    given = (query, key, value, grad_out.astype(query.dtype), logsumexp, dot)
    call = _Call.of("dq", tensors, segments, mask, softcap)
    out = [jax.ShapeDtypeStruct(query.shape, query.dtype)]
    (grad_query,) = call.run(_backward_query, query.shape[2] // call.tile.queries, query.shape[:2], out)(
        *call.numbers(segments, mask, "queries"), *given
    )
    call = _Call.of("dkv", tensors, segments, mask, softcap)
    out = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (key, value)]
    grad_key, grad_value = call.run(_backward_key, key.shape[2] // call.tile.keys, key.shape[:2], out)(
        *call.numbers(segments, mask, "keys"), *given
    )
    return grad_query, grad_key, grad_value


def _rows_like(query: Array) -> Any:
    return jax.ShapeDtypeStruct(query.shape[:3], jnp.float32)


@dataclass(frozen=True)
class _Call:
    """A kernel's parameters besides its arrays."""

    name: str
    tile: _Tile
    sees: Callable[[Array, Array], Array] | None  # of a query's position and a key's index
    segmented: bool
    softcap: float | None

    @staticmethod
    def of(name: str, tensors: Sequence[Array], segments: Any, mask: Any, softcap: float | None) -> "_Call":
        query, _, value = tensors
        width = max(64, _power(query.shape[3]), _power(value.shape[3]))
        tile = _EXACT if query.dtype.itemsize > 2 else _TILES[name, width]
        return _Call(name, tile, mask.function, segments is not None, softcap)

    @property
    def masked(self) -> bool:
        return self.segmented or self.sees is not None

    def run(self, kernel: Callable[..., None], blocks: int, heads: tuple[int, ...], out: list[Any]) -> Any:
        return pl.pallas_call(
            functools.partial(kernel, self),
            out,
            # a GPU starts programs in the order of the first axis
            grid=(blocks, math.prod(heads)),
            compiler_params=triton.CompilerParams(num_warps=self.tile.warps, num_stages=self.tile.stages),
            interpret=INTERPRETED,
            name=f"attention_{self.name}",
        )

    def numbers(self, segments: Any, mask: Any, kept: str) -> tuple[Array, ...]:
        """Return the ranges of blocks to visit (:func:`_ranges`), the queries' positions, and both's segments."""
        length = mask.sizes.length
        positions = mask.queries.q_sequence
        positions = jnp.arange(length, dtype=jnp.int32) if positions is None else positions
        none = jnp.zeros((1, length), jnp.int32)
        own, others = (none, none) if segments is None else (segments.q, segments.kv)
        met, whole = _meetings(self.tile, mask, positions, own, others)
        if kept == "keys":
            met, whole = met.swapaxes(1, 2), whole.swapaxes(1, 2)
        return _ranges(met, whole), positions, own, others


def _meetings(tile: _Tile, mask: Any, positions: Array, own: Array, others: Array) -> tuple[Array, Array]:
    """Return for each block of queries and of keys whether any pair of theirs may see each other, and whether all do.

    Both are [B, X, Y] (B is 1 if all rows are alike).
    """
    at_XQ, index_YC = positions.reshape(-1, tile.queries), jnp.arange(mask.sizes.length).reshape(-1, tile.keys)
    own_BXQ, others_BYC = own.reshape(len(own), -1, tile.queries), others.reshape(len(others), -1, tile.keys)

    def both(queries: Array, keys: Array) -> tuple[Array, Array, Array, Array]:
        """The least and the largest of each block of queries, and of keys."""
        first, last = queries.min(-1)[..., None], queries.max(-1)[..., None]
        return first, last, keys.min(-1)[..., None, :], keys.max(-1)[..., None, :]

    def alike(queries: Array, keys: Array) -> tuple[Array, Array]:
        q0, q1, k0, k1 = both(queries, keys)
        return (q0 <= k1) & (k0 <= q1), (q0 == q1) & (k0 == k1) & (q0 == k0)

    met, whole = alike(own_BXQ, others_BYC)
    q0, q1, k0, k1 = both(at_XQ, index_YC)
    if mask.keys_before is not None:
        met, whole = met & (k0 < mask.keys_before), whole & (k1 < mask.keys_before)
    if mask.causal:
        met, whole = met & (q1 >= k0), whole & (q0 >= k1)
    if mask.window is not None:
        met, whole = met & (q0 - k1 < mask.window), whole & (q1 - k0 < mask.window)
    if mask.chunk is not None:
        some, every = alike(at_XQ // mask.chunk, index_YC // mask.chunk)
        met, whole = met & some, whole & every
    return met, whole & met


def _ranges(met: Array, whole: Array) -> Array:
    """Return [B, blocks, 4] int32: the range of blocks to visit, and within it a range of those without a mask."""
    count = met.shape[-1]
    index = jnp.arange(count, dtype=jnp.int32)
    first = jnp.where(met, index, count).min(-1)
    last = jnp.where(met, index + 1, 0).max(-1)
    first = jnp.minimum(first, last)  # nothing is met: an empty range
    from_ = jnp.where(whole, index, count).min(-1)
    until = jnp.where(~whole & (index >= from_[..., None]), index, count).min(-1)
    from_, until = jnp.clip(from_, first, last), jnp.clip(until, first, last)
    return jnp.stack([first, last, from_, jnp.maximum(from_, until)], -1).astype(jnp.int32)


def _power(width: int) -> int:
    """The width that Triton computes with: the next power of two, of at least 16."""
    return max(16, 1 << (width - 1).bit_length())


def _block(ref: Any, index: tuple[Any, ...], start: Any, count: int) -> Array:
    """Load ``count`` rows of ``ref[index]``, [tokens, width], widened by zeros."""
    width, wide = ref.shape[-1], _power(ref.shape[-1])
    at = ref.at[(*index, pl.ds(start, count), pl.ds(0, wide))]
    if wide == width:
        return triton.load(at)
    return triton.load(at, mask=(jnp.arange(wide) < width)[None, :], other=0.0)


def _store(ref: Any, index: tuple[Any, ...], start: Any, value: Array) -> None:
    width, wide = ref.shape[-1], value.shape[-1]
    mask = None if wide == width else (jnp.arange(wide) < width)[None, :]
    triton.store(ref.at[(*index, pl.ds(start, len(value)), pl.ds(0, wide))], value.astype(ref.dtype), mask=mask)


def multiplied(a: Array, b: Array, **how: bool) -> Array:
    """The product in float32; float32 factors are not rounded to TF32."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return pl.dot(a, b, precision=precision, **how)


def _visit(call: _Call, ranges: Any, index: tuple[Any, ...], body: Callable[[Any, bool, Any], Any], carry: Any) -> Any:
    """``carry`` after ``carry = body(block, masked, carry)`` for each block of the program's ranges."""
    first, last, from_, until = (ranges[(*index, n)] for n in range(4))
    carry = lax.fori_loop(from_, until, lambda i, c: body(i, False, c), carry)
    if not call.masked:
        return carry
    before = from_ - first

    def turn(i: Any, carry: Any) -> Any:
        return body(jnp.where(i < before, first + i, until + i - before), True, carry)

    return lax.fori_loop(0, before + last - until, turn, carry)


def _program(ref: Any, heads: int) -> tuple[Any, Any]:
    """The batch row and the head of this program."""
    number = pl.program_id(1)
    return number // heads, number % heads


def _row_of(ref: Any, b: Any) -> Any:
    return b if ref.shape[0] > 1 else 0


def _seen(call: _Call, position: Array, own: Array, index: Array, others: Array) -> Array:
    """The mask of two blocks, whose vectors are shaped to broadcast."""
    seen = own == others if call.segmented else None
    if call.sees is not None:
        by_place = call.sees(position, index)
        seen = by_place if seen is None else seen & by_place
    assert seen is not None
    return seen


def _score(call: _Call, scores: Array) -> tuple[Array, Array | float]:
    """Scores for powers of two, and the slope of the soft cap."""
    if call.softcap is None:
        return scores * _LOG2E, 1.0
    tanh = jnp.tanh(scores / call.softcap)
    return tanh * (call.softcap * _LOG2E), 1 - tanh * tanh


def _forward(
    call: _Call, ranges: Any, positions: Any, own: Any, others: Any, query: Any, key: Any, value: Any, *refs: Any
) -> None:
    *sinks, out, logsumexp = refs
    H, Q, C = query.shape[1], call.tile.queries, call.tile.keys
    x, (b, h) = pl.num_programs(0) - 1 - pl.program_id(0), _program(query, H)  # those that see the most begin
    k = h // (H // key.shape[1])
    q = _block(query, (b, h), x * Q, Q)
    position, segment = positions[pl.ds(x * Q, Q)], own[_row_of(own, b), pl.ds(x * Q, Q)]

    def body(y: Any, masked: bool, carry: Any) -> Any:
        acc, top, total = carry
        scores, _ = _score(call, multiplied(q, _block(key, (b, k), y * C, C), trans_b=True))
        if masked:
            index = y * C + jnp.arange(C, dtype=jnp.int32)
            theirs = others[_row_of(others, b), pl.ds(y * C, C)]
            seen = _seen(call, position[:, None], segment[:, None], index[None], theirs[None])
            scores = jnp.where(seen, scores, -jnp.inf)
        new = jnp.maximum(top, scores.max(1))
        weights, shrink = jnp.exp2(scores - new[:, None]), jnp.exp2(top - new)
        v = _block(value, (b, k), y * C, C)
        acc = acc * shrink[:, None] + multiplied(weights.astype(v.dtype), v)
        return acc, new, total * shrink + weights.sum(1)

    top, total = jnp.full(Q, _LOWEST, jnp.float32), jnp.zeros(Q, jnp.float32)
    if sinks:
        top, total = jnp.zeros(Q, jnp.float32) + sinks[0][h] * _LOG2E, total + 1
    acc = jnp.zeros((Q, _power(value.shape[3])), jnp.float32)
    acc, top, total = _visit(call, ranges, (_row_of(ranges, b), x), body, (acc, top, total))
    _store(out, (b, h), x * Q, acc / jnp.where(total > 0, total, 1)[:, None])
    logsumexp[b, h, pl.ds(x * Q, Q)] = (top + jnp.log2(total)) / _LOG2E


def _backward_query(
    call: _Call,
    ranges: Any,
    positions: Any,
    own: Any,
    others: Any,
    query: Any,
    key: Any,
    value: Any,
    grad_out: Any,
    logsumexp: Any,
    dot: Any,
    grad_query: Any,
) -> None:
    H, Q, C = query.shape[1], call.tile.queries, call.tile.keys
    x, (b, h) = pl.num_programs(0) - 1 - pl.program_id(0), _program(query, H)
    k, rows = h // (H // key.shape[1]), pl.ds(x * Q, Q)
    q, grad = (_block(ref, (b, h), x * Q, Q) for ref in (query, grad_out))
    position, segment = positions[rows], own[_row_of(own, b), rows]
    top, mean = logsumexp[b, h, rows], dot[b, h, rows]

    def body(y: Any, masked: bool, acc: Any) -> Any:
        keys = _block(key, (b, k), y * C, C)
        scores, slope = _score(call, multiplied(q, keys, trans_b=True))
        if masked:
            index = y * C + jnp.arange(C, dtype=jnp.int32)
            theirs = others[_row_of(others, b), pl.ds(y * C, C)]
            seen = _seen(call, position[:, None], segment[:, None], index[None], theirs[None])
            scores = jnp.where(seen, scores, -jnp.inf)
        weights = jnp.exp2(scores - top[:, None])
        grad_weights = multiplied(grad, _block(value, (b, k), y * C, C), trans_b=True)
        grad_scores = weights * (grad_weights - mean[:, None]) * slope
        return acc + multiplied(grad_scores.astype(keys.dtype), keys)

    acc = jnp.zeros((Q, _power(query.shape[3])), jnp.float32)
    _store(grad_query, (b, h), x * Q, _visit(call, ranges, (_row_of(ranges, b), x), body, acc))


def _backward_key(
    call: _Call,
    ranges: Any,
    positions: Any,
    own: Any,
    others: Any,
    query: Any,
    key: Any,
    value: Any,
    grad_out: Any,
    logsumexp: Any,
    dot: Any,
    grad_key: Any,
    grad_value: Any,
) -> None:
    K, Q, C = key.shape[1], call.tile.queries, call.tile.keys
    y, (b, k) = pl.program_id(0), _program(key, K)  # the first keys are seen by most queries
    group, cols = query.shape[1] // K, pl.ds(y * C, C)
    keys, values = (_block(ref, (b, k), y * C, C) for ref in (key, value))
    index, theirs = y * C + jnp.arange(C, dtype=jnp.int32), others[_row_of(others, b), cols]

    def of_head(g: Any, carry: Any) -> Any:
        h = k * group + g

        def body(x: Any, masked: bool, carry: Any) -> Any:
            acc_key, acc_value = carry
            rows = pl.ds(x * Q, Q)
            q, grad = (_block(ref, (b, h), x * Q, Q) for ref in (query, grad_out))
            scores, slope = _score(call, multiplied(keys, q, trans_b=True))  # [C, Q]: no product has a factor to turn
            if masked:
                segment = own[_row_of(own, b), rows]
                seen = _seen(call, positions[rows][None], segment[None], index[:, None], theirs[:, None])
                scores = jnp.where(seen, scores, -jnp.inf)
            weights = jnp.exp2(scores - logsumexp[b, h, rows][None])
            acc_value += multiplied(weights.astype(grad.dtype), grad)
            grad_weights = multiplied(values, grad, trans_b=True)
            grad_scores = weights * (grad_weights - dot[b, h, rows][None]) * slope
            return acc_key + multiplied(grad_scores.astype(q.dtype), q), acc_value

        return _visit(call, ranges, (_row_of(ranges, b), y), body, carry)

    sums = tuple(jnp.zeros((C, _power(ref.shape[3])), jnp.float32) for ref in (key, value))
    acc_key, acc_value = lax.fori_loop(0, group, of_head, sums)
    _store(grad_key, (b, k), y * C, acc_key)
    _store(grad_value, (b, k), y * C, acc_value)
