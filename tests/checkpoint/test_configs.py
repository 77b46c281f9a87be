"""A checkpoint is another model's if any setting of its config differs that changes a number."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import Gemma3Config, LlamaConfig, MixtralConfig, PretrainedConfig

from shardwright.checkpoint.same_model import CHANGE_NO_NUMBER, differences
from tests.support.lives import TINY

SIZES = {name: value for name, value in TINY.items() if name != "model_type"}
KINDS = {
    "llama": (LlamaConfig, SIZES),
    "mixtral": (MixtralConfig, {**SIZES, "num_local_experts": 4, "sliding_window": 16, "head_dim": 8}),
    "gemma3": (Gemma3Config, {"text_config": {**SIZES, "head_dim": 8, "final_logit_softcapping": 30.0}}),
}
WORDS: dict[str, Any] = {  # other values of settings that are no numbers
    "hidden_act": "gelu",
    "hidden_activation": "relu",
    "rope_type": "linear",
    "layer_types": ["full_attention", "full_attention"],
}
BESIDE = {"rope_type": {"factor": 2.0}}  # what such a value needs


def stored(config: PretrainedConfig) -> dict[str, Any]:
    return json.loads(json.dumps(config.to_dict(), default=str))


def settings(values: dict[str, Any], prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The paths of the settings that hold a number or a word of ``WORDS``, labels and the like left out."""
    found = []
    for key, value in values.items():
        if isinstance(value, dict) and key not in CHANGE_NO_NUMBER:
            found += settings(value, (*prefix, key))
        elif (isinstance(value, int | float) or key in WORDS) and key not in CHANGE_NO_NUMBER:
            found.append((*prefix, key))
    return found


def changed(values: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    copy = json.loads(json.dumps(values))
    inside = copy
    for key in path[:-1]:
        inside = inside[key]
    old = inside[path[-1]]
    new = WORDS[path[-1]] if path[-1] in WORDS else not old if isinstance(old, bool) else type(old)(old * 2 or 1)
    inside |= {path[-1]: new} | BESIDE.get(path[-1], {})
    if path[-1] == "num_hidden_layers":
        inside.pop("layer_types", None)  # a list of as many, which follows
    return copy


CASES = [(kind, path) for kind, (make, given) in KINDS.items() for path in settings(stored(make(**given)))]


def test_the_settings_that_the_next_test_changes_are_those_that_decide_a_model_s_numbers():
    llama = {".".join(path) for kind, path in CASES if kind == "llama"}
    assert {"num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "hidden_act"} <= llama
    assert {"rope_parameters.rope_theta", "rope_parameters.rope_type", "tie_word_embeddings"} <= llama
    mixtral = {".".join(path) for kind, path in CASES if kind == "mixtral"}
    assert {"num_experts_per_tok", "router_aux_loss_coef", "router_jitter_noise", "sliding_window"} <= mixtral
    gemma = {".".join(path) for kind, path in CASES if kind == "gemma3"}
    assert "text_config.final_logit_softcapping" in gemma
    assert "text_config.rope_parameters.full_attention.rope_theta" in gemma


@pytest.mark.parametrize(("kind", "path"), CASES, ids=[f"{kind} {'.'.join(path)}" for kind, path in CASES])
def test_any_setting_that_changes_a_number_makes_another_model_and_is_named(kind, path):
    make, given = KINDS[kind]
    config = make(**given)
    saved = changed(stored(config), path)
    found = differences(saved, config)
    assert any(line.startswith(".".join(path) + " ") for line in found), found
    assert differences(stored(config), make.from_dict(saved))  # and the other way round


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_is_its_own_however_it_was_written(kind):
    make, given = KINDS[kind]
    config = make(**given)
    saved = stored(config) | {"transformers_version": "5.1.0", "dtype": "bfloat16", "_name_or_path": "hub/name"}
    saved |= {"use_cache": False, "id2label": {"0": "no", "1": "yes", "2": "?"}, "eos_token_id": [2, 3]}
    assert differences(saved, config) == []


def test_what_an_older_transformers_did_not_write_or_spelt_otherwise_is_not_held_against_a_checkpoint():
    config = LlamaConfig(**SIZES, rope_theta=5e5)
    saved = stored(config)
    for key in ("rope_parameters", "attention_bias", "mlp_bias", "head_dim", "pretraining_tp"):
        del saved[key]
    assert differences(saved | {"rope_theta": 5e5}, config) == []
    assert differences(saved | {"rope_theta": 1e4}, config) == [
        "rope_parameters.rope_theta 10000.0 (the job's is 500000.0)"
    ]


def test_another_family_is_another_model():
    assert differences(stored(MixtralConfig(**SIZES)), LlamaConfig(**SIZES)) == [
        "model_type mixtral (the job's is llama)"
    ]
