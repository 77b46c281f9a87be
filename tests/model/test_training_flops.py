"""The FLOPs of a step as MFU counts them, beside those that MaxText publishes with its steps (tpu-recipes)."""

from __future__ import annotations

import pytest

from shardwright.layout.auto import UNMADE
from shardwright.model.facts import attended_pairs, facts_of, layer_kinds
from shardwright.model.meta_model import load_config
from tests.support.paths import ROOT


# TFLOP/s and tokens/s of a chip. DeepSeek-V3's heads are of 192 and 128; every second layer of GPT-OSS sees 128 tokens.
@pytest.mark.parametrize(
    ("model", "length", "flops", "tokens"),
    [
        ("deepseek_v3", 4096, 607.53e12, 2425.75),
        ("gpt_oss_120b", 8192, 378.90e12, 10975.31),
        ("llama3_70b", 8192, 1207.05e12, 2686.98),
    ],
)
def test_the_flops_of_a_token_are_those_published(model: str, length: int, flops: float, tokens: float) -> None:
    facts = facts_of(load_config(str(ROOT / "docs" / "configs" / f"{model}.json"), UNMADE))
    found = facts.training_flops(1, length)
    assert found == pytest.approx(flops / tokens * length, rel=5e-4)


def test_a_linear_layer_counts_its_state_and_no_pairs() -> None:
    config = load_config(str(ROOT / "docs" / "configs" / "qwen3_next_80b_a3b.json"), UNMADE)
    facts = facts_of(config)
    assert layer_kinds(config).count("full_attention") == 12
    short, long = (facts.training_flops(1, length) for length in (1024, 2048))
    assert short is not None
    assert long is not None
    pairs = [length * (length + 1) / 2 for length in (1024, 2048)]
    attention = 12 * 6 * 16 * (256 + 256)  # FLOPs of a pair: 12 layers, 16 heads of 256
    assert long - 2 * short == pytest.approx(attention * (pairs[1] - 2 * pairs[0]))
    # a token reads, updates and reads a state of 128 × 128 in each of 32 heads of 36 layers, forward and backward
    weights = short - attention * pairs[0] - 36 * 6 * 3 * 32 * 128 * 128 * 1024
    active = weights / 6 / 1024
    assert 3.0e9 < active < 3.9e9  # it is called A3B


def test_pairs_are_counted_by_the_kind_of_layer() -> None:
    config = load_config(str(ROOT / "docs" / "configs" / "llama4_scout.json"), UNMADE)
    config.attention_chunk_size, config.sliding_window = 4, 3
    seen = {
        "full_attention": lambda query, key: key <= query,
        "sliding_attention": lambda query, key: query - 3 < key <= query,
        "chunked_attention": lambda query, key: key <= query and query // 4 == key // 4,
        "linear_attention": lambda query, key: False,
    }
    for kind, sees in seen.items():
        brute = sum(sees(query, key) for query in range(10) for key in range(10))
        assert attended_pairs(config, kind, 10) == brute
