"""The order of rows for the experts that a device holds, and what is kept of a block."""

from __future__ import annotations

import types

import numpy as np
import pytest

from shardwright.models.experts import exchange
from shardwright.models.experts.row_blocks import Block, BlockPlan, in_order
from shardwright.models.ops.jax_call import jax

CROSSING = exchange.ExchangePlan(rounds=1, window=0, slots=None, rows=0)


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

        def keep(block, kept, number=number):
            return block.keep(kept, jnp.full((4, 1), 10.0 * number) + block.start, round_of(number))

        kept = all_rows.fold(keep, kept)

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
