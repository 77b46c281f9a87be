"""The functions of `shardwright.models.ops.tpu_kernels` in plain operations, for every device other than a TPU.

Shape suffixes: B batch, K key heads, G query heads to a key head, S sequence, N blocks of C queries, D head dimension
of query and key, E that of value; of grouped products those of `shardwright.models.experts.grouped_matmul`.
"""

from collections.abc import Sequence
from typing import Any

from shardwright.models.ops.jax_call import Array, jnp, lax

# a tile's rows and two widths
Tiling = tuple[int, int, int]

COMPUTE_DTYPE = "float32"
_MASKED = -1e30  # the score of a hidden key; finite, because infinity less infinity is NaN


def TO_HOST(x: Any) -> Any:
    """The identity: these devices share the host's memory."""
    return x


TO_DEVICE = TO_HOST


def attention(
    tensors: Sequence[Array], segments: Any, sinks: Array | None, mask: Any, softcap: float | None
) -> tuple[Array, Array]:
    """See `shardwright.models.ops.tpu_kernels.attention`. Each query block meets all keys at once."""
    query, key, value = tensors
    K, value = key.shape[1], value.astype(jnp.float32)
    sinks_KG1 = None if sinks is None else sinks.reshape(K, -1, 1)

    def block(x: Any) -> tuple[Array, Array]:
        scores, seen, _ = _scores(x, key, segments, mask, softcap)
        top = scores.max(-1) if sinks_KG1 is None else jnp.maximum(scores.max(-1), sinks_KG1)
        weights = jnp.where(seen, jnp.exp(scores - top[..., None]), 0)
        total = weights.sum(-1) + (0 if sinks_KG1 is None else jnp.exp(sinks_KG1 - top))
        out = jnp.einsum("bkgcs,bkse->bkgce", weights, value)
        return out / jnp.where(total > 0, total, 1)[..., None], (top + jnp.log(total))[..., None]

    out, logsumexp = lax.map(block, _blocks(query, K, segments, mask))
    return _joined(out).astype(query.dtype), _joined(logsumexp)[..., 0]


def attention_backward(
    tensors: Sequence[Array], rows: Sequence[Array], grad_out: Array, segments: Any, mask: Any, softcap: float | None
) -> tuple[Array, Array, Array]:
    """See `shardwright.models.ops.tpu_kernels.attention_backward`."""
    query, key, value = tensors
    K, grads = key.shape[1], tuple(jnp.zeros(x.shape, jnp.float32) for x in (key, value))

    def block(grads: Any, x: Any) -> tuple[Any, Array]:
        queries, logsumexp, dot, grad = x
        scores, seen, slope = _scores(queries, key, segments, mask, softcap)
        weights = jnp.where(seen, jnp.exp(scores - logsumexp), 0)
        grad_value = grads[1] + jnp.einsum("bkgcs,bkgce->bkse", weights, grad)
        grad_scores = weights * (jnp.einsum("bkgce,bkse->bkgcs", grad, value.astype(jnp.float32)) - dot) * slope
        grad_key = grads[0] + jnp.einsum("bkgcs,bkgcd->bksd", grad_scores, queries[0])
        return (grad_key, grad_value), jnp.einsum("bkgcs,bksd->bkgcd", grad_scores, key.astype(jnp.float32))

    split = [_split(x, K, mask) for x in (*(row[..., None] for row in rows), grad_out)]
    (grad_key, grad_value), grad_query = lax.scan(block, grads, (_blocks(query, K, segments, mask), *split))
    return _joined(grad_query).astype(query.dtype), grad_key.astype(key.dtype), grad_value.astype(value.dtype)


def _scores(block: Any, key: Array, segments: Any, mask: Any, softcap: float | None) -> tuple[Array, Array, Any]:
    """Return the scores BKGCS of one of :func:`_blocks`, the mask of visible keys, and the soft cap's slope."""
    query, positions, own = block
    slope: Array | float
    scores, slope = jnp.einsum("bkgcd,bksd->bkgcs", query, key.astype(jnp.float32)), 1.0
    if softcap is not None:
        tanh = jnp.tanh(scores / softcap)
        scores, slope = tanh * softcap, 1 - tanh * tanh
    seen = jnp.ones((1, *scores.shape[-2:]), bool)
    if mask.function is not None:
        seen = mask.function(positions[:, None], jnp.arange(scores.shape[-1], dtype=jnp.int32))[None]
    if segments is not None:
        seen = seen & (own[:, :, None] == segments.kv[:, None])
    seen = seen[:, None, None]
    return jnp.where(seen, scores, _MASKED), seen, slope


def _blocks(query: Array, K: int, segments: Any, mask: Any) -> tuple[Array, Array, Array]:
    """Return the float32 queries, their positions and their segments, by block."""
    B, _, S, _ = query.shape
    positions = jnp.zeros(S, jnp.int32) if mask.function is None else mask.queries.q_sequence
    own = jnp.zeros((B, S), jnp.int32) if segments is None else segments.q
    C = mask.sizes.block
    return _split(query, K, mask), positions.reshape(-1, C), own.reshape(B, -1, C).swapaxes(0, 1)


def _split(x_BHSD: Array, K: int, mask: Any) -> Array:
    B, H, _, D = x_BHSD.shape
    x = x_BHSD.astype(jnp.float32).reshape(B, K, H // K, -1, mask.sizes.block, D)
    return jnp.moveaxis(x, 3, 0)


def _joined(x_NBKGCD: Array) -> Array:
    x = jnp.moveaxis(x_NBKGCD, 0, 3)
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], -1, x.shape[-1])


def grouped_product(
    x_RK: Array, w_G: Array, sizes_G: Array, tiling: Tiling, part: Any = None, *, contract_last: bool
) -> Array:
    """See `shardwright.models.experts.grouped_matmul.multiply`."""
    rows, *_ = tiling
    first, into = part or (0, None)
    until_G, visit = _visits(sizes_G, rows)
    ends = jnp.pad(until_G, (1, 0))

    def body(i: Array, y_RN: Array) -> Array:
        group, start, mine = visit(i)
        x = lax.dynamic_slice_in_dim(x_RK, start, rows)
        w = lax.dynamic_index_in_dim(w_G, group - first, keepdims=False)
        new = lax.dot_general(x, w, (((1,), (1 if contract_last else 0,)), ((), ())))
        old = lax.dynamic_slice_in_dim(y_RN, start, rows)
        return lax.dynamic_update_slice_in_dim(y_RN, jnp.where(mine[:, None], new, old), start, 0)

    N = w_G.shape[1 if contract_last else 2]
    y_RN = jnp.zeros((x_RK.shape[0], N), x_RK.dtype) if into is None else into
    return lax.fori_loop(ends[first], ends[first + len(w_G)], body, y_RN)


def grouped_outer(a_RK: Array, b_RN: Array, sizes_G: Array, tiling: Tiling, into_GKN: Array | None) -> Array:
    """See `shardwright.models.experts.grouped_matmul.outer`."""
    rows, *_ = tiling
    until_G, visit = _visits(sizes_G, rows)
    sums_GKN = jnp.zeros((len(sizes_G), a_RK.shape[1], b_RN.shape[1]), jnp.float32) if into_GKN is None else into_GKN

    def body(i: Array, into: Array) -> Array:
        group, start, mine = visit(i)
        a = jnp.where(mine[:, None], lax.dynamic_slice_in_dim(a_RK, start, rows), 0)
        b = jnp.where(mine[:, None], lax.dynamic_slice_in_dim(b_RN, start, rows), 0)
        new = lax.dot_general(a, b, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        return into.at[group].add(new.astype(into.dtype))

    return lax.fori_loop(0, until_G[-1], body, sums_GKN).astype(a_RK.dtype if into_GKN is None else into_GKN.dtype)


def unwritten(shape: tuple[int, ...], dtype: Any, after: Array) -> Array:
    return jnp.zeros(shape, dtype)


def _visits(sizes_G: Array, tile: int) -> tuple[Array, Any]:
    """Count the pairs of a row tile and a group, until the end of each group's.

    The function maps a pair's index to group, first row and row mask.
    """
    end_G = jnp.cumsum(sizes_G)
    start_G = end_G - sizes_G
    first_G = start_G // tile
    tiles_G = jnp.where(sizes_G > 0, (end_G - 1) // tile - first_G + 1, 0)
    until_G = jnp.cumsum(tiles_G)

    def visit(i: Array) -> tuple[Array, Array, Array]:
        group = jnp.searchsorted(until_G, i, side="right", method="compare_all")
        start = (first_G[group] + i - until_G[group] + tiles_G[group]) * tile
        row = start + jnp.arange(tile)
        return group, start, (row >= start_G[group]) & (row < end_G[group])

    return until_G, visit
