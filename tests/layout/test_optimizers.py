"""What optimizers keep of a parameter: shapes and layouts follow the parameter's, stacked or not."""

from __future__ import annotations

import math

import pytest
import torch

from shardwright import Shard
from shardwright.arguments.optimizer_options import OPTIMIZERS
from shardwright.layout.load_recipe import load_recipe
from shardwright.layout.optimizer_state import TITLES, rule_of, state_tensors
from shardwright.layout.plan import make_plan
from shardwright.model.meta_model import load_config, meta_model
from tests.support.jobs import job_of
from tests.support.paths import ROOT


def test_every_optimizer_that_can_be_asked_for_has_a_title_and_state():
    assert TITLES.keys() == OPTIMIZERS.keys()
    assert all(state_tensors(optim, "x.weight", (4, 2), {}, (4, 2)) for optim in OPTIMIZERS)


def test_factors_lose_a_dimension_and_keep_the_axes_of_the_others():
    layout = {"fsdp": Shard(3), "expert": Shard(1)}
    rows, columns = state_tensors("adafactor", "l.*.down_proj", (3, 8, 6, 4), layout, (3, 4, 6, 2))
    assert (rows.shape, rows.layout, rows.local_shape) == ((3, 8, 6), {"expert": Shard(1)}, (3, 4, 6))
    assert (columns.shape, columns.local_shape) == ((3, 8, 4), (3, 4, 2))
    assert columns.layout == {"fsdp": Shard(2), "expert": Shard(1)}


@pytest.mark.parametrize(
    ("name", "shape", "muon", "adafactor"),
    [
        ("model.embed_tokens.weight", (256, 64), "adamw", "factored adafactor"),
        ("lm_head.weight", (256, 64), "adamw", "factored adafactor"),
        ("model.norm.weight", (64,), "adamw", "adafactor"),
        ("model.layers.*.input_layernorm.weight", (2, 64), "adamw", "adafactor"),
        ("model.layers.3.self_attn.q_proj.weight", (64, 64), "muon", "factored adafactor"),
        ("model.layers.0:4:2.self_attn.q_proj.weight", (2, 64, 64), "muon", "factored adafactor"),
        ("model.layers.*.mlp.experts.gate_up_proj", (2, 8, 96, 64), "muon", "factored adafactor"),
        ("model.layers.*.mlp.experts.gate_up_proj_bias", (2, 8, 96), "adamw", "factored adafactor"),
        ("model.layers.*.linear_attn.conv1d.weight", (2, 96, 1, 4), "adamw", "factored adafactor"),
    ],
)
def test_muon_is_for_matrices_of_layers_and_vectors_are_not_factored(name, shape, muon, adafactor):
    assert rule_of("muon", name, shape) == muon
    assert rule_of("adafactor", name, shape) == adafactor


@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_a_stacked_plan_keeps_as_many_bytes_as_its_layers_apart(optim):
    job = job_of("mixtral_ep", optim=optim)
    assert job.stored.totals == job.plan.totals


def test_state_of_mixtral_8x7b_a_parameter():
    recipe = load_recipe("mixtral_ep")
    model = meta_model(load_config(str(ROOT / "docs/configs/mixtral_8x7b.json"), recipe))
    count = sum(parameter.numel() for parameter in model.parameters())
    found = {}
    for optim in OPTIMIZERS:
        plan = make_plan(recipe, model, 8, optim=optim)
        whole = sum(math.prod(kept.shape) for entry in plan.parameters for kept in plan.state_of(entry.name))
        found[optim] = whole * torch.float32.itemsize / count
    assert found == pytest.approx({"adamw": 8, "adafactor": 0.0022, "lion": 4, "muon": 4.022}, abs=1e-3)
