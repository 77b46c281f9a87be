"""Job: resolved by itself, once, and checked anew wherever it is changed."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from shardwright.arguments.training import TrainingArguments
from shardwright.errors import UserError
from shardwright.job import Job
from shardwright.layout.mesh import Mesh
from shardwright.model import meta_model
from shardwright.step.build import place_model
from shardwright.weights.weight_sources import seeded_init
from shardwright.xla.device_mesh import build_mesh
from shardwright.xla.sharding import fetch
from tests.support.jobs import job_of
from tests.support.paths import ROOT

RESOLVED_ALONE = """
import sys
from shardwright.arguments.training import TrainingArguments
from shardwright.job import Job
for name in sys.argv[1:]:
    print(name, Job.resolve(TrainingArguments(recipe=name), lambda: 8).plan.devices)
"""
RECIPES = [path.stem for path in sorted((ROOT / "recipes").glob("[!_]*.py"))]


def test_a_job_needs_nothing_that_only_a_run_imports():
    done = subprocess.run(
        [sys.executable, "-c", RESOLVED_ALONE, *RECIPES],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == [word for name in RECIPES for word in (name, "8")], done.stderr


def test_transformers_builds_the_model_once_for_a_job(monkeypatch):
    made = []
    original = AutoModelForCausalLM.from_config
    monkeypatch.setattr(
        AutoModelForCausalLM, "from_config", lambda *args, **kwargs: made.append(1) or original(*args, **kwargs)
    )
    Job.resolve(TrainingArguments(recipe="mixtral_ep"), lambda: 8)
    assert len(made) == 1


def test_a_neighbour_is_checked_like_the_job_itself():
    job = job_of("mixtral_ep", sequence_length=64)
    wider = replace(job, args=replace(job.args, per_device_train_batch_size=3, gradient_accumulation_steps=2))
    assert (wider.rows, wider.micro_batch_rows, wider.tokens) == (48, 24, 48 * 64)
    assert replace(job, devices=16).plan.mesh == {"fsdp": 4, "expert": 4}
    with pytest.raises(UserError, match="its sizes multiply to 3"):
        replace(job, recipe=replace(job.recipe, mesh=Mesh(fsdp=1, expert=3)))
    other = replace(job.recipe, compute=replace(job.recipe.compute, attention="sdpa"))
    with pytest.raises(UserError, match="tokens would see other documents"):
        replace(job, recipe=other, args=replace(job.args, isolate_documents=True))


def test_a_model_of_modules_without_end_is_refused_while_it_is_built(monkeypatch):
    monkeypatch.setattr(meta_model, "MOST_MODULES", 50)
    with pytest.raises(UserError, match="a model of more than 50 modules"):
        Job.resolve(TrainingArguments(recipe="mixtral_ep"), lambda: 8)
    monkeypatch.undo()
    assert Job.resolve(TrainingArguments(recipe="mixtral_ep"), lambda: 8).parameters  # and the watch is over


def test_a_job_can_be_built_twice_for_building_leaves_it_as_it_was():
    job = job_of("llama_fsdp")
    mesh = build_mesh(job.recipe.mesh)
    one, two = (place_model(job, mesh, seeded_init(job.model, seed=0)).parameters for _ in range(2))
    assert all(torch.equal(fetch(one[name].detach()), fetch(two[name].detach())) for name in one)
    assert all(parameter.is_meta for model in (job.model, job.assembled) for parameter in model.parameters())


@pytest.mark.parametrize(
    ("recipe", "option", "found"),
    [
        ("llama_fsdp", "router_z_loss_coef", "LlamaForCausalLM has no experts"),
        ("llama_fsdp", "router_bias_update_rate", "LlamaForCausalLM has no experts"),
        ("mixtral_ep", "router_bias_update_rate", "the routers of MixtralForCausalLM add nothing to their scores"),
    ],
)
def test_what_is_asked_of_routers_that_are_not_there_is_refused_by_the_options_name(recipe, option, found):
    with pytest.raises(UserError, match=found) as refused:
        job_of(recipe, **{option: 0.001})
    assert refused.value.asked == f"--{option} 0.001"
