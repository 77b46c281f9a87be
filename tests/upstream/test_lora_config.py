"""A LoraConfig of PEFT's means here what it means to PEFT, or is refused by the field's name."""

from __future__ import annotations

import math

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

from shardwright import UserError
from shardwright.inputs import resolve
from shardwright.model.facts import facts_of
from shardwright.model.lora_options import lora_of
from tests.support.jobs import SIZES


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft 0.21.2
@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {"target_modules": "all-linear"}),
        ("llama", {"target_modules": ["q_proj", "down_proj"]}),
        ("llama", {"target_modules": r".*layers\.1\..*q_proj"}),
        ("mixtral", {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]}),
    ],
)
def test_a_lora_config_means_the_weights_that_it_means_to_peft(family, fields):
    """With PEFT's own `get_peft_model` on the plain model as the judge."""
    config = LlamaConfig(**SIZES) if family == "llama" else MixtralConfig(**SIZES, num_local_experts=2)
    lora = LoraConfig(r=4, lora_alpha=6, use_rslora=True, **fields)
    args, _ = resolve(None, model=config, peft_config=lora)
    assert (args.lora_r, args.lora_alpha, args.use_rslora) == (4, 6.0, True)
    model = AutoModelForCausalLM.from_config(config)
    found = lora_of(args, facts_of(config))
    assert found is not None
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    factors = [4 * math.prod(shapes[name][:-2]) * sum(shapes[name][-2:]) for name in found.targets]
    theirs = {name: p.numel() for name, p in get_peft_model(model, lora).named_parameters() if "lora_" in name}
    assert sum(factors) == sum(theirs.values())
    owners = {name.rpartition(".")[0].removesuffix(".mlp.experts") for name in found.targets}
    assert all(any(owner in name for name in theirs) for owner in owners)


def test_all_linear_of_a_lora_config_takes_experts_too():
    args, _ = resolve(None, model=MixtralConfig(**SIZES), peft_config=LoraConfig(target_modules="all-linear"))
    assert args.lora_target == "all-linear"


def test_what_a_lora_config_says_beside_plain_lora_becomes_options():
    fields = {"rank_pattern": {r".*\.1\..*q_proj": 2}, "modules_to_save": ["lm_head"], "init_lora_weights": "pissa"}
    lora = LoraConfig(target_modules=["q_proj", "v_proj"], lora_dropout=0.1, use_dora=True, **fields)
    args, _ = resolve(None, model=LlamaConfig(**SIZES), peft_config=lora)
    found = lora_of(args, facts_of(LlamaConfig(**SIZES)))
    assert (found.dropout, found.dora, found.start, found.whole) == (0.1, True, "pissa", ("lm_head.weight",))
    assert found.ranks == (("model.layers.1.self_attn.q_proj.weight", 2),)
    assert {name.split(".")[-2] for name in found.targets} == {"q_proj", "v_proj"}


@pytest.mark.parametrize(
    "fields",
    [{"init_lora_weights": "orthogonal"}, {"bias": "all"}, {"trainable_token_indices": [-1]},
     {"modules_to_save": ["x"]}, {"task_type": "SEQ_CLS"}],
)  # fmt: skip
def test_what_a_lora_config_says_that_is_not_done_here_is_refused_by_name(fields):
    with pytest.raises(UserError, match=next(iter(fields))):
        resolve(None, model=LlamaConfig(**SIZES), peft_config=LoraConfig(target_modules=["q_proj"], **fields))
