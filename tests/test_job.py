"""Job: resolved by itself, once, and checked anew wherever it is changed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
import torch
from datasets import Dataset
from rich.console import Console
from transformers import AutoModelForCausalLM

from shardwright.arguments.training import Settings, TrainingArguments
from shardwright.errors import UserError
from shardwright.inputs import resolve
from shardwright.job import Job
from shardwright.layout.auto import UNMADE
from shardwright.layout.mesh import Mesh
from shardwright.model import attention_probe, facts, meta_model, unused_parameters
from shardwright.model.meta_model import load_config
from shardwright.models.layers import decoder_layers
from shardwright.run import prepare
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


def test_a_router_loss_that_the_model_has_not_and_options_that_mean_nothing_are_told():
    job = job_of("llama_fsdp", eval_steps=3)
    told = replace(job, recipe=job.recipe.with_compute("router_loss=true")).notices
    assert told == [
        "router_loss has no effect: transformers' LlamaForCausalLM has none",
        "--eval_steps has no effect without --eval_strategy",
    ]


SAMPLES = Dataset.from_list([{"prompt": "What is 1 + 1?", "completion": "2"}])


@pytest.mark.parametrize("name", ["mixtral_8x7b", "deepseek_v3"])
@pytest.mark.parametrize(
    ("options", "samples", "tried"),
    [
        ({}, None, {}),
        ({"compute": "remat=auto", "isolate_documents": True}, None, {"a small model": 1}),
        ({"lora_r": 4}, SAMPLES, {"a small model": 1}),
        ({"packing": False, "compute": "remat=auto"}, SAMPLES, {"a small model": 1}),
        ({"compute": "scan=False"}, None, {"layers to stack": 0}),
    ],
)
def test_a_run_is_prepared_with_one_model_that_is_built_and_tried_once(
    monkeypatch, tmp_path, name, options, samples, tried
):
    config = load_config(f"docs/configs/{name}.json", UNMADE)
    config.num_hidden_layers = 5
    counts = Counter()

    def count(what: str, owner: Any, function: str, counted: Callable[..., bool] = lambda *args: True) -> None:
        original = getattr(owner, function)

        def counting(*args: Any, **kwargs: Any) -> Any:
            counts[what] += counted(*args)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, function, counting)

    monkeypatch.setattr(facts, "_known", {})
    whole = lambda config: config.hidden_size > 2048  # noqa: E731
    count("the model", AutoModelForCausalLM, "from_config", whole)
    count("attention", attention_probe, "_runs_on_meta")
    count("a small model", attention_probe, "_difference")
    count("a loss", unused_parameters, "_loss")
    count("layers to stack", decoder_layers, "group")
    args = TrainingArguments(recipe="auto", sequence_length=64, output_dir=str(tmp_path / "out"), **options)
    args, inputs = resolve(args, model=config, train_dataset=samples)
    start = prepare(args, inputs, [], Console(quiet=True))
    assert start.job.args.isolate_documents == ("a small model" in tried)
    assert start.job.trained
    assert Job.resolve(args, lambda: 64, config=config).plan.devices == 64
    assert counts == Counter({"the model": 1, "attention": 1, "layers to stack": 1, "a loss": 1, **tried})


def test_settings_are_those_of_the_command_and_stay_as_they_are():
    args = TrainingArguments(recipe="llama_fsdp", num_train_epochs=2, warmup_steps=0.5)
    settings = job_of("llama_fsdp", num_train_epochs=2, warmup_steps=0.5).args
    assert settings.as_dict() == args.as_dict()
    with pytest.raises(FrozenInstanceError, match="'max_steps'"):
        settings.max_steps = 3
    longer = replace(settings.with_epochs_of(5), per_device_train_batch_size=4)
    assert (longer.max_steps, longer.warmup, longer.asked_batch) == (10, 5, (1, 1))
    assert settings.max_steps == -1
    again = Settings.of(replace(settings.with_epochs_of(5), num_train_epochs=3, per_device_train_batch_size=4))
    assert (again.with_epochs_of(5).max_steps, again.asked_batch) == (15, (4, 1))  # a later run of the same trainer
    assert not Settings.of(replace(settings, isolate_documents=True, isolates_samples=True)).isolate_documents
    kept = Settings.of(replace(settings, gradient_accumulation_steps=2, kept_batch=(1, 2)))
    assert (kept.asked_batch, Settings.of(replace(settings, max_steps=7)).max_steps) == ((1, 1), 7)
    args.sequence_length = 0
    with pytest.raises(UserError, match="--sequence_length"):
        Job.resolve(args, lambda: 8)


def test_a_neighbour_is_checked_like_the_job_itself():
    job = job_of("mixtral_ep", sequence_length=64)
    wider = replace(job, args=replace(job.args, per_device_train_batch_size=3, gradient_accumulation_steps=2))
    assert (wider.rows, wider.micro_batch_rows, wider.tokens) == (48, 24, 48 * 64)
    assert replace(job, devices=16).plan.mesh == {"fsdp": 4, "expert": 4}
    with pytest.raises(UserError, match="its sizes multiply to 3"):
        replace(job, recipe=replace(job.recipe, mesh=Mesh(fsdp=1, expert=3)))
    other = job.recipe.computing(attention="sdpa")
    with pytest.raises(UserError, match="tokens would see other documents"):
        replace(job, recipe=other, args=replace(job.args, isolate_documents=True))


def test_a_model_of_modules_without_end_is_refused_while_it_is_built(monkeypatch):
    monkeypatch.setattr(meta_model, "MOST_MODULES", 50)
    monkeypatch.setattr(facts, "_known", {})
    with pytest.raises(UserError, match="a model of more than 50 modules"):
        Job.resolve(TrainingArguments(recipe="mixtral_ep"), lambda: 8)
    monkeypatch.undo()
    assert Job.resolve(TrainingArguments(recipe="mixtral_ep"), lambda: 8).facts.parameters  # and the watch is over


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
