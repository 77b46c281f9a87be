"""The order of rows for the experts that a device holds: every pair once, each block with rows of one expert."""

from __future__ import annotations

import types

import numpy as np
import pytest

from shardwright.models.experts import exchange
from shardwright.models.experts.row_blocks import Block, BlockPlan, OwnBlock, in_order
from shardwright.models.ops.jax_call import jax

CROSSING = exchange.ExchangePlan(rounds=1, window=0, slots=None, rows=0)


@pytest.mark.parametrize("block", [2, 8])
@pytest.mark.parametrize(
    "experts",
    [
        [0, 1, 2, 3, 4, 5, 6, 7] * 3,
        [4] * 24,  # all to one that is held
        [0] * 24,  # none is held
        [4] * 2 + [6] * 9 + [7] * 13,  # one that is held has none
        [5, 4, 4, 4] + [4] * 13 + [0],  # as many blocks as there can be, and a pair that is not held
    ],
)
def test_each_expert_has_blocks_of_its_own(experts, block):
    index_Tk = np.asarray(experts, np.int32).reshape(-1, 2)
    held = np.arange(4, 8, dtype=np.int32)
    rows = in_order(jax.numpy.asarray(index_Tk), held, BlockPlan(CROSSING, block, block, False, apart=True), False)
    token_R, choice_R, row_kT, end_E = (np.asarray(x) for x in (rows.token_R, rows.choice_R, rows.row_kT, rows.end_E))
    is_held = (index_Tk >= 4).T
    assert len(token_R) % block == 0
    assert (row_kT[~is_held] >= end_E[-1]).all()
    assert row_kT.max() < len(token_R)
    assert len(set(row_kT[is_held])) == is_held.sum()
    # a pair's row has the pair's token, and is among its expert's rows
    numbers = np.arange(index_Tk.size).reshape(2, -1)
    assert (choice_R[row_kT[is_held]] == numbers[is_held]).all()
    assert (token_R[row_kT[is_held]] == (numbers % len(index_Tk))[is_held]).all()
    assert (end_E % block == 0).all()
    expert_R = np.searchsorted(end_E, np.arange(end_E[-1]), side="right")
    # copies too are of a pair of their expert's
    assert (index_Tk.T.reshape(-1)[choice_R[: end_E[-1]]] - 4 == expert_R).all()


@pytest.mark.parametrize("block", [2, 8])
def test_a_copy_weighs_nothing(block):
    index_Tk = np.asarray([[0, 1], [1, 0], [1, 0]], np.int32)
    rows = in_order(
        jax.numpy.asarray(index_Tk), np.arange(2), BlockPlan(CROSSING, block, block, False, apart=True), True
    )
    ones = jax.numpy.ones(index_Tk.size)
    starts = range(0, int(rows.end_E[-1]), block)
    weight_R = np.concatenate([np.asarray(OwnBlock(rows, jax.numpy.int32(start)).weights(ones)) for start in starts])
    assert weight_R.sum() == index_Tk.size
    assert (weight_R[np.asarray(rows.row_kT)] == 1).all()


@pytest.mark.parametrize("rounds", [2, 3], ids=["as planned", "one more than planned"])
@pytest.mark.parametrize("room", [4, 8], ids=["room for one block", "room for all"])
def test_what_is_kept_is_given_back_and_what_there_is_no_room_for_is_made_again(rounds, room):
    """Rounds of 8 rows, of which there is room for two, in blocks of 4; a row is the number of its round and block."""
    jnp, plan = jax.numpy, BlockPlan(CROSSING, 4, 4, False, room=room)
    all_rows = in_order(jnp.zeros((8, 1), "int32"), np.arange(1), plan, True)

    def round_of(number):
        left = rounds - 1 - number
        return exchange.Round(jnp.int32(1 - min(left, 1)), jnp.asarray(left >= 2))

    kept = jnp.zeros((2 * room, 1))
    for number in range(rounds):

        def keep(block, _, kept, sums, number=number):
            return block.keep(kept, jnp.full((4, 1), 10.0 * number) + block.start, round_of(number)), sums

        kept, _ = all_rows.fold(keep, kept, ())

    @jax.jit
    def of(number, start):
        left = rounds - 1 - number
        mine = exchange.Round(1 - jnp.minimum(left, 1), left >= 2)
        return Block(all_rows, start).kept(kept, mine, lambda x: -x, jnp.ones((4, 1)))

    for number in range(rounds):
        for start in (0, 4):
            planned = number >= rounds - 2 and start < room
            assert (np.asarray(of(number, start)) == (10 * number + start if planned else -1)).all()


def test_what_is_made_again_stays_in_its_loop():
    def function(needed, x):
        return exchange.again(needed, lambda x: x @ x, x, x)

    text = jax.jit(function).lower(True, np.ones((64, 64), "float32")).compile().as_text()
    assert " dot(" in text
    assert " dot(" not in text.split("ENTRY")[1]


@pytest.mark.parametrize("most", [2**31 - 1, 100], ids=["as one number", "by two, for one would be too large"])
def test_rows_are_sorted_by_expert_and_then_by_number(monkeypatch, most):
    monkeypatch.setattr(jax.numpy, "iinfo", lambda _: types.SimpleNamespace(max=most))
    index_Tk = np.random.default_rng(0).integers(0, 8, (64, 2)).astype(np.int32)
    plan, held = BlockPlan(CROSSING, 16, 16, False), np.arange(2, 6)

    def function(index_Tk):
        rows = in_order(index_Tk, held, plan, False)
        return rows.choice_R, rows.row_kT, rows.end_E

    choice_R, row_kT, end_E = map(np.asarray, function(jax.numpy.asarray(index_Tk)))
    expert_N = index_Tk.T.reshape(-1)
    expected = [n for expert in held for n in np.flatnonzero(expert_N == expert)]
    assert choice_R[: end_E[-1]].tolist() == expected
    assert row_kT.reshape(-1)[expected].tolist() == list(range(len(expected)))
    assert (row_kT.reshape(-1)[(expert_N < 2) | (expert_N > 5)] >= end_E[-1]).all()
    # one sort, and no stable one, which gets an array more: libtpu takes ten times as long to compile that
    text = str(jax.make_jaxpr(function)(index_Tk))
    assert text.count(" sort[") == 1
    assert "is_stable=False" in text


@pytest.mark.parametrize("widths", [(4, 6), (6, 4)], ids=["as it is stored", "rows and columns swapped"])
def test_a_weights_gradient_is_summed_in_float32(widths):
    out, inner = widths
    index_Tk = jax.numpy.zeros((16, 1), "int32")
    rows = in_order(index_Tk, np.arange(1), BlockPlan(CROSSING, 8, 8, False, apart=True), False)
    out_R, in_R = (np.random.default_rng(width).normal(size=(16, width)).astype("bfloat16") for width in widths)

    def add(block, parameters, carry, sums):
        return carry, [block.outer(sums[0], block.take(out_R), block.take(in_R), contract_last=True)]

    _, (sums,) = rows.fold(add, (), (), [jax.numpy.zeros((1, out, inner))])
    np.testing.assert_allclose(sums[0], np.float32(out_R).T @ np.float32(in_R), rtol=1e-5, atol=1e-6)
