"""What LoRA's options mean, and what of them is refused before anything is read."""

from __future__ import annotations

import json
import math

import pytest
from torch import nn
from transformers import LlamaConfig

from shardwright.arguments.training import TrainingArguments
from shardwright.errors import UserError
from shardwright.files.folder import Folder
from shardwright.job import Job
from shardwright.model.lora_options import check_same
from shardwright.model.peft_config import CONFIG
from shardwright.models.tiny import tiny_config
from tests.support.cases import SMALL
from tests.support.fork_server import run
from tests.support.jobs import job_of
from tests.support.paths import ROOT


def test_all_linear_is_linear_layers_and_fused_experts_but_not_router_head_or_embedding():
    targets = job_of("mixtral_ep", lora_r=4).lora.targets
    assert {name.split(".", 3)[3] for name in targets if name.startswith("model.layers.0.")} == {
        *(f"self_attn.{letter}_proj.weight" for letter in "qkvo"),
        "mlp.experts.gate_up_proj",
        "mlp.experts.down_proj",
    }
    assert all(name.startswith("model.layers.") for name in targets)


@pytest.mark.parametrize(
    ("family", "without"),
    [
        ("deepseek_v4", {"o_a_proj", "indexer"}),  # a product of each group; it chooses keys, without a gradient
        ("glm_moe_dsa", {"indexer"}),
        ("llama4_text", {"router"}),  # linear layers whose forward gives a choice of experts, too
        ("phimoe", {"router"}),
        ("nemotron_h", {"mixer.out_proj"}),  # PEFT refuses factors of it
        ("falcon_mamba", {"out_proj", "dt_proj"}),  # it takes the weight alone
        ("falcon", set()),  # a linear layer's subclass that is one
    ],
)
def test_all_linear_leaves_out_what_is_no_linear_layer_has_no_gradient_or_is_refused_by_peft(family, without):
    args = TrainingArguments(recipe="auto", lora_r=4, sequence_length=32)
    job = Job.resolve(args, lambda: 8, config=tiny_config(family))
    linear = {f"{name}.weight" for name, module in job.model.named_modules() if isinstance(module, nn.Linear)}
    left = linear - {"lm_head.weight", *job.lora.targets}
    assert {word for word in without if any(word in name for name in left)} == without
    assert all(any(word in name for word in without) for name in left)


def test_an_adapter_of_what_has_no_gradient_is_refused_with_a_mend_for_the_way_it_was_given(tmp_path):
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_a_proj", "wq_b"]}
    (tmp_path / CONFIG).write_text(json.dumps(config))
    for options, mend in (
        ({"lora_r": 4, "lora_target": "q_a_proj,wq_b"}, "a --lora_target without it"),
        ({"adapter": str(tmp_path)}, "--lora_r 16 without --adapter"),
    ):
        args = TrainingArguments(recipe="auto", sequence_length=32, **options)
        with pytest.raises(UserError, match=r"indexer\.wq_b\.\S+ takes no part in the loss") as refused:
            Job.resolve(args, lambda: 8, config=tiny_config("glm_moe_dsa"))
        assert mend in refused.value.instead


def test_names_are_ends_of_names_and_the_scale_is_alpha_over_r_or_its_root():
    job = job_of("mixtral_ep", lora_r=4, lora_target="q_proj,experts.down_proj,lm_head", lora_alpha=6.0)
    assert [name for name in job.lora.targets if "layers.0" in name or "head" in name] == [
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.mlp.experts.down_proj",
        "lm_head.weight",
    ]
    assert job.lora.scale(job.lora.targets[0]) == 1.5
    assert job_of("llama_tp", lora_r=4, use_rslora=True).lora.scale("") == 8 / math.sqrt(4)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"lora_alpha": 8.0}, "without a rank all weights are trained"),
        ({"lora_r": 0}, "it is the rank of two factors"),
        ({"lora_r": 4, "adapter": "somewhere"}, "an adapter says itself what it is"),
        ({"lora_r": 4, "adapter_format": "gguf"}, "one of peft, per_expert"),
        ({"lora_r": 4, "base_dtype": "int3"}, "one of float32, bfloat16, int8"),
        ({"base_dtype": "int8"}, "without an adapter all weights are trained"),
        ({"lora_dropout": 0.1}, "without a rank all weights are trained"),
        ({"lora_r": 4, "lora_dropout": 1.0}, "it is a probability"),
        ({"lora_r": 4, "rank_pattern": "q_proj"}, "no NAME=NUMBER"),
        ({"lora_r": 4, "layers_to_transform": "1-3"}, "no numbers of layers"),
        ({"lora_r": 4, "init_lora_weights": "eva"}, "come from the training data, in a pass before"),
        ({"adapter": "somewhere", "modules_to_save": "lm_head"}, "an adapter says itself what it is"),
    ],
    ids=str,
)
def test_options_that_contradict_each_other_are_refused(options, found):
    with pytest.raises(UserError, match=found):
        TrainingArguments(recipe="llama_tp", **options)


def test_targets_are_left_out_by_name_and_by_layer_and_chosen_by_an_expression():
    config = LlamaConfig(**{**SMALL, "num_hidden_layers": 4}, num_attention_heads=4, num_key_value_heads=4)

    def found(**options):
        return [
            name.removeprefix("model.layers.")
            for name in job_of("llama_fsdp", config, lora_r=4, **options).lora.targets
        ]

    two = ["0.self_attn.q_proj.weight", "2.self_attn.q_proj.weight"]
    assert found(lora_target=r".*\.[02]\..*q_proj") == two
    assert found(lora_target="q_proj,v_proj", layers_to_transform="0,2:3", exclude_modules="v_proj") == two
    assert len(found(exclude_modules=r".*\.mlp\..*")) == 4 * 4


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"exclude_modules": "x"}, "it leaves"),
        ({"layers_to_transform": "7"}, "it leaves 0 of"),
        ({"rank_pattern": "x=3"}, "no weight that is adapted has a name that ends in 'x'"),
        ({"modules_to_save": "x"}, "no module of LlamaForCausalLM whose name ends in"),
        ({"lora_target": "("}, "no regular expression"),
    ],
    ids=str,
)
def test_names_that_mean_nothing_are_refused(options, found):
    with pytest.raises(UserError, match=found):
        job_of("llama_fsdp", lora_r=4, **options)


@pytest.mark.parametrize(("target", "found"), [("q_porj", "did you mean 'q_proj'"), (",", "has that name")])
def test_a_target_that_the_model_has_not_is_refused(target, found):
    with pytest.raises(UserError, match=found):
        job_of("mixtral_ep", lora_r=4, lora_target=target)


def test_biases_of_frozen_routers_are_not_moved():
    with pytest.raises(UserError, match=r"biases of the routers, which belong to the frozen model"):
        job_of("deepseek_v3_ep", lora_r=4, router_bias_update_rate=0.001)


def test_a_tied_head_is_refused_and_a_missing_adapter_is_named(tmp_path):
    config = LlamaConfig(**SMALL, num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=True)
    with pytest.raises(UserError, match=r"lm_head.weight\n.*it is tied to model.embed_tokens.weight"):
        job_of("llama_fsdp", config, lora_r=4, lora_target="lm_head")
    with pytest.raises(UserError, match=r"adapter_config.json"):
        job_of("llama_fsdp", adapter=str(tmp_path))


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"lora_r": 8}, "its adapter's r is 4, the run's 8"),
        ({"lora_r": 4, "lora_alpha": 4.0}, "its adapter's alpha is 8.0, the run's 4.0"),
        ({"lora_r": 4, "use_rslora": True}, "its adapter's rslora is False"),
        ({"lora_r": 4, "lora_target": "q_proj"}, "its adapter's targets is"),
        ({"lora_r": 4, "init_lora_weights": "pissa"}, "its adapter's start is , the run's pissa"),
        ({"lora_r": 4, "lora_dropout": 0.1}, "its adapter's dropout is 0.0, the run's 0.1"),
    ],
    ids=str,
)
def test_a_run_goes_on_with_its_own_adapter_alone(tmp_path, options, found):
    saved, other = job_of("llama_tp", lora_r=4), job_of("llama_tp", **options)
    (tmp_path / CONFIG).write_text(json.dumps(saved.as_texts()[CONFIG]))
    check_same(Folder(str(tmp_path)), saved.lora, saved.model)
    with pytest.raises(UserError, match=found):
        check_same(Folder(str(tmp_path)), other.lora, other.model)


def test_plan_py_shows_the_memory_of_an_adapter():
    words = ["--recipe", "mixtral_ep", "--json", "--devices", "16", "--lora_r", "16"]
    done = run(ROOT / "scripts/plan.py", *words, "--model", ROOT / "docs/configs/mixtral_8x7b.json")
    assert done.returncode == 0, done.stderr
    totals = {name: count / 2**30 for name, count in json.loads(done.stdout)["totals"].items()}
    assert 5.4 < totals["parameters_bytes"] < 5.6  # 46.7 B in bfloat16 on 16 devices, and the factors
    assert totals["gradients_bytes"] * 2 == totals["optimizer_bytes"] < 0.11
