"""What a config says of its model: whether it predicts the next token, and how many positions it has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from shardwright.errors import UserError
from shardwright.layout.load_recipe import load_recipe
from shardwright.model import meta_model as meta_models
from shardwright.model.facts import facts_of
from shardwright.model.meta_model import load_config, meta_model
from shardwright.weights.hub_write import export
from shardwright.weights.weight_sources import seeded_init

POSITIONS = 16
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "max_position_embeddings": POSITIONS,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "pad_token_id": 1,
}
DECODER = {"decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 32, "d_model": 16, "ffn_dim": 32}
# family → what its config must say besides
TABLES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "gpt_bigcode": {},
    "opt": DECODER | {"word_embed_proj_dim": 16},
    "biogpt": {},
    "bart": DECODER,
    "roberta": {"is_decoder": True},
    "ctrl": {"dff": 32},
    "gptj": {"rotary_dim": 4},
    "openai-gpt": {},
}
NONE: dict[str, dict[str, Any]] = {"llama": {}, "gpt_neox": {}, "gpt_neox_japanese": {}, "bloom": {}}


def small(kind: str, **more: Any) -> PretrainedConfig:
    return AutoConfig.for_model(kind, **{**SMALL, **more})


def longest(config: PretrainedConfig) -> int | None:
    """The longest row that transformers' own model takes; None: one of twice its positions and more."""
    model = AutoModelForCausalLM.from_config(config).eval()
    for length in range(POSITIONS - 4, 2 * POSITIONS + 4):
        try:
            with torch.no_grad():
                model(input_ids=torch.full((1, length), 5), use_cache=False)
        except (IndexError, RuntimeError):
            return length - 1
    return None


@pytest.mark.parametrize("kind", [*TABLES, *NONE])
def test_positions_are_as_many_as_transformers_own_model_takes(kind: str) -> None:
    config = small(kind, **(TABLES | NONE)[kind])
    found = facts_of(config).positions
    assert found == longest(config)
    assert (found is None) == (kind in NONE)


@pytest.mark.parametrize("kind", ["gpt_neox", "gpt_neox_japanese", "pegasus", "opt"])
def test_a_decoder_is_taken_whatever_its_config_says_of_is_decoder(kind: str) -> None:
    config = small(kind, **DECODER)
    assert getattr(config, "is_decoder", False) is False
    assert meta_model(config).get_output_embeddings() is not None


@pytest.mark.parametrize("kind", ["bert", "electra", "megatron-bert", "roformer"])
def test_a_family_built_as_an_encoder_is_refused_until_its_config_makes_it_a_decoder(kind: str) -> None:
    with pytest.raises(UserError, match=r"built as an encoder(.|\n)*\"is_decoder\": true"):
        meta_model(small(kind))
    assert meta_model(small(kind, is_decoder=True)) is not None


def test_a_model_made_from_a_quantised_models_config_is_exported_as_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", **SMALL, "quantization_config": {"quant_method": "fp8"}})
    )
    config = load_config(str(tmp_path), load_recipe("llama_fsdp"))
    assert config.quantization_config["quant_method"] == "fp8"
    model = meta_model(config)
    export(tmp_path / "out", model, seeded_init(model, 0))
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(loaded.lm_head.weight, seeded_init(model, 0)("lm_head.weight"))


def test_what_is_larger_than_any_buffer_takes_no_memory_on_its_way_to_meta_and_is_the_same_model(monkeypatch):
    config = small("llama4_text", num_key_value_heads=2, head_dim=8, intermediate_size_mlp=32, num_local_experts=4)
    expected, made = meta_model(config), []
    monkeypatch.setattr(meta_models, "MOST_BUFFER", 500)
    hook = register_module_parameter_registration_hook(
        lambda module, name, p: made.append(p) if p is not None else None
    )
    try:
        found = meta_model(config)
    finally:
        hook.remove()
    large = [p for p in made if p.numel() > 500]
    assert large
    assert all(p.is_meta for p in large)
    shapes = [{name: (t.shape, t.dtype, t.stride()) for name, t in m.named_parameters()} for m in (expected, found)]
    assert shapes[0] == shapes[1]
    assert all(torch.equal(one, other) for one, other in zip(expected.buffers(), found.buffers(), strict=True))
