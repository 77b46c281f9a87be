"""Matrix products of sorted rows, where each group of consecutive rows has a matrix of its own, in JAX.

The sizes of the groups are data, known on the device alone. So a product goes through *visits*: in a visit a tile of
rows meets one group's matrix, and the rows of other groups are masked. Whatever the routing, the work is that of the
groups' rows plus at most one tile a group. On a TPU it is jax's Pallas kernel (megablox, Gale et al.,
arXiv:2211.15841), elsewhere a loop.

Shape suffixes: R rows (a multiple of the tile), K and N widths, G groups.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardwright.models.ops.jax_call import jax, target
from shardwright.models.ops.kernel_cost import Tiles, tile_width, tiles

jnp, lax = jax.numpy, jax.lax

# a jax.Array, when it is traced
Array = Any


def tiles_for(rows: int, groups: int, flops_a_byte: float) -> Tiles:
    """The tiles for so many rows: of few rows if groups are small, because each group with rows in a tile visits it.

    Args:
        flops_a_byte: see `shardwright.models.ops.kernel_cost.tiles`.
    """
    most = tiles(flops_a_byte)
    least, size = (64, 128) if target() == "cpu" else (128, most.rows)
    while size > least and rows < 4 * size * groups:
        size //= 2
    return replace(most, rows=size)


def multiply(x_RK: Array, w_G: Array, sizes_G: Array, tile: Tiles, *, contract_last: bool) -> Array:
    """The rows of each group g times ``w[g]``: [R, N], in the dtype of ``x``.

    Args:
        w_G: [G, N, K] if ``contract_last``, else [G, K, N].
        sizes_G: how many rows each group has, in order, from row 0. The result for rows behind the last group is
            arbitrary and must not be used.
    """
    if target() == "tpu":
        # imported here, because only a graph for a TPU needs it
        from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

        K, N = x_RK.shape[1], w_G.shape[1 if contract_last else 2]
        tiling = (tile.rows, tile_width(K, tile.gmm[0]), tile_width(N, tile.gmm[1]))
        return gmm(x_RK, w_G, sizes_G, x_RK.dtype, tiling, transpose_rhs=contract_last)

    count, visit = _visits(sizes_G, tile.rows)

    def body(i: Array, y_RN: Array) -> Array:
        group, start, mine = visit(i)
        x = lax.dynamic_slice_in_dim(x_RK, start, tile.rows)
        w = lax.dynamic_index_in_dim(w_G, group, keepdims=False)
        new = lax.dot_general(x, w, (((1,), (1 if contract_last else 0,)), ((), ())))
        old = lax.dynamic_slice_in_dim(y_RN, start, tile.rows)
        return lax.dynamic_update_slice_in_dim(y_RN, jnp.where(mine[:, None], new, old), start, 0)

    N = w_G.shape[1 if contract_last else 2]
    return lax.fori_loop(0, count, body, jnp.zeros((x_RK.shape[0], N), x_RK.dtype))


def outer(a_RK: Array, b_RN: Array, sizes_G: Array, tile: Tiles, into_GKN: Array | None) -> Array:
    """``into[g]`` plus the sum, over the rows of each group g, of the outer products of ``a`` and ``b``.

    The result has the dtype of ``into``, or of ``a`` where that is None. Products are summed in float32. Rows behind
    the last group are not read.
    """
    if target() == "tpu":
        from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

        tiling = (tile.rows, tile_width(a_RK.shape[1], tile.tgmm[0]), tile_width(b_RN.shape[1], tile.tgmm[1]))
        dtype = a_RK.dtype if into_GKN is None else into_GKN.dtype
        return tgmm(a_RK.T, b_RN, sizes_G, dtype, tiling, existing_out=into_GKN)

    count, visit = _visits(sizes_G, tile.rows)
    sums_GKN = jnp.zeros((len(sizes_G), a_RK.shape[1], b_RN.shape[1]), jnp.float32) if into_GKN is None else into_GKN

    def body(i: Array, into: Array) -> Array:
        group, start, mine = visit(i)
        a = jnp.where(mine[:, None], lax.dynamic_slice_in_dim(a_RK, start, tile.rows), 0)
        b = jnp.where(mine[:, None], lax.dynamic_slice_in_dim(b_RN, start, tile.rows), 0)
        new = lax.dot_general(a, b, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        return into.at[group].add(new.astype(into.dtype))

    return lax.fori_loop(0, count, body, sums_GKN).astype(a_RK.dtype if into_GKN is None else into_GKN.dtype)


def unwritten(shape: tuple[int, ...], dtype: Any, after: Array) -> Array:
    """An array whose entries are arbitrary, for callers that write every entry they read. A TPU writes no zeros.

    Args:
        after: any small array of the loop that uses the result. It keeps the array inside the loop, where it is not
            copied at each turn.
    """
    if target() != "tpu":
        return jnp.zeros(shape, dtype)
    from jax.experimental import pallas as pl

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    make = pl.pallas_call(
        lambda *refs: None, jax.ShapeDtypeStruct(shape, dtype), in_specs=[anywhere], out_specs=anywhere
    )
    return make(after)


def row_major(x: Array) -> Array:
    """``x``, laid out in memory with its dimensions in order, the last as the minor one."""
    from jax.experimental.layout import Layout, with_layout_constraint

    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def _visits(sizes_G: Array, tile: int) -> tuple[Array, Any]:
    """The number of visits, and a function of a visit: its group, its first row, which rows are the group's."""
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

    return until_G[-1], visit
