"""Copies of a model where its shapes don't divide over all devices: every recipe on whole pods, and by hand."""

import math

import pytest
import torch
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from shardwright.arguments.training import TrainingArguments
from shardwright.errors import UserError
from shardwright.job import Job
from shardwright.layout.auto import UNMADE, auto_recipe
from shardwright.layout.copies import fitted
from shardwright.layout.load_recipe import load_recipe, shipped_recipes
from shardwright.layout.mesh import Mesh
from shardwright.layout.placement import Shard
from shardwright.layout.plan import make_plan
from shardwright.layout.recipe import Recipe
from shardwright.model.meta_model import load_config, meta_model
from shardwright.models.experts.expert_families import experts_modules
from tests.support.paths import ROOT

# recipe → real model → the devices that a copy is sharded over, of 1,024 and of 4,096
REAL = {
    "deepseek_v3_ep": {"deepseek_v3": (256, 256), "kimi_k2": (1024, 1024)},
    "gemma3_fsdp": {"gemma3_27b": (64, 64)},
    "gpt_oss_ep": {"gpt_oss_120b": (128, 128)},
    "llama4_ep": {"llama4_scout": (64, 64)},
    "llama_cp": {"llama3_70b": (256, 256)},
    "llama_fsdp": {"llama3_70b": (256, 256), "llama3_8b": (256, 256)},
    "llama_tp": {"llama3_70b": (1024, 4096)},
    "mixtral_ep": {"mixtral_8x7b": (256, 256)},
    "mixtral_ep_tp": {"mixtral_8x7b": (1024, 4096)},
    "mixtral_fsdp": {"mixtral_8x7b": (256, 256)},
    "qwen3_moe_ep": {"qwen3_235b_a22b": (128, 128), "qwen3_30b_a3b": (128, 128), "glm_4_5": (512, 512)},
    "qwen3_next_ep": {"qwen3_next_80b_a3b": (128, 128)},
}


class Small(nn.Module):
    def __init__(self, words: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, 256)
        self.head = nn.Linear(256, words)


def small(words: int) -> nn.Module:
    with torch.device("meta"):
        return Small(words)


def of_real_width(model: str, written: Recipe) -> PreTrainedModel:
    """The real model's first four layers, on meta, in which all kinds of its layers are."""
    config = load_config(str(ROOT / f"docs/configs/{model}.json"), written)
    config.num_hidden_layers = 4
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:4]
    return meta_model(config)


def recipe(**axes: int) -> Recipe:
    cut = {"fsdp": Shard(0), "expert": Shard(0)}
    parameters = {"embed.weight": cut, "head.weight": cut, "head.bias": {}}
    mesh = Mesh(**(axes or {"fsdp": -1, "expert": 4}))
    return Recipe(mesh=mesh, batch=("fsdp", "expert"), parameters=parameters, activations={"head": cut}, name="small")


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_recipe_lays_out_its_real_model_on_1024_and_4096_devices(name: str) -> None:
    for model, spans in REAL[name].items():
        written = load_recipe(name)
        real = of_real_width(model, written)
        for devices, span in zip((1024, 4096), spans, strict=True):
            used, why = fitted(written, real, devices)
            plan = make_plan(used, real, devices)
            assert plan.devices == devices
            assert plan.mesh.get("data", 1) == devices // span
            assert (used is written, why == "") == (span == devices, span == devices)
            if why:
                assert why.startswith(f"{devices // span} copies of the model, each over {span} devices: dimension ")
                alone = make_plan(written, real, span)  # a copy lies as the model does on so many devices
                assert {**alone.mesh, "data": devices // span} == plan.mesh
                assert alone.totals == plan.totals
            assert not any("data" in entry.layout for entry in plan.parameters)
            assert plan.totals["parameters_bytes"] * span >= sum(4 * math.prod(p.shape) for p in plan.parameters)
            # a row for each device, or for each group that shares its rows
            sharers = math.prod(plan.mesh.get(axis, 1) for axis in ("tensor", "sequence"))
            assert plan.batch_shards * sharers == devices


def test_where_all_divides_no_recipe_is_changed_and_few_devices_hold_no_copies() -> None:
    written = recipe()
    assert fitted(written, small(1024), 1024)[0] is written
    assert fitted(written, small(192), 64)[0] is written
    for devices in (8, 64, 127):  # 5 words don't divide, and are refused as ever
        assert fitted(written, small(5), devices)[0] is written
    assert fitted(written, small(65), 1024)[0] is written  # not over 64 devices either
    with pytest.raises(UserError, match="65 is not divisible by 1024"):
        make_plan(written, small(65), 1024)


def test_the_fewest_copies_that_divide_are_made_of_the_axis_that_takes_what_is_left() -> None:
    used, why = fitted(recipe(), small(3 * 128), 1024)
    assert why == (
        "8 copies of the model, each over 128 devices: dimension 0 of embed.weight, 384, is not divisible by "
        "fsdp=256 × expert=4"
    )
    plan = make_plan(used, small(3 * 128), 1024)
    assert list(plan.mesh.items()) == [("data", 8), ("fsdp", 32), ("expert", 4)]
    assert plan["embed.weight"].local_shape == (3, 256)
    assert plan.batch == ("data", "fsdp", "expert")
    assert used.activations == {"head": dict.fromkeys(("data", "fsdp", "expert"), Shard(0))}
    assert used.parameters == recipe().parameters


def test_sizes_that_were_asked_for_are_kept_and_the_refusal_has_those_that_fit() -> None:
    asked = recipe(fsdp=256, expert=4)
    assert fitted(asked, small(3 * 128), 1024)[0] is asked
    with pytest.raises(UserError) as error:
        make_plan(asked, small(3 * 128), 1024)
    assert error.value.instead.startswith("--mesh data=8,fsdp=32,expert=4, which is 8 copies of the model; or\n")
    mended = recipe().with_mesh("data=8,fsdp=32,expert=4")
    assert make_plan(mended, small(3 * 128), 1024) == make_plan(fitted(recipe(), small(384), 1024)[0], small(384), 1024)


def test_a_job_is_laid_out_so_and_says_why() -> None:
    values = {**(load_recipe("llama_fsdp").model or {}), "vocab_size": 192, "num_hidden_layers": 1}
    config = AutoConfig.for_model(**values)
    args = TrainingArguments(recipe="llama_fsdp", max_steps=1, per_device_train_batch_size=1)
    job = Job.resolve(args, lambda: 128, config=config)
    assert job.plan.mesh == {"data": 2, "fsdp": 64}
    assert job.copies.startswith("2 copies of the model, each over 64 devices: dimension 0 of ")
    assert job.rows == 128
    assert job.as_texts()["recipe.json"]["mesh"]["axes"] == {"data": 2, "fsdp": -1}
    assert Job.resolve(args, lambda: 64, config=config).copies == ""


@pytest.mark.parametrize(("model", "mesh"), [("gpt_oss_120b", {"data": 4, "fsdp": 64, "expert": 4}),
                                             ("gemma3_27b", {"data": 4, "fsdp": 256}),
                                             ("mixtral_8x7b", {"fsdp": 256, "expert": 4})])  # fmt: skip
def test_the_recipe_made_for_a_model_has_copies_where_they_leave_less_on_a_device(model, mesh) -> None:
    real = of_real_width(model, UNMADE)
    made = auto_recipe(real, experts_modules(real), devices=1024).recipe
    plan, fewer = make_plan(made, real, 1024), auto_recipe(real, experts_modules(real), devices=256).recipe
    assert plan.mesh == mesh
    assert sum(plan.totals.values()) <= sum(make_plan(fewer, real, 256).totals.values())
