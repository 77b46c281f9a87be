"""What models draw with, replaced: the numbers' ranges and dtypes, and what stays as it is."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwright.models.ops import random_bits
from shardwright.models.ops.randomness import UnknownDraw, drawing

KEY = torch.tensor(random_bits.key_of("a test"), dtype=torch.int32)


def test_a_draw_is_a_function_of_the_key_and_its_place_in_the_order():
    x = torch.ones(64, 64)

    def draw() -> list[torch.Tensor]:
        with drawing(KEY) as draws:
            found = [nn.Dropout(0.5)(x), F.dropout(x, 0.5), torch.empty_like(x).uniform_(0.9, 1.1), torch.rand(64, 64)]
        assert draws.drawn
        return found

    torch.manual_seed(0)
    before, once, again = torch.get_rng_state(), draw(), draw()
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
    assert not torch.equal(once[0], once[1])
    assert torch.equal(before, torch.get_rng_state())
    for site, found in enumerate(once[:2]):
        assert torch.equal(found, random_bits.dropout(x, KEY, site, 0.5))


def test_numbers_have_the_range_and_the_dtype_that_was_asked_for():
    x = torch.empty(256, 256, dtype=torch.bfloat16)
    with drawing(KEY):
        jitter, unit, like = torch.empty(256, 256).uniform_(0.7, 1.3), x.clone().uniform_(), torch.rand_like(x)
        waits = torch.empty(256, 256).exponential_(2.0)
        single = torch.rand((2, 3), dtype=torch.float64)
    assert 0.7 <= jitter.min() < 0.701
    assert 1.299 < jitter.max() <= 1.3
    assert jitter.mean() == pytest.approx(1, abs=5 * (0.36 / 12) ** 0.5 / 256)
    assert (unit.dtype, like.dtype, single.dtype) == (torch.bfloat16, torch.bfloat16, torch.float64)
    assert waits.min() > 0
    assert waits.mean() == pytest.approx(0.5, abs=5 * 0.5 / 256)


@pytest.mark.parametrize("mask", ["causal", "bool", "float"])
def test_torchs_own_attention_with_dropout_drops_what_the_eager_one_does(mask):
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, 8, 4) for heads in (4, 2, 2))
    seen = torch.ones(8, 8, dtype=torch.bool).tril()
    added = torch.zeros(8, 8).masked_fill(~seen, torch.finfo(torch.float32).min)
    how = {"causal": {"is_causal": True}, "bool": {"attn_mask": seen}, "float": {"attn_mask": added}}[mask]
    with drawing(KEY):
        found = F.scaled_dot_product_attention(query, key, value, dropout_p=0.3, enable_gqa=True, **how)
    repeated = [t.repeat_interleave(2, dim=1) for t in (key, value)]
    weights = torch.softmax(query @ repeated[0].transpose(2, 3) / 2 + added, dim=-1)
    torch.testing.assert_close(found, random_bits.dropout(weights, KEY, 0, 0.3) @ repeated[1])
    with drawing(KEY) as draws:
        plain = F.scaled_dot_product_attention(query, key, value, enable_gqa=True, **how)
    torch.testing.assert_close(plain, weights @ repeated[1])
    assert not draws.drawn


def test_without_a_key_only_what_draws_is_refused():
    x = torch.ones(3)
    with drawing(None) as draws:
        assert torch.equal(F.dropout(x, 0.5, training=False), x)
        assert torch.equal(F.dropout(x, 0.0), x)
        assert not draws.drawn
        for draw in (lambda: F.dropout(x, 0.5), x.uniform_, lambda: torch.rand(3), x.exponential_):
            with pytest.raises(UnknownDraw):
                draw()
    with drawing(KEY), pytest.raises(UnknownDraw, match="generator of its own"):
        x.uniform_(generator=torch.Generator())
    with drawing(KEY.to("xla")), pytest.raises(UnknownDraw, match="rand: it draws on cpu"):
        torch.rand([])
