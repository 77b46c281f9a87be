"""The last lines of a run: commands with options that they take, and the texts that its model goes on with."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
from datasets import Dataset

from shardwright.arguments.command_line import options_parser, parse
from shardwright.arguments.training import TrainingArguments
from shardwright.compile.compile_arguments import CompileArguments
from shardwright.data.rows.rows import StoredRows
from shardwright.evaluation.completions import _beginning
from shardwright.evaluation.evaluation_arguments import EvaluationArguments
from shardwright.files.folder import Folder
from shardwright.job import Job
from shardwright.layout.load_recipe import load_recipe
from shardwright.model.meta_model import load_config
from shardwright.monitoring.next_commands import MODEL, next_commands, tune_command
from shardwright.xla.chips import CHIPS, find_topology


def job_with(**options: Any) -> Job:
    args = TrainingArguments(recipe="llama_fsdp", max_steps=20, **options)
    return Job.resolve(args, lambda: 8, config=load_config(None, load_recipe("llama_fsdp")))


@pytest.mark.parametrize(
    ("options", "load"),
    [
        ({"mesh": "data=2,fsdp=4"}, 'AutoModelForCausalLM.from_pretrained("my runs/one/model")'),
        (
            {"lora_r": 4, "model": "org/base@abc", "base_dtype": "int8"},
            'PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("org/base", revision="abc"), '
            '"my runs/one/model")',
        ),
        (
            {"lora_r": 4, "model": "bases/small.gguf"},
            'PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("bases", gguf_file="small.gguf"), '
            '"my runs/one/model")',
        ),
        ({"objective": "reward"}, 'AutoModelForSequenceClassification.from_pretrained("my runs/one/model")'),
        (
            {"objective": "reward", "lora_r": 4, "model": "org/base"},
            'PeftModel.from_pretrained(AutoModelForSequenceClassification.from_pretrained("org/base", num_labels=1), '
            '"my runs/one/model")',
        ),
    ],
)
def test_a_finished_run_says_how_to_load_evaluate_export_and_go_on_in_words_that_the_commands_take(options, load):
    job = job_with(**options)
    said = next_commands(job, Folder("my runs/one"), step=20, saved=20, there={MODEL})
    imports, _, expression = said["load"].partition("; model = ")
    assert expression == load
    assert all(f"import {name}" in imports for name in re.findall(r"(\w+)\.from_pretrained", load))
    assert ("evaluate" in said) is (job.args.objective != "reward")
    if "evaluate" in said:
        found = options_parser([EvaluationArguments]).parse_args(shlex.split(said["evaluate"])[2:])
        assert (found.model, found.recipe) == ("my runs/one/model", "llama_fsdp")
        assert (found.mesh, found.base_dtype) == (options.get("mesh"), options.get("base_dtype"))
    export = shlex.split(said["export"])
    assert "my runs/one/checkpoint-20" in export
    assert ("--merge" in export) is job.args.has_adapter
    on = shlex.split(said["go on"])
    assert on[on.index("--config") + 1] == "my runs/one/run.yaml"
    assert on[-4:] == ["--resume_from_checkpoint", "latest", "--max_steps", "40"]
    earlier = next_commands(job, Folder("my runs/one"), step=10, saved=10, there={MODEL})["go on"]
    assert "--max_steps" not in earlier


def test_a_run_that_saved_nothing_offers_nothing_to_export_or_to_go_on_from():
    found = next_commands(job_with(), Folder("out"), step=20, saved=None, there={MODEL})
    assert list(found) == ["load", "evaluate"]


def test_an_adapter_of_a_recipes_own_random_weights_is_offered_for_no_model():
    found = next_commands(job_with(lora_r=4), Folder("out"), step=20, saved=20, there={MODEL})
    assert list(found) == ["export", "go on"]


def test_a_run_on_a_tpu_says_how_its_settings_are_tuned_in_words_that_compile_takes():
    job, folder = job_with(), Folder("my runs/one")
    words = shlex.split(str(tune_command(job, folder, CHIPS["v6e"])))[2:]
    assert words[:2] == ["--config", "my runs/one/run.yaml"]
    _, found = parse([TrainingArguments, CompileArguments], words[2:], "")
    assert (find_topology(str(found.topology)).devices, found.tune) == (job.devices, 60)
    assert tune_command(job, folder, None) is None
    assert tune_command(Job.resolve(job.args, lambda: 2), folder, CHIPS["v6e"]) is None, "a slice that there is not"


def test_a_completion_begins_with_a_rows_first_tokens_or_with_the_prompt_of_a_chat():
    tokens = list(range(100, 164))
    text = StoredRows(Dataset.from_dict({"input_ids": [tokens]}))
    assert _beginning(text, 0) == tokens[:24]
    labels = [-100] * 40 + tokens[40:]
    chat = StoredRows(Dataset.from_dict({"input_ids": [tokens], "labels": [labels]}))
    assert _beginning(chat, 0) == tokens[16:40]
