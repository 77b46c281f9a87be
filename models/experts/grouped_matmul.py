"""Matrix products of sorted rows, where each group of consecutive rows has a matrix of its own, in JAX.

The sizes of the groups are data, known only on the device. So a product goes through *visits*: in a visit a tile of
rows meets one group's matrix, and the rows of other groups are masked. Whatever the routing, the work is that of the
groups' rows plus at most one tile a group. The products are a device's own (`shardwright.models.ops.device_kernels`).

Shape suffixes: R rows (a multiple of the tile), K and N widths, G groups.
"""

from dataclasses import replace
from typing import NamedTuple

from shardwright.models.ops.device_kernels import kernels

# configures jax: it must come before jax itself
from shardwright.models.ops.jax_call import Array
from shardwright.models.ops.kernel_cost import Tiles, tile_width, tiles

# isort: split
from jax.experimental.layout import Layout, with_layout_constraint


class Part(NamedTuple):
    """A product with the matrices of consecutive groups alone.

    Args:
        first: the number of the first of them.
        into: an earlier result, whose rows of other groups are kept.
    """

    first: Array
    into: Array


def tiles_for(rows: int, groups: int, flops_a_byte: float) -> Tiles:
    """The tiles for so many rows; small groups get tiles of few rows, because a tile visits each group that it has."""
    most = tiles(flops_a_byte)
    size = most.rows
    while size > 128 and rows < 4 * size * groups:
        size //= 2
    return replace(most, rows=size)


def multiply(
    x_RK: Array, w_G: Array, sizes_G: Array, tile: Tiles, part: Part | None = None, *, contract_last: bool
) -> Array:
    """Multiply the rows of each group g by ``w[g]``, [G, N, K] if ``contract_last``, else [G, K, N]: [R, N].

    The result has the dtype of ``x``. ``sizes_G`` are the groups' numbers of rows, in order, from row 0; the result for
    rows behind the last group is arbitrary. With ``part``, ``w`` has the matrices of its groups alone.
    """
    K, N = x_RK.shape[1], w_G.shape[1 if contract_last else 2]
    tiling = (tile.rows, tile_width(K, tile.gmm[0]), tile_width(N, tile.gmm[1]))
    return kernels().grouped_product(x_RK, w_G, sizes_G, tiling, part, contract_last=contract_last)


def outer(a_RK: Array, b_RN: Array, sizes_G: Array, tile: Tiles, into_GKN: Array | None) -> Array:
    """Return ``into[g]`` plus the sum, over the rows of each group g, of the outer products of ``a`` and ``b``.

    Sums are float32, the result has the dtype of ``into``, or else of ``a``. Rows behind the last group are not read.
    """
    tiling = (tile.rows, tile_width(a_RK.shape[1], tile.tgmm[0]), tile_width(b_RN.shape[1], tile.tgmm[1]))
    return kernels().grouped_outer(a_RK, b_RN, sizes_G, tiling, into_GKN)


def row_major(x: Array) -> Array:
    """Lay ``x`` out in memory with its dimensions in order, the last as the minor one."""
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))
