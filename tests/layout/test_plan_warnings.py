"""Warnings about a plan: each names a waste that the plan allows, and no shipped recipe has one."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from torch import nn

from shardwright.layout.load_recipe import load_recipe
from shardwright.layout.mesh import Mesh
from shardwright.layout.placement import Shard
from shardwright.layout.plan import make_plan
from shardwright.layout.plan_warnings import plan_warnings
from shardwright.layout.recipe import Recipe
from shardwright.model.meta_model import load_config, meta_model
from tests.support.fork_server import run
from tests.support.paths import ROOT

# recipe → a published model of its family
SERVED = {
    "deepseek_v3_ep": "deepseek_v3",
    "gemma3_fsdp": "gemma3_27b",
    "gpt_oss_ep": "gpt_oss_120b",
    "llama4_ep": "llama4_scout",
    "llama_cp": "llama3_8b",
    "llama_fsdp": "llama3_70b",
    "llama_tp": "llama3_70b",
    "mixtral_ep": "mixtral_8x7b",
    "mixtral_ep_tp": "mixtral_8x7b",
    "mixtral_fsdp": "mixtral_8x7b",
    "qwen3_moe_ep": "qwen3_235b_a22b",
    "qwen3_next_ep": "qwen3_next_80b_a3b",
}
ROWS = {"up.weight": {"fsdp": Shard(0)}, "up.bias": {}}


def warned(parameters=ROWS, width=1024, devices=8, batch=("fsdp",), **changed) -> list[str]:
    with torch.device("meta"):
        model = nn.ModuleDict({"up": nn.Linear(1024, width)})
    mesh = changed.pop("mesh", Mesh(fsdp=-1, expert=4))
    return list(
        plan_warnings(make_plan(Recipe(mesh=mesh, batch=batch, parameters=parameters, **changed), model, devices))
    )


def test_an_axis_that_splits_nothing_is_named_with_its_size() -> None:
    assert warned() == ["axis expert splits nothing: 4 devices along it hold and do the same"]


@pytest.mark.parametrize(
    "use",
    [
        {"batch": ("fsdp", "expert")},
        {"parameters": ROWS | {"up.bias": {"expert": Shard(0)}}},
        {"activations": {"up": {"expert": Shard(1)}}},
        {"mesh": Mesh(fsdp=8, expert=1)},
        {"mesh": Mesh(fsdp=2, sequence=4)},
    ],
    ids=["rows", "a weight", "an activation", "of size 1", "tokens of a row"],
)
def test_an_axis_with_any_use_is_not_named(use: dict) -> None:
    assert warned(**use) == []


def test_experts_over_fsdp_beside_an_idle_expert_axis_are_warned_of() -> None:
    shipped = load_recipe("mixtral_ep")
    lines = {p: {"fsdp": layout["fsdp"]} if layout else {} for p, layout in shipped.parameters.items()}
    lines["model.layers.*.mlp.experts.*_proj"] = {"fsdp": Shard(0)}
    recipe = replace(shipped, parameters=lines, optional={}, activations={}, batch=("fsdp",))
    plan = make_plan(recipe, meta_model(load_config(None, recipe)), 8)
    assert [text.partition(":")[0] for text in plan_warnings(plan)] == ["axis expert splits nothing"]


def test_a_replicated_line_is_warned_of_above_one_percent_of_a_device_and_sixteen_mebibytes() -> None:
    whole, fsdp = {"up.weight": {}, "up.bias": {"fsdp": Shard(0)}}, Mesh(fsdp=-1)
    assert warned(whole, mesh=fsdp, width=1016) == []  # × 1,024 × (weight, gradient, two moments) × 4 bytes
    (text,) = warned(whole, mesh=fsdp, width=1032)
    assert text == "up.weight is replicated: with gradients and state 16.12 MiB of 16.13 MiB on every device"
    assert warned(whole, mesh=fsdp, width=1032, devices=1) == []
    assert warned(mesh=fsdp, width=8_000_000) == []  # the bias takes 122 MiB, of 15 GiB
    assert warned(mesh=fsdp, width=8_000_000, devices=64)[0].startswith("up.bias is replicated")


@pytest.mark.parametrize("name", SERVED)
def test_no_shipped_recipe_is_warned_of_on_its_own_model_or_a_published_one(name: str) -> None:
    recipe = load_recipe(name)
    own, real = (load_config(model, recipe) for model in (None, str(ROOT / f"docs/configs/{SERVED[name]}.json")))
    assert list(plan_warnings(make_plan(recipe, meta_model(own), 8))) == []
    assert list(plan_warnings(make_plan(recipe, meta_model(real), 64))) == []


def test_every_shipped_recipe_is_among_them() -> None:
    assert SERVED.keys() == {path.stem for path in (ROOT / "recipes").glob("[a-z]*.py")}


def test_the_command_prints_warnings_of_the_plan_and_of_the_run() -> None:
    words = ["--recipe", "llama_fsdp", "--max_steps", "10", "--warmup_steps", "12"]
    text = "learning rate: warm-up of 12 steps in a run of 10: it never reaches its peak"
    printed = run(ROOT / "scripts/plan.py", *words, env={**os.environ, "COLUMNS": "160"})
    assert (printed.returncode, printed.stdout.splitlines()[-1]) == (0, f"warning: {text}")
