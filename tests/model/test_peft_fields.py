"""Each field of peft's LoraConfig is honoured as PEFT itself does, says nothing, or is refused by its name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, LoraRuntimeConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedModel

from shardwright.arguments.training import TrainingArguments
from shardwright.errors import UserError
from shardwright.files.folder import Folder
from shardwright.model.adapted_weights import Part
from shardwright.model.facts import facts_of
from shardwright.model.lora_options import lora_of
from shardwright.model.peft_config import (
    CONFIG,
    INERT,
    PLAIN,
    PLAIN_AT_THE_START,
    READ,
    WEIGHTS,
    options_of,
    read_config,
)
from shardwright.models.adapters.lora import A0, B0
from shardwright.weights.adapter_weights import merge_factors, seeded_factors
from shardwright.weights.peft_layout import as_peft, factor_shapes, peft_keys
from shardwright.weights.peft_read import open_adapter
from shardwright.weights.weight_sources import state_dict_weights
from tests.support.adapters import in_a_file

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # peft 0.21.2
    # what PEFT says of values that have no effect alone
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning"),
]
PLAIN_ONE: dict[str, Any] = {"r": 2, "lora_alpha": 6, "target_modules": ["q_proj"]}
# a field → values other than its default, to be tried one at a time
VALUES: dict[str, list[Any]] = {
    "peft_type": ["IA3"],
    "r": [3],
    "lora_alpha": [5],
    "use_rslora": [True],
    "target_modules": [
        "all-linear", ["k_proj", "o_proj"], r".*(q|o)_proj", ["lm_head"], None, [], ["embed_tokens", "q_proj"],
        ["q_proj", "gate"], r".*(q_proj|gate)", ["q_proj", "w1", "w2", "w3"], ["q_proj", "x"],
    ],
    "target_parameters": [["experts.down_proj"], ["gate.weight"], ["k_proj.weight"], ["experts.x"]],
    "task_type": ["SEQ_CLS"],
    "auto_mapping": [{"base_model_class": "Other"}],
    "peft_version": ["9.9"],
    "base_model_name_or_path": ["someone/else"],
    "revision": ["other"],
    "inference_mode": [True],
    "exclude_modules": [["layers.0.self_attn.q_proj"], r".*1\.self_attn\.q_proj"],
    "lora_dropout": [0.5, 1.5],
    "fan_in_fan_out": [True],
    "bias": ["all", "lora_only"],
    "modules_to_save": [["lm_head"], ["embed_tokens", "norm"], ["gate"], ["x"], ["layers.0.self_attn"]],
    "init_lora_weights": [
        False, "gaussian", "eva", "olora", "pissa", "pissa_niter_4", "corda", "loftq", "orthogonal", "mica", "lora_ga",
    ],
    "layers_to_transform": [[1], 0, [7]],
    "layers_pattern": ["layers", ["blocks", "layers"]],
    "rank_pattern": [{"q_proj": 3}, {r".*\.1\.self_attn.q": 4, r"1\..*q_proj": 5}, {"q_proj": 0}, {"proj": 3}],
    "alpha_pattern": [{"q_proj": 3}, {"layers.0.self_attn.q_proj": 1.5}],
    "megatron_config": [{"tensor_model_parallel_size": 1}],
    "megatron_core": ["other.core"],
    "trainable_token_indices": [
        [9, 3], {"embed_tokens": [2, 1], "lm_head": [5]}, {"gate": [1]}, [40], [1, 1],
    ],
    "loftq_config": [{"loftq_bits": 4, "loftq_iter": 1}],
    "eva_config": [{"rho": 2.0}],
    "corda_config": [{"corda_method": "kpm"}],
    "lora_ga_config": [{"direction": "ArBr"}],
    "use_dora": [True],
    "velora_config": [{"num_groups": 2}],
    "alora_invocation_tokens": [[1, 2]],
    "use_qalora": [True],
    "qalora_group_size": [8],
    "monteclora_config": [{"num_samples": 2}],
    "layer_replication": [[[0, 2], [1, 2]]],
    "runtime_config": [{"ephemeral_gpu_offload": True}],
    "lora_bias": [True],
    "use_bdlora": [{"nblocks": 2}],
    "arrow_config": [{"top_k": 2}],
    "kasa_config": [{"svd_rank": 2}],
    "ensure_weight_tying": [True],
}  # fmt: skip
# fields beside one that says nothing without
BESIDE: dict[str, dict[str, Any]] = {"layers_pattern": {"layers_to_transform": [1]}}
CASES = [pytest.param(key, value, id=f"{key}={value}"[:60]) for key, values in VALUES.items() for value in values]


@pytest.fixture(scope="module")
def plain() -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_local_experts": 2}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    return AutoModelForCausalLM.from_config(MixtralConfig(**sizes, **heads))


def copy_of(model: PreTrainedModel) -> PreTrainedModel:
    made = AutoModelForCausalLM.from_config(model.config)
    made.load_state_dict(model.state_dict())
    return made


def tried(read: Callable[[], Any]) -> tuple[Any, str]:
    """Returns the result of ``read``, or the words of its refusal."""
    try:
        return read(), ""
    except UserError as error:
        return None, str(error)


def test_a_field_that_a_newer_peft_has_is_in_the_table_and_is_tried():
    known = {*READ, *INERT, *PLAIN, *PLAIN_AT_THE_START}
    assert {field.name for field in fields(LoraConfig)} == known == VALUES.keys()


@pytest.mark.parametrize(("key", "value"), CASES)
def test_a_new_adapter_has_pefts_own_factors_or_is_refused_by_the_field(plain, key, value):
    fields_of = LoraConfig(**PLAIN_ONE).to_dict() | BESIDE.get(key, {}) | {key: value}
    options, refused = tried(lambda: options_of(fields_of, Part(plain, plain)))
    if refused:
        assert ("target" if key.startswith("target_") else key) in refused
        return
    assert key in (*READ, *INERT, "init_lora_weights")
    lora = lora_of(TrainingArguments(**options), facts_of(plain.config))
    keys, shapes = peft_keys(lora, plain, {}), factor_shapes(lora, plain)
    ours = {key: as_peft(key, name, torch.empty(shapes[name])).shape for name, key in keys.items()}
    value = LoraRuntimeConfig(**value) if key == "runtime_config" else value
    model = get_peft_model(copy_of(plain), LoraConfig(**PLAIN_ONE | BESIDE.get(key, {}) | {key: value}))
    theirs = {in_a_file(name): p.shape for name, p in model.named_parameters() if p.requires_grad}
    if value != "all-linear":  # PEFT's leaves out the experts, which transformers 4 had as linear layers
        assert ours == theirs
    scales = {m.scaling["default"] for m in model.modules() if isinstance(m, LoraLayer)}
    assert scales == {lora.scale(name) for name in lora.targets}


@pytest.mark.parametrize(("key", "value"), CASES)
def test_an_adapter_that_peft_saved_is_what_peft_makes_of_it_or_is_refused_by_the_field(plain, tmp_path, key, value):
    """The config says what the files do not: PEFT, which loads them onto the plain model, is the judge."""
    given = {key: value} if key in READ and key != "peft_type" else {}
    try:
        config = LoraConfig(**PLAIN_ONE | BESIDE.get(key, {}) | given)
        model = get_peft_model(copy_of(plain), config)
    except Exception:  # then PEFT saves no such adapter
        assert tried(lambda: options_of(LoraConfig(**PLAIN_ONE).to_dict() | {key: value}, Part(plain, plain)))[1]
        return
    model.save_pretrained(tmp_path, save_embedding_layers=False)
    torch.manual_seed(1)
    save_file({name: torch.randn_like(t) for name, t in load_file(tmp_path / WEIGHTS).items()}, tmp_path / WEIGHTS)
    saved = json.loads((tmp_path / CONFIG).read_text())
    if key not in READ or key == "peft_type":
        (tmp_path / CONFIG).write_text(json.dumps(saved | {key: value}))
    folder = Folder(str(tmp_path))
    lora, refused = tried(lambda: read_config(folder, Part(plain, plain)))
    if refused:
        assert key in refused or "rank_pattern" in refused  # so PEFT saves experts that transformers 4 had apart
        return
    base, opened = state_dict_weights(plain.state_dict()), open_adapter(folder, lora, plain, {})
    begun = seeded_factors(facts_of(plain.config).adapted(lora), lora, 0, base)
    ours = merge_factors(base, lambda n: (begun if n.endswith((A0, B0)) else opened)(n), lora, plain)
    theirs = PeftModel.from_pretrained(copy_of(plain), tmp_path).merge_and_unload().state_dict()
    for name, values in theirs.items():
        found = ours(name)
        torch.testing.assert_close(found[tuple(slice(0, n) for n in found.shape)], values, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("value", "fits"), [(False, True), (None, True), (0.5, False), ("soft", False)])
def test_a_field_of_a_newer_peft_is_refused_unless_it_says_that_it_is_not_used(plain, tmp_path: Path, value, fits):
    (tmp_path / CONFIG).write_text(json.dumps(LoraConfig(**PLAIN_ONE).to_dict() | {"use_next": value}, default=list))
    if fits:
        assert read_config(Folder(str(tmp_path)), Part(plain, plain)).r == 2
        return
    with pytest.raises(UserError, match="use_next="):
        read_config(Folder(str(tmp_path)), Part(plain, plain))
