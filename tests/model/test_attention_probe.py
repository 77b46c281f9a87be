"""What a model lets a token see is tried in a small model of the family, whatever the family is."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from shardwright.errors import UserError
from shardwright.model.attention_probe import leak, looks_ahead, our_attention
from shardwright.model.facts import facts_of
from shardwright.models.attention.attention_interface import MASKED, NAME
from tests.support.jobs import job_of

TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
TINY |= {"intermediate_size": 128, "vocab_size": 256}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_experts": 4, "moe_intermediate_size": 64}
ISOLATE: dict[str, dict[str, Any]] = {
    "llama": TINY,
    "mixtral": TINY | EXPERTS,
    "qwen3_moe": TINY | EXPERTS | {"head_dim": 32},
    "gemma2": TINY | {"head_dim": 64, "sliding_window": 4096},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4},
    "phimoe": TINY | EXPERTS | {"sliding_window": 4096},  # said by masks alone
}
# each for a reason of its own
LEAK: dict[str, dict[str, Any]] = {
    "stablelm": TINY,  # keyword arguments end in the decoder
    "mpt": {"d_model": 64, "n_heads": 4, "n_layers": 2},  # an attention of its own
    "bloom": {"hidden_size": 64, "n_layer": 2, "n_head": 4},  # positions by ALiBi
    "lfm2": TINY | {"layer_types": ["conv", "full_attention"]},  # a convolution
    # blocks of keys, counted from the row's first; of the real size, of which a row of the trial has not one
    "minimax_m3_vl_text": TINY | EXPERTS | {"head_dim": 16, "layer_types": ["full_attention", "minimax_m3_sparse"]},
    "mamba2": {"hidden_size": 64, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 32, "expand": 2, "n_groups": 1},
}


@pytest.mark.parametrize("family", ISOLATE)
def test_a_model_that_keeps_documents_apart_is_found_to(family: str) -> None:
    assert leak(facts_of(AutoConfig.for_model(family, **ISOLATE[family]))) is None


@pytest.mark.parametrize("family", LEAK)
def test_a_model_that_lets_documents_see_each_other_is_found_out(family: str) -> None:
    found = leak(facts_of(AutoConfig.for_model(family, **LEAK[family])))
    assert found is not None
    assert "a document's logits differ" in found


def test_a_model_that_can_not_be_tried_counts_as_one_that_leaks() -> None:
    config = AutoConfig.for_model("llama", **TINY | {"num_key_value_heads": 3})
    assert "can't be tried: " in str(leak(facts_of(config)))
    config = AutoConfig.for_model("granite", **TINY, logits_scaling=0.0)  # NaN, which is no larger than any limit
    assert "can't be tried: its logits are not finite" in str(leak(facts_of(config)))


@pytest.mark.parametrize(("length", "name"), [(128, NAME), (300, NAME), (301, MASKED), (4096, MASKED)])
def test_a_window_that_masks_alone_say_is_seen_however_long_the_row(length: int, name: str) -> None:
    config = AutoConfig.for_model("phimoe", **TINY | EXPERTS, sliding_window=300)
    assert our_attention(facts_of(config), length) == name


def test_the_real_sizes_are_tried_small() -> None:
    config = AutoConfig.for_model("mixtral")  # 8x7B
    assert leak(facts_of(config)) is None


def test_a_job_that_asks_for_isolation_is_refused_where_the_model_leaks() -> None:
    with pytest.raises(UserError, match="--isolate_documents with a model of type 'stablelm'"):
        job_of("llama_fsdp", AutoConfig.for_model("stablelm", **TINY), isolate_documents=True)


def test_an_objective_on_answers_is_refused_there_by_its_own_name() -> None:
    config = AutoConfig.for_model("stablelm", **TINY)
    for packing in (True, False):
        with pytest.raises(UserError, match="--objective dpo with a model of type 'stablelm'") as refused:
            job_of("llama_fsdp", config, objective="dpo", packing=packing)
        assert "isolate_documents" not in str(refused.value)


def test_a_model_that_sees_the_tokens_it_predicts_is_found_out() -> None:
    assert not looks_ahead(facts_of(AutoConfig.for_model("llama", **TINY)), "shardwright")
    own = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "dim_head": 16, "dim_ff": 128}
    assert looks_ahead(facts_of(AutoConfig.for_model("cpmant", **own)), "shardwright")
