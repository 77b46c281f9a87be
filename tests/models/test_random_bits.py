"""Random numbers that are functions of a key: known answers, one value on host and device, and no pattern in sight."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch_xla
import torch_xla.distributed.spmd as xs

from shardwright.models.ops import random_bits

KEY = torch.tensor(random_bits.key_of("a test"), dtype=torch.int32)

# (key, counter, result) of Threefry-2x32 with 13 rounds, from Random123's known answers
KNOWN = [
    ((0x00000000, 0x00000000), (0x00000000, 0x00000000), (0x9D1C5EC6, 0x8BD50731)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0xFD36D048, 0x2D17272C)),
    ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xBA3E4725, 0xF27D669E)),
]


@pytest.mark.parametrize(("key", "counter", "result"), KNOWN)
def test_threefry_gives_its_published_answers(key, counter, result):
    words = random_bits._threefry(np.array(key, np.uint32), *(np.array([c], np.uint32) for c in counter), np)
    assert tuple(int(word[0]) for word in words) == result


def test_host_and_sharded_devices_draw_the_same_bits():
    key, mesh = KEY.to("xla"), xs.Mesh(np.arange(8), (2, 4), ("fsdp", "tensor"))
    x = torch.randn(4, 3, 6, 8).to(torch.bfloat16)
    placed = x.to("xla")
    xs.mark_sharding(placed, mesh, ("fsdp", None, None, "tensor"))
    rows = torch.tensor([5, 2], dtype=torch.int32)
    found = [
        random_bits.dropout(placed, key, 3, 0.3),
        random_bits.uniform(key, [2, 5], 4),
        random_bits.uniform(key, [], 5),
        random_bits.layer_keys(key, 2, 3),
        random_bits.keep_factors(key, (4, 3, 2, 8), 3, 0.3, rows.to("xla")),
    ]
    torch_xla.sync()
    expected = [
        random_bits.dropout(x, KEY, 3, 0.3),
        random_bits.uniform(KEY, [2, 5], 4),
        random_bits.uniform(KEY, [], 5),
        random_bits.layer_keys(KEY, 2, 3),
        random_bits.keep_factors(KEY, (4, 3, 8, 8), 3, 0.3)[:, :, [5, 2]],
    ]
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.cpu(), theirs)


def test_dropout_keeps_with_its_probability_and_keeps_the_mean():
    x = torch.ones(512, 1024)
    for rate in (0.0, 0.1, 0.5, 0.9, 1.0):
        kept = random_bits.dropout(x, KEY, 0, rate)
        assert set(kept.unique().tolist()) <= {0.0, torch.tensor(1 / (1 - rate)).item() if rate < 1 else 0.0}
        share = (kept != 0).double().mean().item()
        assert share == pytest.approx(1 - rate, abs=5 * (rate * (1 - rate) / x.numel()) ** 0.5)


def test_its_gradient_has_the_forwards_mask():
    x = torch.randn(64, 64, requires_grad=True)
    (grad,) = torch.autograd.grad(random_bits.dropout(x, KEY, 7, 0.4).sum(), [x])
    assert torch.equal(grad, random_bits.keep_factors(KEY, (64, 64), 7, 0.4))


def test_neighbours_of_every_kind_are_independent():
    keys = random_bits.layer_keys(KEY, 0, 2)
    next_step = torch.tensor(random_bits.key_of("a test, later"), dtype=torch.int32)
    draws = [(KEY, 0), (KEY, 1), (keys[0], 0), (keys[1], 0), (keys[0], 1), (next_step, 0)]
    drawn = [random_bits.uniform(key, [64, 4096], site).double() - 0.5 for key, site in draws]
    pairs = [(a, b) for i, a in enumerate(drawn) for b in drawn[:i]]
    first = drawn[0]
    pairs += [(first[:, 1:], first[:, :-1]), (first[1:], first[:-1]), (first[1:, 1:], first[:-1, :-1])]
    for a, b in pairs:
        # 12 times the mean product is their correlation: its deviation is one over the root of their number
        assert abs(12 * (a * b).mean().item()) < 5 / a.numel() ** 0.5
    for numbers in drawn:
        counts = torch.histc(numbers, 64, -0.5, 0.5)
        expected = numbers.numel() / 64
        chi_squared = ((counts - expected) ** 2 / expected).sum().item()
        assert 63 - 6 * 126**0.5 < chi_squared < 63 + 6 * 126**0.5
