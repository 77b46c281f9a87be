"""Grouped products for an NVIDIA GPU, in Pallas for Triton, which XLA's compiler for CUDA has inside.

A program computes one tile of the result. Rows of other groups in its tile of rows are neither read nor written, so
groups may begin anywhere.

Shape suffixes: as in `shardwright.models.experts.grouped_matmul`.
"""

import functools
from typing import Any

# configures jax: it must come before jax itself
from shardwright.models.ops.cuda_attention import multiplied
from shardwright.models.ops.jax_call import Array, jax, jnp, lax

# isort: split
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

INTERPRETED = False  # tests have Pallas interpret the kernels

_WARPS, _STAGES = 8, 3  # with the tile, the fastest of seven on an H100
_LINES, _COLUMNS, _DEPTH = 128, 256, 64  # of a tile of the result, and of the sum that is multiplied at once
_EXACT = (32, 32, 16)  # of float32, whose exact products are made of registers
_NEIGHBOURS = 8  # tiles of rows that meet the same columns together, so that the second level of cache has them


def grouped_product(
    x_RK: Array, w_G: Array, sizes_G: Array, tiling: Any, part: Any = None, *, contract_last: bool
) -> Array:
    """See `shardwright.models.experts.grouped_matmul.multiply`. The tiling is a TPU's, and not used."""
    (R, K), G, N = x_RK.shape, len(sizes_G), w_G.shape[1 if contract_last else 2]
    lines, columns, depth = _tile(x_RK.dtype, R, N, K)
    group, start, end = _visits(sizes_G, lines, R)
    more = []
    if part is not None:
        first, into = part
        more, held = [into], (group >= first) & (group < first + len(w_G))
        group, end = jnp.where(held, group - first, 0), jnp.where(held, end, start)
    kernel = functools.partial(_product, tile=(lines, columns, depth), contract_last=contract_last)
    grid = ((-(-R // lines) + G - 1) * -(-N // columns),)
    made = jax.ShapeDtypeStruct((R, N), x_RK.dtype)
    run = _call("grouped_product", kernel, made, grid, input_output_aliases={5: 0} if more else {})
    return run(group, start, end, x_RK, w_G, *more)


def grouped_outer(a_RK: Array, b_RN: Array, sizes_G: Array, tiling: Any, into_GKN: Array | None) -> Array:
    """See `shardwright.models.experts.grouped_matmul.outer`. The tiling is a TPU's, and not used."""
    G, (R, K), N = len(sizes_G), a_RK.shape, b_RN.shape[1]
    lines, columns, depth = _tile(a_RK.dtype, K, N, R)
    end_G = jnp.cumsum(sizes_G, dtype=jnp.int32)
    more = [] if into_GKN is None else [into_GKN]
    kernel = functools.partial(_outer, tile=(lines, columns, depth))
    grid = (-(-K // lines) * -(-N // columns), G)
    made = jax.ShapeDtypeStruct((G, K, N), a_RK.dtype if into_GKN is None else into_GKN.dtype)
    run = _call("grouped_outer", kernel, made, grid, input_output_aliases={4: 0} if more else {})
    return run(end_G - sizes_G, end_G, a_RK, b_RN, *more)


def _call(name: str, kernel: Any, made: Any, grid: tuple[int, ...], **options: Any) -> Any:
    return pl.pallas_call(
        kernel,
        made,
        grid=grid,
        compiler_params=triton.CompilerParams(num_warps=_WARPS, num_stages=_STAGES),
        interpret=INTERPRETED,
        name=name,
        **options,
    )


def _tile(dtype: Any, lines: int, columns: int, depth: int) -> tuple[int, int, int]:
    most = _EXACT if dtype.itemsize > 2 else (_LINES, _COLUMNS, _DEPTH)
    sizes = zip(most, (lines, columns, depth), strict=True)
    first, second, third = (min(size, max(16, 1 << (found - 1).bit_length())) for size, found in sizes)
    return first, second, third


def _visits(sizes_G: Array, lines: int, R: int) -> tuple[Array, Array, Array]:
    """For each pair of a tile of rows and a group: the group, the tile's first row, and the rows that are the group's.

    Pairs that don't exist have no rows.
    """
    end_G = jnp.cumsum(sizes_G, dtype=jnp.int32)
    start_G = end_G - sizes_G
    first_G = start_G // lines
    tiles_G = jnp.where(sizes_G > 0, (end_G - 1) // lines - first_G + 1, 0)
    until_G = jnp.cumsum(tiles_G)
    i = jnp.arange(-(-R // lines) + len(sizes_G) - 1, dtype=jnp.int32)
    group = jnp.minimum((i[:, None] >= until_G).sum(1, dtype=jnp.int32), len(sizes_G) - 1)
    tile = first_G[group] + i - until_G[group] + tiles_G[group]
    exists = i < until_G[-1]
    start = jnp.maximum(tile * lines, start_G[group])
    end = jnp.where(exists, jnp.minimum((tile + 1) * lines, end_G[group]), start)
    # both bounds of the group's rows; the tile itself begins at the multiple of its lines below the first
    return group, start.astype(jnp.int32), end.astype(jnp.int32)


def _product(group: Any, start: Any, end: Any, x: Any, w: Any, *refs: Any, tile: Any, contract_last: bool) -> None:
    y, (lines, columns, depth) = refs[-1], tile  # before it there may be what it is written into
    K, N = x.shape[1], y.shape[1]
    visits, wide = group.shape[0], -(-N // columns)
    # neighbouring tiles of rows go through all columns before the next ones
    number, block = pl.program_id(0), _NEIGHBOURS * wide
    first = number // block * _NEIGHBOURS
    height = jnp.minimum(visits - first, _NEIGHBOURS)
    visit, column = first + number % block % height, number % block // height
    g, low, high = group[visit], start[visit], end[visit]
    top = low // lines * lines
    rows, cols = top + jnp.arange(lines, dtype=jnp.int32), column * columns + jnp.arange(columns, dtype=jnp.int32)
    mine, within = (rows >= low) & (rows < high), cols < N

    def body(i: Any, acc: Array) -> Array:
        inner = i * depth + jnp.arange(depth, dtype=jnp.int32)
        ragged = None if K % depth == 0 else inner < K
        a = _load(x.at[pl.ds(top, lines), pl.ds(i * depth, depth)], mine[:, None], _at(ragged, 0))
        here, there = pl.ds(i * depth, depth), pl.ds(column * columns, columns)
        sides = None if N % columns == 0 else within
        if contract_last:
            b = _load(w.at[g, there, here], _at(sides, 1), _at(ragged, 0))
            return acc + multiplied(a, b, trans_b=True)
        b = _load(w.at[g, here, there], _at(ragged, 1), _at(sides, 0))
        return acc + multiplied(a, b)

    # no rows, no turns: a `where` of two numbers would reach Triton as a truth value
    turns = jnp.minimum(high - low, 1) * -(-K // depth)
    acc = lax.fori_loop(0, turns, body, jnp.zeros((lines, columns), jnp.float32))
    there = y.at[pl.ds(top, lines), pl.ds(column * columns, columns)]
    triton.store(there, acc.astype(y.dtype), mask=mine[:, None] & within[None])


def _outer(start: Any, end: Any, a: Any, b: Any, *refs: Any, tile: Any) -> None:
    *into, out = refs
    lines, columns, depth = tile
    K, N = out.shape[1:]
    number, g, wide = pl.program_id(0), pl.program_id(1), -(-N // columns)
    line, column = number // wide, number % wide
    low, high = start[g], end[g]
    here, there = pl.ds(line * lines, lines), pl.ds(column * columns, columns)
    above, within = (
        None if whole % size == 0 else at * size + jnp.arange(size, dtype=jnp.int32) < whole
        for whole, size, at in ((K, lines, line), (N, columns, column))
    )

    def body(i: Any, acc: Array, *, ends: bool) -> Array:
        rows = pl.ds(low + i * depth, depth)
        mine = low + i * depth + jnp.arange(depth, dtype=jnp.int32) < high if ends else None
        left = _load(a.at[rows, here], _at(mine, 1), _at(above, 0))
        right = _load(b.at[rows, there], _at(mine, 1), _at(within, 0))
        return acc + multiplied(left, right, trans_a=True)

    whole = (high - low) // depth
    acc = lax.fori_loop(0, whole, functools.partial(body, ends=False), jnp.zeros((lines, columns), jnp.float32))
    acc = lax.fori_loop(whole, (high - low + depth - 1) // depth, functools.partial(body, ends=True), acc)
    place, mask = out.at[g, here, there], _and(_at(above, 1), _at(within, 0))
    if into:
        acc += _load(into[0].at[g, here, there], _at(above, 1), _at(within, 0)).astype(jnp.float32)
    triton.store(place, acc.astype(out.dtype), mask=mask)


def _at(mask: Array | None, dim: int) -> Array | None:
    """``mask`` with a dimension more, number ``dim``."""
    return None if mask is None else jnp.expand_dims(mask, dim)


def _and(*masks: Array | None) -> Array | None:
    given = [mask for mask in masks if mask is not None]
    return functools.reduce(jnp.logical_and, given) if given else None


def _load(ref: Any, *masks: Array | None) -> Array:
    mask = _and(*masks)
    return triton.load(ref) if mask is None else triton.load(ref, mask=mask, other=0.0)
