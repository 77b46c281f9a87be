"""Stacking a decoder's layers: names, shapes, and what can't be stacked. (Its numbers: test_parity.py.)"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import DeepseekV3Config, Gemma2Config, LlamaConfig

from models.layers import stack_layers
from tests.support.jobs import job_of
from trainer.errors import UserError
from trainer.layout.mesh import Mesh
from trainer.layout.recipe import Compute, Recipe
from trainer.model import meta_model

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
# every layer has experts, and their router a buffer that is saved
DEEPSEEK_OF_EXPERTS = DeepseekV3Config(**SMALL, first_k_dense_replace=0, n_routed_experts=8, n_group=1, topk_group=1)


def test_a_stacked_parameter_has_the_recipes_own_name_and_a_dimension_of_layers_in_front():
    model = meta_model(LlamaConfig(**SMALL))
    plain = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert stack_layers(model) == ("model.layers", 3)
    stacked = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert stacked["model.layers.*.self_attn.q_proj.weight"] == (3, *plain["model.layers.1.self_attn.q_proj.weight"])
    assert {name.replace(".0.", ".*.") for name in plain if ".1." not in name and ".2." not in name} == stacked.keys()
    assert sum(p.numel() for p in model.parameters()) == sum(torch.Size(s).numel() for s in plain.values())


def test_the_trace_does_not_grow_with_depth():
    runners = []
    for layers in (2, 6):
        model = meta_model(LlamaConfig(**{**SMALL, "num_hidden_layers": layers}))
        stack_layers(model)
        runners.append(len(list(model.model.layers[: model.config.num_hidden_layers])))
    assert runners == [1, 1]


def test_a_copy_of_a_stacked_model_has_its_names_and_shapes_and_is_independent():
    model = meta_model(LlamaConfig(**SMALL))
    stack_layers(model)
    model.model.layers.configure(lambda name, parameter: {name: parameter}, "full")
    other = copy.deepcopy(model)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    assert {name: p.shape for name, p in other.named_parameters()} == shapes
    assert not {id(module) for module in model.modules()} & {id(module) for module in other.modules()}
    assert not {id(p) for p in model.parameters()} & {id(p) for p in other.parameters()}
    (runner,), (copied,) = model.model.layers, other.model.layers
    assert copied.layer is other.get_submodule("model.layers.*")
    runner.graphs["a call"] = "graphs of this model"
    assert copied.graphs == copy.deepcopy(runner).graphs == {}
    other.model.layers.configure(lambda name, parameter: {}, "none")
    assert runner.prepare("x", 1) == {"x": 1}
    assert runner.partition is not copied.partition


def test_a_model_whose_layers_have_saved_buffers_is_refused_with_the_buffers_name_and_left_as_it_was():
    model = meta_model(DEEPSEEK_OF_EXPERTS)
    names = [name for name, _ in model.named_parameters()]
    with pytest.raises(ValueError, match=r"model.layers.0 has the buffer mlp.gate.e_score_correction_bias"):
        stack_layers(model)
    assert [name for name, _ in model.named_parameters()] == names


def test_a_model_without_a_layer_list_is_refused():
    with pytest.raises(ValueError, match="no module list named 'layers'"):
        stack_layers(nn.Sequential(nn.Linear(2, 2)))


@pytest.mark.parametrize(
    ("config", "cause"),
    [
        (DeepseekV3Config(**SMALL, first_k_dense_replace=1, n_routed_experts=8, n_group=1, topk_group=1), "mlp"),
        (Gemma2Config(**SMALL, head_dim=8), "attention_type|is_sliding|layer_type"),
        (DEEPSEEK_OF_EXPERTS, "the buffer mlp.gate.e_score_correction_bias"),
    ],
    ids=["dense then experts", "sliding then full", "saved buffers"],
)
def test_layers_that_cannot_be_stacked_are_refused_with_the_cause_and_the_way_out(config, cause):
    recipe = Recipe(
        mesh=Mesh(fsdp=-1),
        batch=("fsdp",),
        parameters={},
        optional={".".join("*" * depth): {} for depth in range(1, 9)},
        compute=Compute(scan=True, experts="dense" if hasattr(config, "n_routed_experts") else None),
    )
    with pytest.raises(UserError, match=rf"(?s)({cause}).*Compute\(scan=False"):
        job_of(recipe, config)
