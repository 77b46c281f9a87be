"""Loops over slices: the numbers of a plain loop, and nothing traced or lowered a second time."""

from __future__ import annotations

import pytest
import torch
import torch_xla

from shardwright.models.ops.while_loop import run_turns


def turn(carry, x):
    total, nothing, unused = carry
    return (total * 0.5 + x["a"], nothing, unused), [None, total - x["b"].float(), x["a"].sum()]


def inputs():
    carry = (torch.linspace(0, 1, 3), None, torch.ones(2))
    return carry, {"a": torch.arange(12.0).reshape(4, 3) / 7, "b": torch.arange(12).reshape(4, 3)}


def on_xla(carry, xs):
    return tuple(None if t is None else t.to("xla") for t in carry), {k: t.to("xla") for k, t in xs.items()}


def check(found, reverse):
    carry, xs = inputs()
    rows = []
    for at in reversed(range(4)) if reverse else range(4):
        carry, made = turn(carry, {k: t[at] for k, t in xs.items()})
        rows.append(made)
    rows = rows[::-1] if reverse else rows
    (total, nothing, unused), (none, differences, sums) = found
    assert nothing is None
    assert none is None
    for ours, expected in (
        (total, carry[0]),
        (unused, carry[2]),
        (differences, torch.stack([row[1] for row in rows])),
        (sums, torch.stack([row[2] for row in rows])),
    ):
        torch.testing.assert_close(ours.cpu(), expected)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_loop_gives_the_numbers_of_a_plain_one_and_is_traced_once(reverse):
    known, traced = {}, []

    def noted(carry, x):
        traced.append(x)
        return turn(carry, x)

    for _ in range(3):
        check(run_turns(noted, *on_xla(*inputs()), reverse=reverse, known=known), reverse)
    assert len(traced) == 1
    carry, xs = on_xla(*inputs())
    run_turns(noted, carry, {k: t[:2] for k, t in xs.items()}, reverse=reverse, known=known)
    assert len(traced) == 2  # of other shapes


def test_a_turn_that_uses_a_tensor_it_is_not_given_is_not_kept():
    known = {}
    for factor in (2.0, 3.0):
        outside = torch.full((3,), factor).to("xla")
        torch_xla.sync()
        after, _ = run_turns(lambda carry, x, outside=outside: (carry * outside, x), *_simple(), known=known)
        assert after.cpu().tolist() == [factor**4] * 3
    assert not known


def test_a_carry_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"given a carry of \[\(3,\)\] and returns one of \[\(1,\)\]"):
        run_turns(lambda carry, x: (carry[:1], x), *_simple())


def test_a_turn_that_draws_is_not_kept():
    known = {}
    run_turns(lambda carry, x: (carry + torch.rand_like(carry), x), *_simple(), known=known)
    assert not known


def _simple():
    return torch.ones(3, device="xla"), torch.zeros(4, 3, device="xla")
