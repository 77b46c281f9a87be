"""TrainingArguments from Python: every field takes what it is for, and refuses anything else by name."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.hf_argparser import string_to_bool

from shardwright.arguments.command_line import _truth, options_parser, parse
from shardwright.arguments.training import TrainingArguments
from shardwright.compile.compile_arguments import CompileArguments
from shardwright.data.audit_arguments import AuditArguments
from shardwright.errors import UserError
from shardwright.evaluation.evaluation_arguments import EvaluationArguments
from shardwright.launch.launch_arguments import LaunchArguments
from shardwright.layout.load_recipe import load_recipe
from shardwright.layout.recipe import Compute

WICKED: list[Any] = [
    math.inf, -math.inf, math.nan, 1e300, -1e300, 10**30, -(10**30), -1, 0, 1.5, 0.1, True, False, None, "", "\0", "x",
    "5", "5e-5", "caf\udce9", b"5", [], [1], {}, {"a": {1}}, object(), torch.tensor(5), torch.zeros(3), np.float32(2),
    np.int64(7), np.array([1, 2]), Path("there"), int, 1j,
]  # fmt: skip


REQUIRED: dict[type, dict[str, Any]] = {
    TrainingArguments: {"recipe": "any"},
    EvaluationArguments: {"model": "any", "tasks": "any"},
}


def refusal(make: Callable[[], Any]) -> str:
    """What ``make()`` is refused with; empty if it is not."""
    try:
        make()
    except UserError as error:
        return str(error)
    return ""


OPTIONS = [TrainingArguments, CompileArguments, EvaluationArguments, AuditArguments, LaunchArguments]


def truth(value: object) -> object:
    return getattr(value, "__name__", value) if value not in (string_to_bool, _truth) else "a word of truth"


@pytest.mark.parametrize("kind", OPTIONS)
def test_the_options_are_those_that_transformers_parser_makes_and_help_says_something_of_each(kind: type) -> None:
    names = ("option_strings", "dest", "nargs", "const", "default", "type", "required")
    parsers = options_parser([kind]), transformers.HfArgumentParser(kind)
    for action in parsers[1]._actions:
        if action.type is string_to_bool:  # theirs takes no bare --bf16
            action.nargs, action.const = "?", True
    ours, theirs = (
        [
            (type(action), *(truth(getattr(action, name)) for name in names)) for action in parser._actions[1:]
        ]  # -h is ours
        for parser in parsers
    )
    assert ours == theirs
    assert all(field.metadata["help"] for field in fields(kind))


def test_words_in_a_file_beside_the_script_come_before_those_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.args").write_text("--recipe any --max_steps 5\n--seed 7")
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "train.py")])
    (args,) = parse([TrainingArguments], ["--max-steps", "6"], None)
    assert (args.recipe, args.max_steps, args.seed) == ("any", 6, 7)


@pytest.mark.parametrize("word", ["yes", "true", "T", "y", "1", "no", "False", "f", "N", "0", "maybe", "2"])
def test_words_of_truth_are_those_of_transformers(word: str) -> None:
    def read(reader: Callable[[str], bool]) -> object:
        try:
            return reader(word)
        except argparse.ArgumentTypeError:
            return "refused"

    assert read(_truth) == read(string_to_bool)


@pytest.mark.parametrize("kind", [TrainingArguments, CompileArguments, EvaluationArguments])
def test_any_value_in_any_field_is_taken_or_refused_by_the_fields_name(kind: type) -> None:
    taken = set()
    for field in fields(kind):
        for value in WICKED:
            given = {**REQUIRED.get(kind, {}), field.name: value}
            if message := refusal(lambda given=given: kind(**given)):
                assert f"--{field.name}" in message
                continue
            found = getattr(kind(**given), field.name)
            assert found is None or type(found) in (bool, int, float, str, dict), (field.name, value)
            json.dumps(vars(kind(**given)), allow_nan=False)
            taken.add(field.name)
    assert taken >= {field.name for field in fields(kind)} - {
        *("lr_scheduler_type", "eval_strategy", "save_strategy", "metric_for_best_model"),
        *(
            "weight_dtype",
            "optimizer_dtype",
            "optim",
            "router_balance",
            "overflow",
            "on_bad_row",
            "train_on",
            "base_dtype",
            "on_spike",
            "init_lora_weights",
        ),
        *("adapter_format", "lora_target"),  # a target is nothing without a rank
        # an objective's number or word is nothing without it
        *("objective", "simpo_gamma", "loss_type", "loss_weights", "label_smoothing", "discopop_tau"),
        *("f_divergence_type", "f_alpha_divergence_coef", "desirable_weight", "undesirable_weight", "teacher_top_k"),
        "temperature",
    }


@pytest.mark.parametrize("warmup", [0, 0.1, 0.25, 1, 1.5, 20, 20.0])
def test_warmup_is_as_many_steps_as_in_transformers(warmup: float) -> None:
    given: Any = SimpleNamespace(warmup_steps=warmup)
    theirs = transformers.TrainingArguments.get_warmup_steps(given, 55)
    found = TrainingArguments("any", warmup_steps=warmup, max_steps=55).warmup
    assert (found, type(found)) == (theirs, int)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_steps": 5.5}, "a float, where a whole number is needed"),
        ({"max_steps": True}, "a bool, where a whole number"),
        ({"seed": 10**30}, "at most 4294967295"),
        ({"learning_rate": "5e-5"}, "a str, where a number is needed"),
        ({"learning_rate": math.inf}, "finite"),
        ({"streaming": "no"}, "a str, where True or False"),
        ({"output_dir": ""}, "not empty"),
        ({"dataset": "caf\udce9"}, "can't encode|surrogates not allowed"),
        ({"adam_beta2": 1 - 1e-12}, "lies in"),
        ({"adam_epsilon": 1e-300}, "finite"),
        ({"lr_scheduler_kwargs": "{"}, "JSON object"),
        ({"lr_scheduler_kwargs": "[1]"}, "JSON object"),
        ({"lr_scheduler_kwargs": {1}}, "JSON object"),
    ],
)
def test_a_value_of_another_kind_is_refused_with_what_the_field_takes(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        TrainingArguments("any", **options)


@pytest.mark.parametrize("name", ["recipe", "model", "dataset", "tokenizer", "output_dir", "resume_from_checkpoint"])
def test_a_path_that_the_system_refuses_to_look_at_is_refused_by_the_options_name(tmp_path: Path, name: str) -> None:
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    for path in ("a" * 300, tmp_path / ("b" * 300) / "c", tmp_path / "circle" / "x"):
        with pytest.raises(UserError, match=f"--{name} "):
            TrainingArguments(**{"recipe": "any", name: path})
    for path in ("~nobody-of-this-name/x", "someone/something", "s3://bucket/" + "a" * 300):
        TrainingArguments(**{"recipe": "any", name: path})


def test_numbers_and_paths_of_other_libraries_are_taken_as_pythons_own() -> None:
    args = TrainingArguments("any", max_steps=np.int64(7), learning_rate=np.float64(0.5), output_dir=Path("there"))
    assert (args.max_steps, args.learning_rate, args.output_dir) == (7, 0.5, "there")
    assert json.loads(json.dumps(args.as_dict())) == args.as_dict()


WORDS = ["None", "True", "0", "1", "", "x", "{[]:1}", "(" * 500, "-" * 9999 + "1", "[1", "'", "nan", "1e400"]


@pytest.mark.parametrize("text", WORDS, ids=lambda text: text[:9])
def test_any_word_in_any_part_of_a_compute_policy_is_taken_or_refused(text: str) -> None:
    recipe = load_recipe("mixtral_ep")
    for field in fields(Compute):
        message = refusal(lambda name=field.name: recipe.with_compute(f"{name}={text}"))
        assert not message or field.name in message


def test_any_value_in_any_part_of_a_compute_policy_is_taken_or_refused() -> None:
    for field in fields(Compute):
        for value in WICKED:
            message = refusal(lambda name=field.name, value=value: Compute(**{name: value}))
            assert not message or field.name in message


@pytest.mark.parametrize(
    ("options", "idle"),
    [
        ({}, []),
        ({"spike_window": 16, "eval_steps": 3}, ["--eval_steps", "--spike_window"]),
        ({"sample_top_p": 0.5, "sample_temperature": 0.5}, ["--sample_temperature"]),
        ({"adapter_format": "per_expert", "adapter": "a"}, []),
        ({"router_balance": "batch", "router_balance_coef": 0.1}, []),
        ({"on_spike": "skip"}, ["--on_spike"]),  # of 100 steps, whose first 128 are not judged
        ({"on_spike": "skip", "max_steps": 129}, []),
        ({"on_spike": "skip", "num_train_epochs": 1.0}, []),  # how many steps they are is not known yet
    ],
    ids=str,
)
def test_options_that_mean_nothing_beside_the_others_are_told(options: dict[str, Any], idle: list[str]) -> None:
    assert [line.split()[0] for line in TrainingArguments(**options).idle] == idle
