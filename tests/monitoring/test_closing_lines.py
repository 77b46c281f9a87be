"""The last lines of a run: commands with options that they take, and the texts that its model goes on with."""

from __future__ import annotations

import shlex

import pytest
from datasets import Dataset

from shardwright.arguments.command_line import options_parser
from shardwright.arguments.training import TrainingArguments
from shardwright.data.rows.rows import StoredRows
from shardwright.evaluation.completions import _beginning
from shardwright.evaluation.evaluation_arguments import EvaluationArguments
from shardwright.files.folder import Folder
from shardwright.monitoring.messages import next_commands


@pytest.mark.parametrize(
    ("options", "load"),
    [
        ({}, 'AutoModelForCausalLM.from_pretrained("my runs/one/model")'),
        (
            {"lora_r": 4, "model": "org/base"},
            'PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("org/base"), "my runs/one/model")',
        ),
        ({"objective": "reward"}, 'AutoModelForSequenceClassification.from_pretrained("my runs/one/model")'),
    ],
)
def test_a_finished_run_says_how_to_load_evaluate_export_and_go_on_in_words_that_the_commands_take(options, load):
    args = TrainingArguments(recipe="llama_fsdp", max_steps=20, **options)
    lines = dict(line.split(":", 1) for line in next_commands(args, Folder("my runs/one"), saved=20))
    said = {what: line.strip() for what, line in lines.items()}
    assert said["load"] == load
    assert ("evaluate" in said) is (args.objective != "reward")
    if "evaluate" in said:
        found = options_parser([EvaluationArguments]).parse_args(shlex.split(said["evaluate"])[2:])
        assert (found.model, found.recipe) == ("my runs/one/model", "llama_fsdp")
    export = shlex.split(said["export"])
    assert "my runs/one/checkpoint-20" in export
    assert ("--merge" in export) is args.has_adapter
    on = shlex.split(said["go on"])
    assert on[on.index("--config") + 1] == "my runs/one/run.yaml"
    assert on[-4:] == ["--resume_from_checkpoint", "latest", "--max_steps", "40"]


def test_a_run_that_saved_nothing_offers_nothing_to_export_or_to_go_on_from():
    lines = next_commands(TrainingArguments(recipe="llama_fsdp"), Folder("out"), saved=None)
    assert [line.split(":")[0] for line in lines] == ["load", "evaluate"]


def test_a_completion_begins_with_a_rows_first_tokens_or_with_the_prompt_of_a_chat():
    tokens = list(range(100, 164))
    text = StoredRows(Dataset.from_dict({"input_ids": [tokens]}))
    assert _beginning(text, 0) == tokens[:24]
    labels = [-100] * 40 + tokens[40:]
    chat = StoredRows(Dataset.from_dict({"input_ids": [tokens], "labels": [labels]}))
    assert _beginning(chat, 0) == tokens[16:40]
