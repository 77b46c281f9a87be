"""`remat="auto"`: what it means where, and for which job an answer holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.training import SMALL, train
from trainer.arguments import TrainingArguments
from trainer.job import Job
from trainer.remat import Platform, answer, is_auto, keep_answer, with_remat

V5P = Platform("TPU", "v5p")


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path))
    return resolved()


def resolved(**options: object) -> Job:
    args = TrainingArguments(recipe="llama_fsdp", compute="remat=auto", max_steps=1, **options)
    return Job.resolve(args, lambda: 8)


def test_an_answer_holds_for_its_job_and_chip_alone(job):
    assert is_auto(job)
    assert answer(job, V5P)[0] == "full"
    path = keep_answer(job, "v5p", 0.375)
    assert answer(job, V5P)[0] == 0.375
    assert answer(resolved(learning_rate=1e-4, run_name="another"), V5P)[0] == 0.375  # as much memory
    assert answer(resolved(sequence_length=512), V5P)[0] == "full"
    assert answer(job, Platform("TPU", "v5e"))[0] == "full"
    assert answer(job, Platform("CPU"))[0] == "none"
    for damage in ("", "{", json.dumps({"share": "much"}), json.dumps({"share": 7}), "[]"):
        path.write_text(damage)
        assert answer(job, V5P)[0] == "full"


def test_what_is_found_takes_the_place_of_auto(job):
    found = with_remat(job, 0.5)
    assert not is_auto(found)
    assert found.recipe.compute.remat == 0.5


@pytest.mark.slow
def test_a_run_says_what_auto_is_and_notes_it_in_its_recipe(tmp_path):
    out = tmp_path / "out"
    done = train("--recipe", "llama_fsdp", "--compute", "remat=auto", "--output_dir", out, "--max_steps", 2, *SMALL)
    assert done.returncode == 0, done.stderr
    assert "remat:   none (a host's memory is no HBM)" in done.stdout
    assert json.loads((out / "recipe.json").read_text())["compute"]["remat"] == "none"
