"""The exchange of tokens with the devices that hold their experts, and of the experts' outputs back, in JAX.

Tokens cross in rounds, each with a window of a device's tokens. There are two forms, where n devices share the experts:

- *gathered*: every device gets the whole window, and the sum of the devices' outputs is scattered back: for each token
  n-1 rows cross each way;
- *by need*: an all-to-all takes a token only to devices that hold an expert it chose, once to each. With k choices
  spread evenly that are n·(1 - (1 - 1/n)^k) devices. Shapes are static, so a round has a number of slots for each pair
  of devices. A window ends where the next token would find no slot. So it is exact for any routing: if all tokens want
  one device, windows are shorter and rounds are more.

With several rounds, the next round's tokens come in, and the last round's results go back, while one round is computed.
A single planned round (`shardwright.models.experts.dropless_rows.ExpertShards.plan`) stands before the loop, and tokens
without a slot cross in smaller rounds.

Shape suffixes: T tokens of this device, W tokens of a window, k experts a token, n devices that share the experts,
C slots for each of them, M = n*C.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shardwright.models.ops.jax_call import Array, Axes, jnp, lax

Arrays = tuple[Array, ...]
# the start and the end of a window of a device's tokens
Window = tuple[Array, Array]

# The number of rounds, if tokens are enough: the first exchange and the last overlap with no products, and each goes
# with one that carries nothing.
_ROUNDS = 8
# The least number of an expert's rows in a round. A round reads and writes every expert's sums of gradients, 8 bytes of
# HBM for each 2 FLOPs a row: with fewer rows that takes longer than the products.
_ROWS = 512
# But there are two rounds if each expert gets a tile of rows: with one, less is computed beside an exchange.
_FEWEST = 128
# Standard deviations of a random routing by which a pair of devices may exceed its mean without a shorter window.
_DEVIATIONS = 4


@dataclass(frozen=True)
class ExchangePlan:
    """The crossing of a device's tokens."""

    rounds: int  # the least number; more only if windows must be shorter
    window: int  # tokens of a window (W)
    slots: int | None  # the most tokens that a window sends to each device (C); None: the window is gathered
    rows: int  # tokens that a device gets in a round
    pairs: int | None = None  # the most (token, choice) pairs that a window has for each device; None: any number
    # the crossing, in smaller windows, of tokens without room in the one planned round, of which nothing is kept; None:
    # they cross like the others
    rest: ExchangePlan | None = None


def plan(tokens: int, top_k: int, shards: int, experts: int, most: int, *, overlaps: bool) -> ExchangePlan:
    """Choose the form that sends less, with as many rounds as pay.

    A device has so many ``tokens`` and ``experts``, shares the experts with ``shards`` in all, and can hold ``most``
    tokens in a round. Rounds pay if an exchange ``overlaps`` with products.
    """
    rounds = -(-tokens * shards // most)
    if overlaps and shards > 1:
        rows = tokens * top_k // experts
        rounds = max(rounds, min(_ROUNDS, rows // _ROWS), min(2, rows // _FEWEST))
    rounds = min(max(rounds, 1), tokens)
    # better a few more rounds, all full: else windows are padded, and their size suits no tile
    rounds = next((r for r in range(rounds, 2 * rounds) if tokens % r == 0), rounds)
    window = -(-tokens // rounds)
    rounds = -(-tokens // window)
    slots = _slots(window, top_k, shards)
    if shards == 1 or slots >= window:
        return ExchangePlan(rounds, window, None, window * shards)
    return ExchangePlan(rounds, window, slots, slots * shards)


def plan_rest(planned: ExchangePlan, top_k: int, shards: int) -> ExchangePlan:
    """Plan the crossing of tokens without room in the one planned round: an eighth of its window at a time."""
    window = -(-planned.window // _ROUNDS)
    slots = min(_slots(window, top_k, shards), window)
    return ExchangePlan(1, window, slots, slots * shards)


def _slots(window: int, top_k: int, shards: int) -> int:
    """The number of slots for each pair of devices that a random routing of a window fits into."""
    share = 1 - (1 - 1 / shards) ** top_k  # of a window's tokens that need a given device
    slots = window * share + _DEVIATIONS * math.sqrt(window * share * (1 - share))
    return math.ceil(slots / 8) * 8  # a TPU lays rows out in eights


def random_pairs(balanced: int, top_k: int, shards: int) -> int:
    """The room on a device that gets ``balanced`` pairs: in a random routing no sender exceeds its equal part of it."""
    return max(balanced + math.ceil(_DEVIATIONS * math.sqrt(balanced * shards)), top_k * shards)


@dataclass(frozen=True)
class Round:
    """A round, and its part of an array that keeps values of each planned round, one after another."""

    # Rounds beyond the plan come first, so that planned ones overwrite their values.
    place: Array  # the number among the planned rounds, 0 for one beyond the plan
    more: Array | None  # whether it is beyond the plan; None: there can be none

    def put(self, kept: Array, value: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(kept, value.astype(kept.dtype), self.place * len(value), 0)


def again(needed: Array | None, make: Callable[..., Array], given: Any, kept: Array) -> Array:
    """Return ``kept``, or ``make(given)`` if ``needed`` (None: never)."""
    if needed is None:
        return kept
    # A loop of one turn or none, since a conditional's result would be a copy. Its first comparison shows a reader of
    # the program that none is planned. The barrier makes ``given`` depend on the turn, or the compiler would hoist the
    # work out of the loop.
    end = 1 + needed.astype(jnp.int32)

    def once(state: tuple[Array, Array]) -> tuple[Array, Array]:
        number, mine = lax.optimization_barrier((state[0], given))
        return number + 1, make(mine)

    return lax.while_loop(lambda s: (s[0] < 1) | (s[0] < end), once, (jnp.int32(1), kept))[1]


def in_rounds(
    compute: Callable[..., Any],
    carry: Any,
    tensors: Arrays,
    like: Arrays,
    held: Array,
    planned: ExchangePlan,
    axes: tuple[Axes, Axes],
    came: Array | None = None,
) -> tuple[Any, Arrays]:
    """Return ``carry`` after all rounds, and the results for this device's tokens.

    Args:
        compute: (carry, tensors of the received tokens, the round) -> (carry, results for each of them). The results
            for a token are summed over its devices. In ``planned.rest`` the round is None.
        tensors: [T, width] each; the last two are routing indices and weights.
        like: for each result an array of its shape and dtype for this device's tokens.
        held, axes: the numbers of the experts held here; the axes that split the experts, and all.
        came: the received values, if kept, of the tensor before these two in the planned rounds: it is not sent again.
    """
    exchange = (_ToAll if planned.slots is None else _ByNeed)(tensors, held, planned, *axes)
    rounds = _Rounds(compute, exchange, planned, len(tensors), came)
    first = (rounds.zero, exchange.stop(rounds.zero))

    def cut(out: Arrays) -> Arrays:
        return tuple(o[: len(t)] for o, t in zip(out, like, strict=True))

    def empty(rows: int) -> Arrays:
        return tuple(jnp.zeros((rows, t.shape[1]), t.dtype) for t in like)

    if planned.rest is not None or (planned.rounds == 1 and planned.slots is None):
        # the planned round stands before any loop, so that its exchange overlaps with the rest of the layer
        carry, results = rounds.work(carry, rounds.send(first), first, Round(rounds.zero, None))
        out = exchange.back(results, first)
        if planned.rest is None:
            return carry, cut(out)
        return _rest(compute, carry, out, first, _ByNeed(tensors, held, planned.rest, *axes), planned.rest)
    rounds.needed = exchange.rounds(rounds.zero)
    out = empty(len(tensors[0]) + planned.window)
    state: Any = (rounds.zero, first, carry, out)
    if planned.rounds == 1 or not axes[0]:
        _, _, carry, out = lax.while_loop(rounds.more, rounds.alone, state)
    else:
        state = (*state, (rounds.zero, rounds.zero), rounds.send(first), empty(planned.rows))
        _, _, carry, out, last, _, made = lax.while_loop(rounds.more, rounds.overlapped, state)
        out = _put(exchange, out, made, last)
    return carry, cut(out)


class _Rounds:
    """The rounds of an exchange as bodies of a loop over windows; arguments as of :func:`in_rounds`."""

    needed: Array  # rounds of the device that needs most

    def __init__(
        self, compute: Callable[..., Any], exchange: Any, planned: ExchangePlan, count: int, came: Array | None
    ) -> None:
        self.compute, self.exchange, self.planned, self.came = compute, exchange, planned, came
        self.zero = jnp.int32(0)
        every = range(count)
        self.old = every[-3:-2] if came is not None else ()
        self.sent = [number for number in every if number not in self.old]

    def more(self, state: Any) -> Array:
        # The first comparison implies the second: it shows a reader of the program the planned number of turns of a
        # loop whose length depends on data.
        return (state[0] < self.planned.rounds) | (state[0] < self.needed)

    def alone(self, state: Any) -> Any:
        number, now, carry, out = state
        carry, results = self.work(carry, self.send(now), now, self._round(number))
        return number + 1, self._following(now), carry, _put(self.exchange, out, results, now)

    def overlapped(self, state: Any) -> Any:
        """One round, while the next one's tokens come in and the last one's results go back."""
        number, now, carry, out, last, sent, made = state
        ahead = self._following(now)
        coming = self.send(ahead)
        out = _put(self.exchange, out, made, last)
        carry, results = self.work(carry, sent, now, self._round(number))
        return number + 1, ahead, carry, out, now, coming, results

    def send(self, window: Window) -> Arrays:
        return self.exchange.send(window, self.sent)

    def work(self, carry: Any, sent: Arrays, window: Window, round_: Round) -> Any:
        if self.came is not None:
            kept = lax.dynamic_slice_in_dim(self.came, round_.place * self.planned.rows, self.planned.rows)
            x = again(round_.more, lambda mine: self.exchange.send(mine, self.old)[0], window, kept)
            sent = (*sent[:-2], x, *sent[-2:])
        return self.compute(carry, sent, round_)

    def _following(self, window: Window) -> Window:
        return window[1], self.exchange.stop(window[1])

    def _round(self, number: Array) -> Round:
        left = jnp.maximum(self.needed, self.planned.rounds) - 1 - number
        more = None if self.planned.slots is None else left >= self.planned.rounds
        return Round(self.planned.rounds - 1 - jnp.minimum(left, self.planned.rounds - 1), more)


def _put(exchange: Any, out: Arrays, results: Arrays, window: Window) -> Arrays:
    """Write a window's results into ``out``; the next window overwrites those behind its end."""
    back = exchange.back(results, window)
    return tuple(lax.dynamic_update_slice_in_dim(o, b, window[0], 0) for o, b in zip(out, back, strict=True))


def _rest(
    compute: Callable[..., Any], carry: Any, out: Arrays, first: Window, exchange: _ByNeed, planned: ExchangePlan
) -> Any:
    """Return ``carry`` and ``out`` after the tokens behind the window ``first``, which had no room in it."""
    zero, behind = first  # it begins at token 0
    count = exchange.rounds(behind)
    every = range(len(exchange.tensors))

    def one(state: Any) -> Any:
        number, start, carry, out = state
        window = start, exchange.stop(start)
        carry, results = compute(carry, exchange.send(window, every), None)
        return number + 1, window[1], carry, _put(exchange, out, results, window)

    def once(state: Any) -> Any:
        # a loop of one turn or none: only inside it is there room behind the last token
        number, carry, out = state
        out = tuple(jnp.pad(o, ((0, planned.window), (0, 0))) for o in out)
        _, _, carry, out = lax.while_loop(lambda s: s[0] < count, one, (zero, behind, carry, out))
        return number + 1, carry, tuple(o[: exchange.tokens] for o in out)

    end = 1 + jnp.minimum(count, 1)
    return lax.while_loop(lambda s: (s[0] < 1) | (s[0] < end), once, (jnp.int32(1), carry, out))[1:]


class _ToAll:
    """Gives every device the whole window."""

    def __init__(self, tensors: Sequence[Array], held: Array, planned: ExchangePlan, across: Axes, every: Axes) -> None:
        self.planned, self.across = planned, across
        self.shards = planned.rows // planned.window
        # with overlapping rounds a window behind the last is sent too
        windows = planned.rounds + (planned.rounds > 1)
        fills = [0] * (len(tensors) - 2) + [len(held) * self.shards, 0]  # index of an expert that no device has
        rows, filled = windows * planned.window, zip(tensors, fills, strict=True)
        self.tensors = [jnp.pad(t, ((0, rows - len(t)), (0, 0)), constant_values=fill) for t, fill in filled]

    def rounds(self, _: Array) -> Array:
        return jnp.int32(self.planned.rounds)

    def stop(self, start: Array) -> Array:
        return start + self.planned.window

    def send(self, window: Window, numbers: Sequence[int]) -> Arrays:
        parts = (lax.dynamic_slice_in_dim(self.tensors[i], window[0], self.planned.window) for i in numbers)
        return tuple(lax.all_gather(t, self.across, axis=0, tiled=True) if self.across else t for t in parts)

    def back(self, results: Arrays, _: Window) -> Arrays:
        if not self.across:
            return results
        if self.planned.rounds == 1:
            return tuple(lax.psum_scatter(r, self.across, scatter_dimension=0, tiled=True) for r in results)
        # as many bytes as a reduce-scatter, which libtpu runs alone: an all-to-all overlaps with products
        parts = (_all_to_all(r, self.across).reshape(self.shards, -1, r.shape[1]) for r in results)
        return tuple(p.sum(0, dtype=jnp.float32).astype(p.dtype) for p in parts)


class _ByNeed:
    """Gives each device the tokens that chose an expert of its own."""

    def __init__(self, tensors: Sequence[Array], held: Array, planned: ExchangePlan, across: Axes, every: Axes) -> None:
        self.tensors, self.across, self.every = tensors, across, every
        self.window, self.slots, self.pairs = planned.window, planned.slots or 0, planned.pairs
        self.shards = planned.rows // self.slots
        self.tokens, self.top_k = tensors[-2].shape
        self.nobody = len(held) * self.shards
        # behind the tokens is a window of tokens that need nobody
        self.shard_Tk = jnp.pad(tensors[-2] // len(held), ((0, self.window), (0, 0)), constant_values=self.shards)
        chosen_Tkn = self.shard_Tk[:, :, None] == jnp.arange(self.shards)
        self.need_Tn = chosen_Tkn.any(1)
        self.tokens_before_Tn, self.pairs_before_Tn = _before(self.need_Tn), _before(chosen_Tkn.sum(1))

    def rounds(self, start: Array) -> Array:
        """The largest number of rounds that a device needs, from token ``start``; all devices run as many."""
        _, count = lax.while_loop(
            lambda state: self.tokens - state[0] > 0,
            lambda state: (self.stop(state[0]), state[1] + 1),
            (start, jnp.int32(0)),
        )
        return lax.pmax(count, self.every)

    def stop(self, start: Array) -> Array:
        fit_Wn = self._counts(self.tokens_before_Tn, start) <= self.slots
        if self.pairs is not None:
            fit_Wn &= self._counts(self.pairs_before_Tn, start) <= self.pairs
        return jnp.minimum(start + fit_Wn.all(1).sum(dtype=jnp.int32), self.tokens)

    def send(self, window: Window, numbers: Sequence[int]) -> Arrays:
        number_W1 = lax.iota(jnp.int32, self.window)[:, None]
        number_Wn = jnp.where(self._needs(window), number_W1, self.window)
        # each device's tokens in their order; the others are behind them
        number_M = lax.sort(number_Wn.T, dimension=1, is_stable=False)[:, : self.slots].reshape(-1)
        token_M = jnp.minimum(window[0] + number_M, self.tokens - 1)
        parts = {i: at(self.tensors[i], token_M) for i in numbers}
        indices = len(self.tensors) - 2
        if indices in parts:
            parts[indices] = jnp.where(number_M[:, None] < self.window, parts[indices], self.nobody)
        return tuple(_all_to_all(t, self.across) for t in parts.values())

    def back(self, results: Arrays, window: Window) -> Arrays:
        arrived = [_all_to_all(r, self.across) for r in results]
        rows = self._rows(window)

        def total(r: Array) -> Array:
            found = (jnp.where(has[:, None], at(r, row), 0).astype(jnp.float32) for row, has in rows)
            return sum(found, start=jnp.zeros((), jnp.float32)).astype(r.dtype)

        return tuple(map(total, arrived))

    def _rows(self, window: Window) -> list[tuple[Array, Array]]:
        """(row among the returned, whether there is one) of each token of a window, for each device it can go to."""
        need_Wn = self._needs(window)
        row_Wn = self._counts(self.tokens_before_Tn, window[0]) - 1 + jnp.arange(self.shards) * self.slots
        row_Wn = jnp.where(need_Wn, row_Wn, 0)
        if self.shards <= self.top_k:
            return [(row_Wn[:, shard], need_Wn[:, shard]) for shard in range(self.shards)]
        shard_Wk = lax.dynamic_slice_in_dim(self.shard_Tk, window[0], self.window)
        among_W = lax.iota(jnp.int32, self.window) < window[1] - window[0]
        rows = []
        for choice in range(self.top_k):
            shard_W1 = shard_Wk[:, choice, None]
            again_W = (shard_Wk[:, :choice] == shard_W1).any(1)  # the token went there for an earlier choice
            row_W = jnp.where(shard_W1 == jnp.arange(self.shards), row_Wn, 0).sum(1)
            rows.append((row_W, among_W & ~again_W))
        return rows

    def _counts(self, before_Tn: Array, start: Array) -> Array:
        """The number up to each token of the window from ``start``, for each device, [W, n]."""
        before = lax.dynamic_slice_in_dim(before_Tn, start, self.window + 1)
        return before[1:] - before[0]

    def _needs(self, window: Window) -> Array:
        """The devices that each token of a window needs, as bools [W, n]."""
        among_W = lax.iota(jnp.int32, self.window) < window[1] - window[0]
        return lax.dynamic_slice_in_dim(self.need_Tn, window[0], self.window) & among_W[:, None]


def _before(count_Tn: Array) -> Array:
    return jnp.pad(jnp.cumsum(count_Tn, 0, dtype=jnp.int32), ((1, 0), (0, 0)))


def _all_to_all(x: Array, axes: Axes) -> Array:
    return lax.all_to_all(x, axes, split_axis=0, concat_axis=0, tiled=True)


def at(x: Array, index: Array) -> Array:
    """``x[index]`` without a bounds check: every index must be in bounds."""
    return x.at[index].get(mode="promise_in_bounds")
