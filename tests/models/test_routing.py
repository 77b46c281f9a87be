"""Routers seen from outside, in families that make their scores and keep their biases in different ways."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import init_empty_weights
from transformers import AutoConfig, AutoModelForCausalLM

from shardwright.models.experts.expert_families import experts_modules
from shardwright.models.experts.routing import RouterLosses, _Scoring, count, routers, selection_biases
from shardwright.models.layers import side_outputs

H, E, K = 16, 8, 2


def small(kind: str, **more: Any) -> Any:
    """A config of few layers, narrow enough for any family's own checks."""
    sizes = {"hidden_size": 64, "intermediate_size": 32, "moe_intermediate_size": 32, "vocab_size": 64}
    sizes |= {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    return AutoConfig.for_model(kind, **sizes, **more)


def found(kind: str, **more: Any) -> tuple[int, int, set[str]]:
    """How many experts modules and routers a small model has, and the last parts of its biases' names."""
    with init_empty_weights(include_buffers=True):
        model = AutoModelForCausalLM.from_config(small(kind, **more))
    experts = experts_modules(model)
    return len(experts), len(routers(model)), {name.rpartition(".")[2] for name in selection_biases(model, experts)}


@pytest.mark.parametrize(
    ("kind", "layers", "bias", "more"),
    [
        ("mixtral", 3, None, {}),
        ("gpt_oss", 3, None, {}),  # its routers have a bias that is trained
        ("deepseek_v3", 2, "e_score_correction_bias", {"first_k_dense_replace": 1}),
        ("glm4_moe", 2, "e_score_correction_bias", {"first_k_dense_replace": 1}),
        ("minimax_m2", 3, "e_score_correction_bias", {}),  # beside the router
        ("lfm2_moe", 2, "expert_bias", {"num_dense_layers": 1, "layer_types": ["conv", "conv", "full_attention"]}),
        ("afmoe", 2, "expert_bias", {"num_dense_layers": 1}),  # a frozen parameter
        ("zaya", 3, None, {}),  # one number more than there are experts
    ],
)
def test_routers_and_what_they_add_for_selection_are_found_by_structure(kind, layers, bias, more):
    assert found(kind, **more) == (layers, layers, {bias} - {None})


def router(name: str, config: Any) -> torch.nn.Module:
    """A family's router with random weights, of E experts."""
    torch.manual_seed(0)
    module, _, kind = name.partition(".")
    made = getattr(importlib.import_module(f"transformers.models.{module}.modeling_{module}"), kind)(config)
    for tensor in (*made.parameters(), *(b for b in made.buffers() if b.is_floating_point())):
        torch.nn.init.normal_(tensor)
    return made


SIZES = {"hidden_size": H, "num_experts_per_tok": K, "num_local_experts": E, "num_experts": E}
GROUPS = {"routed_scaling_factor": 2.0, "n_group": 4, "topk_group": 2, "norm_topk_prob": True}


@pytest.mark.parametrize(
    ("name", "more", "score"),
    [
        ("mixtral.MixtralTopKRouter", {}, lambda t: t.softmax(-1)),
        ("gpt_oss.GptOssTopKRouter", {}, lambda t: t.softmax(-1)),  # of the k highest logits alone
        ("deepseek_v3.DeepseekV3TopkRouter", GROUPS, torch.sigmoid),
        ("deepseek_v4.DeepseekV4TopKRouter", GROUPS | {"scoring_func": "sqrtsoftplus"}, lambda t: F.softplus(t).sqrt()),
        ("kolibri1.Kolibri1TopKRouter", GROUPS, torch.sigmoid),  # of the chosen logits alone
    ],
)
def test_scores_are_made_of_logits_as_the_router_makes_them(name, more, score):
    made = router(name, SimpleNamespace(**SIZES, **more))
    with _Scoring() as scoring:
        logits = made(torch.randn(1, 5, H))[0]
    assert scoring.before(logits) is logits
    torch.testing.assert_close(scoring.scores(logits), score(logits).float())


def test_logits_are_found_behind_a_router_that_returns_its_scores():
    logits = torch.randn(5, E)
    with _Scoring() as scoring:
        scores = F.softmax(logits, dim=-1)
    assert scoring.before(scores) is logits


def test_counts_leave_out_padding_and_are_by_group():
    index = torch.tensor([[0, 1], [0, 2], [3, 0], [3, 1]])
    experts = SimpleNamespace(num_experts=4)
    with side_outputs.given(torch.tensor([[1.0, 1.0], [1.0, 0.0]])):
        _, recorded = side_outputs.collect_metrics(lambda: count(experts, index, index == 0))
    assert recorded[" load"][0].tolist() == [[3, 1, 1, 1]]
    assert recorded[" dropped"][0].tolist() == [3]


@pytest.mark.parametrize("wide", [False, True])
def test_a_balanced_router_has_the_least_balance_loss_which_is_one_a_layer(wide):
    even = torch.full((2, 3, E), 2.0)  # [layers, rows, E]
    skewed = torch.zeros(2, 3, E).index_fill(2, torch.tensor([0]), 2.0 * E)
    for each, least in ((even, True), (skewed, False)):
        recorded = {"router picked": [each * K], "router share": [each]}
        value = RouterLosses(balance=1, batch_wide=wide).values(recorded, torch.ones(3, 2 * E))["balance"].item()
        assert value == pytest.approx(2 if least else 2 * E)
