"""The versions that a checkpoint records, and what a resume says of those that differ."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
from rich.console import Console
from transformers import LlamaConfig

from shardwright import run
from shardwright.hosts.versions import other_versions, versions
from shardwright.layout.load_recipe import load_recipe
from tests.support.jobs import job_of
from tests.support.lives import TINY


def test_what_is_saved_names_the_packages_and_the_code():
    assert list(versions()) == ["shardwright", "torch", "torch_xla", "transformers", "Shardwright's code"]
    assert other_versions(versions()) == []


@pytest.mark.parametrize("name", versions())
def test_a_resume_says_which_differs(name, tmp_path):
    saved = versions()
    resume = SimpleNamespace(
        folder="checkpoint-9",
        host={"versions": saved | {name: "1.2.3"}},
        recipe={},
        arguments={},
        other_options=lambda options: [],
    )
    said = Console(file=io.StringIO(), width=200)
    job = job_of(load_recipe("llama_fsdp"), LlamaConfig(**TINY), output_dir=str(tmp_path))
    run._say_what_runs(job, resume, said)  # type: ignore[arg-type]
    lines = [line for line in said.file.getvalue().splitlines() if "other than in the checkpoint" in line]  # type: ignore[attr-defined]
    assert [line.strip() for line in lines] == [f"other than in the checkpoint: {name} {saved[name]} (it was 1.2.3)"]


@pytest.mark.parametrize("saved", [None, "2.9.0", [], {}, {"torch": 2.9}, {"torch": None}, {"jax": "0.7"}])
def test_a_checkpoint_without_a_record_or_with_another_kind_of_one_differs_in_nothing(saved):
    assert other_versions(saved) == []
