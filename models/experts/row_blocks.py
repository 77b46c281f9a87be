"""The order in which a device multiplies its rows, and the blocks that it multiplies at once, in JAX.

A row is a (token, choice) pair. Rows are sorted by expert: a block may have rows of several experts, and
`shardwright.models.experts.grouped_matmul` multiplies each by the weights of its own.

Shape suffixes: T tokens (of a device, or of a round), H hidden width, k experts a token, N = T*k (token, choice) pairs,
E experts held by a device, R rows in whole blocks, B rows of a block, F width of a projection's result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shardwright.models.experts import exchange, grouped_matmul
from shardwright.models.experts.unpacking import PackedExperts
from shardwright.models.ops.jax_call import Array, jnp, lax
from shardwright.models.ops.kernel_cost import Tiles


@dataclass(frozen=True)
class BlockPlan:
    """The plan of a device's multiplications."""

    crossing: exchange.ExchangePlan  # how tokens get to the experts
    block: int  # rows that are multiplied at once
    tile: Tiles
    at_once: bool  # whether a single block is multiplied, or at least planned
    room: int = 0  # the rows of a round, in whole blocks, for whose kept values there is room
    rest: BlockPlan | None = None  # for the tokens without room in the planned round

    def of(self, round_: exchange.Round | None) -> BlockPlan:
        """The plan of a planned round, or of the rest (None)."""
        return self.rest if round_ is None and self.rest is not None else self


def in_order(index_Tk: Array, held: Array, planned: BlockPlan, all_held: bool) -> SortedRows:
    """Sort the pairs of ``index_Tk`` into the planned order, those of the experts ``held`` [E] first."""
    (T, k), E = index_Tk.shape, len(held)
    N = T * k
    # choice-major: a TPU would pad k, as the minor dimension, to a whole tile
    expert_N = index_Tk.T.reshape(N) - held[0]
    expert_N = jnp.where((expert_N >= 0) & (expert_N < E), expert_N, E)
    _, choice_S = _sorted(expert_N, E)
    row_N, end_E = _places(expert_N, E)
    choice_R = jnp.pad(choice_S, (0, -N % planned.block))
    if planned.crossing.pairs is not None:  # at most one block matters
        choice_R = choice_R[: planned.block]
    return SortedRows(choice_R % T, choice_R, row_N.reshape(k, T), end_E, planned, all_held)


@dataclass
class SortedRows:
    """Rows sorted by expert, those of the experts held here first: only these matter."""

    token_R: Array  # any token behind the last pair
    choice_R: Array  # the number of each row's pair in the choice-major list of pairs; any behind the last pair
    row_kT: Array  # the inverse: the row of each pair; behind the last that matters, if its expert is not held here
    end_E: Array  # where each expert's rows end; the last entry is the number of rows that matter
    planned: BlockPlan
    all_held: bool  # whether every row matters; then the number of blocks is static

    def fold(self, body: Callable[[Block, Any], Any], carry: Any) -> Any:
        """``carry`` after ``carry = body(block, carry)`` for each block that matters."""
        block = self.planned.block
        if len(self.token_R) == block:
            return body(Block(self, jnp.int32(0)), carry)
        count = len(self.token_R) // block if self.all_held else -(-self.end_E[-1] // block)

        def turn(i: Array, carry: Any) -> Any:
            # if values are kept, from the last: those without room are overwritten
            return body(Block(self, (count - 1 - i if self.planned.room else i) * block), carry)

        return lax.fori_loop(0, count, turn, carry)

    def of_choices(self, value_R: Array) -> Array:
        """The value of each pair, [T, k]; 0 if its expert is not held here."""
        return self._found(value_R, self.row_kT).T

    def combine(self, y_RH: Array, weight_Tk: Array | None = None) -> Array:
        """The sum of each token's rows, [T, H] float32; weighted, if weights are given."""
        total = jnp.zeros((), jnp.float32)
        # choice by choice: on a TPU a reduction over k takes several times longer
        for choice, row_T in enumerate(self.row_kT):
            y_TH = self._found(y_RH, row_T).astype(jnp.float32)
            total += y_TH if weight_Tk is None else y_TH * weight_Tk[:, choice, None]
        return total

    def _found(self, value_R: Array, row: Array) -> Array:
        """``value[row]``, or 0 where the row is behind the last that matters, even behind the last that exists."""
        found = exchange.at(value_R, jnp.minimum(row, len(value_R) - 1))
        has = (row < self.end_E[-1]).reshape(*row.shape, *(1,) * (value_R.ndim - 1))
        return jnp.where(has, found, 0)


class Block:
    """Consecutive sorted rows, ``planned.block`` of them from row ``start``."""

    def __init__(self, rows: SortedRows, start: Array) -> None:
        self.rows, self.start = rows, start
        end_E = jnp.clip(rows.end_E, start, start + rows.planned.block)
        self.sizes_E = jnp.diff(end_E, prepend=jnp.clip(0, start, start + rows.planned.block))
        row_B = start + lax.iota(jnp.int32, rows.planned.block)
        self.matters_B1 = (row_B < rows.end_E[-1])[:, None]
        self.expert_B = (row_B[:, None] >= rows.end_E).sum(1, dtype=jnp.int32)

    def take(self, value_R: Array) -> Array:
        return lax.dynamic_slice_in_dim(value_R, self.start, self.rows.planned.block)

    def put(self, value_R: Array, value_B: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(value_R, value_B.astype(value_R.dtype), self.start, 0)

    def keep(self, kept: Array, value_B: Array, round_: exchange.Round) -> Array:
        """Write this block's values into ``kept``, [rounds * room, …]."""
        return lax.dynamic_update_slice_in_dim(kept, value_B, self._place(round_), 0)

    def kept(self, kept: Array, round_: exchange.Round, make: Callable[..., Array], x_B: Array) -> Array:
        """Return this block's kept values, or ``make(x_B)`` if there was no room for them."""
        room, more = self.rows.planned.room, round_.more
        if len(self.rows.token_R) > room:
            more = (self.start >= room) | (False if more is None else more)
        value_B = lax.dynamic_slice_in_dim(kept, self._place(round_), self.rows.planned.block)
        return exchange.again(more, make, x_B, value_B)

    def _place(self, round_: exchange.Round) -> Array:
        planned = self.rows.planned
        return round_.place * planned.room + jnp.minimum(self.start, planned.room - planned.block)

    def gather(self, x_TH: Array) -> Array:
        return exchange.at(x_TH, self.take(self.rows.token_R))

    def weights(self, weight_N: Array) -> Array:
        return exchange.at(weight_N, self.take(self.rows.choice_R))

    def multiply(self, x_B: Array, w_E: Array | PackedExperts, *, contract_last: bool) -> Array:
        if isinstance(w_E, PackedExperts):
            return w_E.multiply(x_B, self.sizes_E, self.rows.planned.tile, contract_last=contract_last)
        return grouped_matmul.multiply(x_B, w_E, self.sizes_E, self.rows.planned.tile, contract_last=contract_last)

    def bias(self, bias_E: Array) -> Array:
        return jnp.take(bias_E, self.expert_B, axis=0, mode="clip")

    def outer(self, sums_E: Array | None, out_B: Array, in_B: Array, *, contract_last: bool) -> Array:
        """Add these rows' part of a weight's gradient, [E, out, in] if ``contract_last``, to ``sums``."""
        pair = (out_B, in_B) if contract_last else (in_B, out_B)
        # without sums it is in the dtype of the rows, rounded once, as the sums would be afterwards
        return grouped_matmul.outer(*pair, self.sizes_E, self.rows.planned.tile, sums_E)

    def add_rows(self, sums_E: Array | None, grad_B: Array) -> Array:
        """Add these rows' part of a bias's gradient to ``sums``, if there are any."""
        mine_BE = (self.expert_B[:, None] == jnp.arange(len(self.sizes_E))).astype(grad_B.dtype)
        grad_B = jnp.where(self.matters_B1, grad_B, 0)
        added_E = jnp.einsum("be,bf->ef", mine_BE, grad_B, preferred_element_type=jnp.float32)
        return added_E if sums_E is None else sums_E + added_E


def _sorted(expert_N: Array, E: int) -> tuple[Array, Array]:
    """The expert and the number of each pair, sorted by both."""
    N = len(expert_N)
    number_N = lax.iota(jnp.int32, N)
    if jnp.iinfo(jnp.int32).max < (E + 1) * N:
        expert_S, number_S = lax.sort((expert_N, number_N), num_keys=2, is_stable=False)
        return expert_S, number_S
    # libtpu compiles the sort of one array in a tenth of the time of two, or of a stable sort, which gets a second
    both_S = lax.sort(expert_N * N + number_N, is_stable=False)
    return both_S // N, both_S % N


def _places(expert_N: Array, E: int) -> tuple[Array, Array]:
    """The place of each pair among the sorted, N where its expert is not held, and the end of each expert's rows."""
    mine_NE = expert_N[:, None] == jnp.arange(E)  # counted: to compile another sort takes longer
    until_NE = jnp.cumsum(mine_NE, 0, dtype=jnp.int32)
    end_E = jnp.cumsum(until_NE[-1])
    place_N = jnp.where(mine_NE, end_E - until_NE[-1] + until_NE - 1, 0).sum(1, dtype=jnp.int32)
    return jnp.where(expert_N < E, place_N, len(expert_N)), end_E
