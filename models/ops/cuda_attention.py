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
    query, _, value = tensors
    out = (*query.shape[:3], value.shape[3])
    results = [jax.ShapeDtypeStruct(out, query.dtype), jax.ShapeDtypeStruct(out[:3], jnp.float32)]
    more = [] if sinks is None else [sinks.astype(jnp.float32)]
    found = _run("forward", _forward, tensors, more, results, segments, mask, softcap)
    return found[0], found[1]


def attention_backward(
    tensors: Sequence[Array], rows: Sequence[Array], grad_out: Array, segments: Any, mask: Any, softcap: float | None
) -> tuple[Array, Array, Array]:
    """See `shardwright.models.ops.tpu_kernels.attention_backward`."""
    logsumexp, dot = rows
    # a row without any key has none to exponentiate against
    logsumexp = jnp.where(logsumexp > _LOWEST, logsumexp * _LOG2E, 0)
    more = [grad_out.astype(tensors[0].dtype), logsumexp, dot]
    query, key, value = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in tensors)
    (grad_query,) = _run("dq", _backward_query, tensors, more, [query], segments, mask, softcap)
    grad_key, grad_value = _run("dkv", _backward_key, tensors, more, [key, value], segments, mask, softcap)
    return grad_query, grad_key, grad_value


@dataclass(frozen=True)
class _Call:
    """A kernel's parameters besides its arrays."""

    tile: _Tile
    sees: Callable[[Array, Array], Array] | None  # of a query's position and a key's index
    segmented: bool
    softcap: float | None

    @property
    def masked(self) -> bool:
        return self.segmented or self.sees is not None


def _run(
    name: str,
    kernel: Callable[..., None],
    tensors: Sequence[Array],
    more: Sequence[Array],
    results: list[Any],
    segments: Any,
    mask: Any,
    softcap: float | None,
) -> Any:
    """Run ``kernel`` on the ranges of blocks to visit (:func:`_ranges`), the queries' positions, the segments of both,
    query, key, value and ``more``. A program keeps a block of the first of ``results``, of queries or of keys.
    """
    query, key, value = tensors
    width = max(64, _power(query.shape[3]), _power(value.shape[3]))
    tile = _EXACT if query.dtype.itemsize > 2 else _TILES[name, width]
    length = mask.sizes.length
    positions = mask.queries.q_sequence
    positions = jnp.arange(length, dtype=jnp.int32) if positions is None else positions
    none = jnp.zeros((1, length), jnp.int32)
    own, others = (none, none) if segments is None else (segments.q, segments.kv)
    met, whole = _meetings(tile, mask, positions, own, others)
    kept, size = query, tile.queries
    if name == "dkv":
        kept, size, met, whole = key, tile.keys, met.swapaxes(1, 2), whole.swapaxes(1, 2)
    return pl.pallas_call(
        functools.partial(kernel, _Call(tile, mask.function, segments is not None, softcap)),
        results,
        # a GPU starts programs in the order of the first axis
        grid=(kept.shape[2] // size, math.prod(kept.shape[:2])),
        compiler_params=triton.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=INTERPRETED,
        name=f"attention_{name}",
    )(_ranges(met, whole), positions, own, others, *tensors, *more)


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


class _Queries:
    """The block of queries that this program keeps."""

    def __init__(self, call: _Call, places: list[Any], query: Any, key: Any) -> None:
        self.call, self.key = call, key
        self.ranges, positions, own, self.others = places
        H, Q = query.shape[1], call.tile.queries
        self.x = pl.num_programs(0) - 1 - pl.program_id(0)  # those that see the most begin
        self.head = b, h = pl.program_id(1) // H, pl.program_id(1) % H
        self.key_head, self.rows = (b, h // (H // key.shape[1])), pl.ds(self.x * Q, Q)
        self.query = self.block(query)
        self.position, self.segment = positions[self.rows], own[_row_of(own, b), self.rows]

    def block(self, ref: Any) -> Array:
        return _block(ref, self.head, self.x * self.call.tile.queries, self.call.tile.queries)

    def store(self, ref: Any, value: Array) -> None:
        _store(ref, self.head, self.x * self.call.tile.queries, value)

    def keys(self, ref: Any, y: Any) -> Array:
        C = self.call.tile.keys
        return _block(ref, self.key_head, y * C, C)

    def scores(self, keys: Array, y: Any, masked: bool) -> tuple[Array, Array | float]:
        """The scores of block ``y`` of the keys, and the slope of the soft cap."""
        scores, slope = _score(self.call, multiplied(self.query, keys, trans_b=True))
        if masked:
            C = self.call.tile.keys
            index = y * C + jnp.arange(C, dtype=jnp.int32)
            theirs = self.others[_row_of(self.others, self.head[0]), pl.ds(y * C, C)]
            seen = _seen(self.call, self.position[:, None], self.segment[:, None], index[None], theirs[None])
            scores = jnp.where(seen, scores, -jnp.inf)
        return scores, slope

    def visit(self, body: Callable[[Any, bool, Any], Any], carry: Any) -> Any:
        return _visit(self.call, self.ranges, (_row_of(self.ranges, self.head[0]), self.x), body, carry)


def _forward(call: _Call, *refs: Any) -> None:
    *places, query, key, value = refs[:7]
    *sinks, out, logsumexp = refs[7:]
    queries, Q = _Queries(call, places, query, key), call.tile.queries

    def body(y: Any, masked: bool, carry: Any) -> Any:
        acc, top, total = carry
        scores, _ = queries.scores(queries.keys(key, y), y, masked)
        new = jnp.maximum(top, scores.max(1))
        weights, shrink = jnp.exp2(scores - new[:, None]), jnp.exp2(top - new)
        v = queries.keys(value, y)
        acc = acc * shrink[:, None] + multiplied(weights.astype(v.dtype), v)
        return acc, new, total * shrink + weights.sum(1)

    top, total = jnp.full(Q, _LOWEST, jnp.float32), jnp.zeros(Q, jnp.float32)
    if sinks:
        top, total = jnp.zeros(Q, jnp.float32) + sinks[0][queries.head[1]] * _LOG2E, total + 1
    acc = jnp.zeros((Q, _power(value.shape[3])), jnp.float32)
    acc, top, total = queries.visit(body, (acc, top, total))
    queries.store(out, acc / jnp.where(total > 0, total, 1)[:, None])
    logsumexp[(*queries.head, queries.rows)] = (top + jnp.log2(total)) / _LOG2E


def _backward_query(call: _Call, *refs: Any) -> None:
    *places, query, key, value, grad_out, logsumexp, dot, grad_query = refs
    queries = _Queries(call, places, query, key)
    grad = queries.block(grad_out)
    top, mean = (ref[(*queries.head, queries.rows)] for ref in (logsumexp, dot))

    def body(y: Any, masked: bool, acc: Any) -> Any:
        keys = queries.keys(key, y)
        scores, slope = queries.scores(keys, y, masked)
        weights = jnp.exp2(scores - top[:, None])
        grad_weights = multiplied(grad, queries.keys(value, y), trans_b=True)
        grad_scores = weights * (grad_weights - mean[:, None]) * slope
        return acc + multiplied(grad_scores.astype(keys.dtype), keys)

    acc = jnp.zeros((call.tile.queries, _power(query.shape[3])), jnp.float32)
    queries.store(grad_query, queries.visit(body, acc))


def _backward_key(call: _Call, *refs: Any) -> None:
    ranges, positions, own, others, query, key, value, grad_out, logsumexp, dot, grad_key, grad_value = refs
    K, Q, C = key.shape[1], call.tile.queries, call.tile.keys
    y = pl.program_id(0)  # the first keys are seen by most queries
    b, k = pl.program_id(1) // K, pl.program_id(1) % K
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
