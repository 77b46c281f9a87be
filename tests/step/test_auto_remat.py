"""`remat="auto"`: what it means where, and for which job an answer holds."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from rich.console import Console
from transformers import TrainerState

from shardwright.arguments.training import TrainingArguments
from shardwright.errors import UserError
from shardwright.files.folder import Folder
from shardwright.job import Job
from shardwright.layout.load_recipe import load_recipe
from shardwright.monitoring.run_page import RunPage
from shardwright.prove import certificate
from shardwright.step.auto_remat import LayerValue, answer, is_auto, keep_answer, layer_values, with_remat
from shardwright.step.build import place_model
from shardwright.step.train_step import TrainStep
from shardwright.weights.weight_sources import seeded_init
from shardwright.xla.device_mesh import build_mesh
from tests.support.jobs import job_of
from tests.support.lives import write_text
from tests.support.training import SMALL, train

VALUE = LayerValue("model.layers.*.self_attn.q_proj", "mm", (8, 64), 2, 3 * 2**30, 10**12, kept=True)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path))
    return resolved()


def resolved(**options: object) -> Job:
    args = TrainingArguments(**{"recipe": "llama_fsdp", "compute": "remat=auto", "max_steps": 1} | options)
    return Job.resolve(args, lambda: 8)


def test_an_answer_holds_for_its_job_and_chip_alone(job):
    assert is_auto(job)
    assert answer(job, "v5p")[0] == "full"
    path = keep_answer(job, "v5p", 0.375, [VALUE, dataclasses.replace(VALUE, kept=False)])
    assert answer(job, "v5p")[0] == 0.375
    assert answer(job, "v5p").kept == ("model.layers.*.self_attn.q_proj (mm), 3.0 GiB",)
    assert answer(resolved(learning_rate=1e-4, run_name="another"), "v5p")[0] == 0.375  # as much memory
    assert answer(resolved(sequence_length=512), "v5p")[0] == "full"
    with_mtp = dataclasses.replace(job, args=dataclasses.replace(job.args, train_mtp=True))
    assert answer(with_mtp, "v5p")[0] == "full"  # further layers
    assert answer(job, "v5e")[0] == "full"
    assert answer(job, "")[0] == "full"
    for damage in ("", "{", json.dumps({"share": "much"}), json.dumps({"share": 7}), "[]"):
        path.write_text(damage)
        assert answer(job, "v5p")[0] == "full"
    path.unlink()
    path.parent.rmdir()
    path.parent.touch()  # a disk that refuses
    with pytest.raises(UserError, match=f"write {path.parent}"):
        keep_answer(job, "v5p", 0.375)


@pytest.mark.parametrize(
    ("plain", "other"),
    [
        ({"objective": "distill"}, {"teacher_top_k": 128}),
        ({"recipe": "mixtral_ep"}, {"router_z_loss_coef": 1e-3}),
        ({"recipe": "mixtral_ep"}, {"router_balance_coef": 1e-3}),
    ],
)
def test_an_answer_holds_for_as_many_values_of_a_token_alone(job, plain, other):
    keep_answer(resolved(**plain), "v5p", 0.5)
    assert answer(resolved(**plain), "v5p")[0] == 0.5
    assert answer(resolved(**plain, **other), "v5p")[0] == "full"


def test_an_answer_and_a_certificate_hold_for_an_adapter_of_what_its_folder_says(job, tmp_path):
    def adapted(rank):
        LoraConfig(r=rank, target_modules=["q_proj"]).save_pretrained(tmp_path)
        return resolved(adapter=str(tmp_path))

    keep_answer(adapted(4), "v5p", 0.5)
    key = certificate.subject_of(adapted(4)).key
    assert answer(adapted(4), "v5p")[0] == 0.5
    assert answer(adapted(64), "v5p")[0] == "full"
    assert certificate.subject_of(adapted(64)).key != key


def test_what_is_found_takes_the_place_of_auto(job):
    found = with_remat(job, 0.5)
    assert not is_auto(found)
    assert found.recipe.compute.remat == 0.5


@pytest.mark.slow
def test_a_run_says_what_auto_is_and_notes_it_in_its_recipe(tmp_path):
    write_text(tmp_path)
    out = tmp_path / "out"
    words = ["--model", tmp_path / "config.json", "--dataset", tmp_path / "text", "--max_eval_rows", 8]
    words += ["--compute", "remat=auto,scan=False", "--max_steps", 2, "--output_dir", out]
    done = train("--recipe", "llama_fsdp", *words, *SMALL)
    assert done.returncode == 0, done.stderr
    assert re.search(r"remat:   full \(nobody has asked python \S*scripts/compile.py how much fits", done.stdout)
    assert json.loads((out / "recipe.json").read_text())["compute"]["remat"] == "full"


def test_a_runs_page_says_value_by_value_what_its_backward_is_given(tmp_path):
    job = job_of(load_recipe("llama_fsdp").with_compute("remat=0.4"), sequence_length=16, output_dir=str(tmp_path))
    placed = place_model(job, build_mesh(job.recipe.mesh), seeded_init(job.model, 0))
    watch = RunPage(Folder(str(tmp_path)), job, TrainerState(max_steps=1), Console(quiet=True), None)
    watch.model = placed.model
    rows = torch.zeros((job.rows, 16), dtype=torch.int64)
    TrainStep(placed)({"input_ids": rows, "labels": rows}, step=1, learning_rate=1e-3)
    watch.update()
    page = (tmp_path / "report.html").read_text()
    values = layer_values(job, placed.model)
    assert {value.kept for value in values} == {True, False}
    for value in values:
        assert f"<td>{value.module}</td>" in page
    assert page.count("<td>computed again</td>") == sum(not value.kept for value in values)
