"""What optimizers keep of a parameter: shapes and layouts follow the parameter's, stacked or not."""

from __future__ import annotations

import math
from types import MappingProxyType

import pytest
import torch

from shardwright import Shard
from shardwright.layout.load_recipe import load_recipe
from shardwright.layout.plan import ParameterPlan, make_plan
from shardwright.model.meta_model import load_config, meta_model
from shardwright.optimizers import OPTIMIZERS
from tests.support.jobs import job_of
from tests.support.paths import ROOT


def entry_of(name, shape, layout=MappingProxyType({})):
    return ParameterPlan(name, name, shape, torch.bfloat16, dict(layout), {"fsdp": 2, "expert": 2})


def test_factors_lose_a_dimension_and_keep_the_axes_of_the_others():
    entry = entry_of("l.*.down_proj", (3, 8, 6, 4), {"fsdp": Shard(3), "expert": Shard(1)})
    rows, columns = entry.state("adafactor", torch.float32)
    assert (rows.dtype, rows.bytes_per_device) == (torch.float32, 4 * 3 * 4 * 6)
    assert (rows.shape, rows.layout, rows.local_shape) == ((3, 8, 6), {"expert": Shard(1)}, (3, 4, 6))
    assert (columns.shape, columns.local_shape) == ((3, 8, 4), (3, 4, 2))
    assert columns.layout == {"fsdp": Shard(2), "expert": Shard(1)}


@pytest.mark.parametrize(
    ("name", "shape", "by_muon", "factored"),
    [
        ("model.embed_tokens.weight", (256, 64), False, True),
        ("lm_head.weight", (256, 64), False, True),
        ("model.norm.weight", (64,), False, False),
        ("model.layers.*.input_layernorm.weight", (2, 64), False, False),
        ("model.layers.3.self_attn.q_proj.weight", (64, 64), True, True),
        ("model.layers.0:4:2.self_attn.q_proj.weight", (2, 64, 64), True, True),
        ("model.layers.*.mlp.experts.gate_up_proj", (2, 8, 96, 64), True, True),
        ("model.layers.*.mlp.experts.gate_up_proj_bias", (2, 8, 96), False, True),
        ("model.layers.*.linear_attn.conv1d.weight", (2, 96, 1, 4), False, True),
    ],
)
def test_muon_is_for_matrices_of_layers_and_vectors_are_not_factored(name, shape, by_muon, factored):
    assert entry_of(name, shape).optimizer("muon") is OPTIMIZERS["muon" if by_muon else "adamw"]
    assert len(entry_of(name, shape).state("adafactor", torch.float32)) == 1 + factored


@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_a_stacked_plan_keeps_as_many_bytes_as_its_layers_apart(optim):
    job = job_of("mixtral_ep", optim=optim)
    assert job.stored.totals == job.plan.totals


def test_state_of_mixtral_8x7b_a_parameter():
    recipe = load_recipe("mixtral_ep")
    model = meta_model(load_config(str(ROOT / "docs/configs/mixtral_8x7b.json"), recipe))
    count = sum(parameter.numel() for parameter in model.parameters())
    found = {}
    for optim in ("adamw", "adafactor", "lion", "muon"):
        plan = make_plan(recipe, model, 8, optim=optim)
        whole = sum(math.prod(kept.shape) for entry in plan.parameters for kept in plan.state_of(entry.name))
        found[optim] = whole * torch.float32.itemsize / count
    assert found == pytest.approx({"adamw": 8, "adafactor": 0.0022, "lion": 4, "muon": 4.022}, abs=1e-3)
