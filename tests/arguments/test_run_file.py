"""A run as a file: what a run writes gives the same arguments again, whatever they are."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.arguments.command_line import Parser, options_parser, parse
from shardwright.arguments.known_flags.flag_words import words_of
from shardwright.arguments.option_values import kind_of
from shardwright.arguments.run_file import dumped, read_options, run_file, with_files
from shardwright.arguments.training import Settings, TrainingArguments
from shardwright.errors import UserError
from shardwright.hosts.restarts import asked_limit
from shardwright.launch.launch_arguments import LaunchArguments
from shardwright.launch.targets import read_request
from shardwright.scripts import check, export

# values of every kind, and texts that YAML would read as something else
VALUES: list[Any] = [
    True, False, 1, 3, 7.5e-7, 0.25, 12.0, "no", "true", "null", "2e-5", "10:13", "1_000", "a: b # c", "é ☃\n\t", " x",
    "-1", "q_proj=8", "0,8:16", "~", "[1]", "{a}", "a,b", "cosine", "epoch", "bfloat16", "per_expert", "drop", "skip",
    "dpo", "batch", "gaussian", "lion", "steps", "eval_accuracy",
]  # fmt: skip
# whose values, if they are other trainers', are put in our words
CHOSEN = {"optim", "eval_strategy", "save_strategy", "report_to", "init_lora_weights"}
VALUED = {"optim_args": ["beta1=0.5"], "profile_steps": ["2:4"]}


def again(args: TrainingArguments, folder: Path, *words: str) -> TrainingArguments:
    (folder / "run.yaml").write_text(run_file(args), encoding="utf-8")
    (found,) = parse([TrainingArguments], ["--config", str(folder / "run.yaml"), *words], None)
    return found


PARSER = options_parser([TrainingArguments])
NAMES = {each.name: kind_of(get_type_hints(TrainingArguments)[each.name])[0] for each in fields(TrainingArguments)}


def through(folder: Path, name: str, value: Any) -> Any:
    """The value of an option that was written to a file and read again."""
    (folder / "one.yaml").write_text(dumped({name: value}), encoding="utf-8")
    return getattr(PARSER.parse_args(words_of(read_options(str(folder / "one.yaml")))), name)


def test_any_value_of_any_option_comes_back_as_it_was(tmp_path: Path) -> None:
    for name, kind in NAMES.items():
        for value in [each for each in VALUES if type(each) is kind and not (kind is str and name in CHOSEN)]:
            found = through(tmp_path, name, value)
            assert (found, type(found)) == (value, kind), name
    nested = {"a": 0.1, "b": [1, "no"], "c": 1e-7}
    assert json.loads(through(tmp_path, "lr_scheduler_kwargs", nested)) == nested


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1).filter("--".__ne__), st.floats(0, 1))
def test_any_text_and_any_number_comes_back(tmp_path_factory: pytest.TempPathFactory, text: str, share: float) -> None:
    folder = tmp_path_factory.getbasetemp()
    assert through(folder, "run_name", text) == text
    assert through(folder, "adam_beta1", share) == share


@pytest.mark.parametrize("options", [{}, {"lora_r": 4}], ids=str)
def test_a_run_with_as_many_options_as_go_together_comes_back(tmp_path: Path, options: dict[str, Any]) -> None:
    args = TrainingArguments(num_train_epochs=2.0, **options)
    for name, kind in NAMES.items():
        for value in [each for each in [*VALUES, *VALUED.get(name, [])] if type(each) is kind]:
            if value != getattr(args, name) and name not in options:
                with contextlib.suppress(UserError):
                    args = replace(args, **{name: value})
                    break
    assert sum(getattr(args, each.name) != each.default for each in fields(args)) > 60
    folders = {name: os.path.abspath(getattr(args, name)) for name in ("output_dir", "staging_dir")}
    assert again(args, tmp_path) == replace(args, **folders)


def test_a_run_is_repeated_from_another_folder_with_the_files_that_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("mixtral_ep", "y"):  # the names of a recipe and of a set are none of them
        (tmp_path / name).mkdir()
    for name in ("a.jsonl", "b.jsonl", "mine.py"):
        (tmp_path / name).write_text("")
    monkeypatch.chdir(tmp_path)
    mixed = {"dataset": "a.jsonl:0.7,hub/set:0.3", "eval_dataset": "x=b.jsonl,y=hub/set", "output_dir": "runs/one"}
    found = again(TrainingArguments("mixtral_ep", num_train_epochs=1, **mixed), tmp_path)
    assert (found.recipe, found.output_dir) == ("mixtral_ep", f"{tmp_path}/runs/one")
    assert found.dataset == f"{tmp_path}/a.jsonl:0.7,hub/set:0.3"
    assert found.eval_dataset == f"x={tmp_path}/b.jsonl,y=hub/set"
    assert again(TrainingArguments("./mine.py", num_train_epochs=1), tmp_path).recipe == f"{tmp_path}/mine.py"


def test_the_file_of_a_resolved_run_gives_its_arguments(tmp_path: Path) -> None:
    resolved = Settings(output_dir="out", warmup_steps=0.1, max_steps=40, objective="dpo", model="a/b", revision="c1")
    found = again(resolved, tmp_path)
    there = replace(resolved, output_dir=os.path.abspath("out"))
    assert found.as_dict() == there.as_dict()
    assert Settings.of(found) == there


def test_a_run_of_epochs_is_repeated_with_others(tmp_path: Path) -> None:
    run = Settings(num_train_epochs=2, output_dir="out").with_epochs_of(6)
    assert run.max_steps == 12
    (tmp_path / "run.yaml").write_text(run_file(run))
    found = read_options(str(tmp_path / "run.yaml"))
    assert (found["num_train_epochs"], found["max_steps"]) == (2, -1)
    assert Settings(**{**found, "num_train_epochs": 3}).with_epochs_of(6).max_steps == 18
    # steps that were asked for stay
    (tmp_path / "run.yaml").write_text(run_file(replace(run, max_steps=20)))
    assert read_options(str(tmp_path / "run.yaml"))["max_steps"] == 20


def test_what_follows_from_options_follows_from_those_of_a_command_that_gives_others(tmp_path: Path) -> None:
    best = {"eval_strategy": "steps", "eval_steps": 500, "load_best_model_at_end": True}
    accurate = again(TrainingArguments(**best), tmp_path, "--metric_for_best_model", "eval_accuracy")
    assert accurate.greater_is_better is True
    assert again(TrainingArguments(**best, greater_is_better=True), tmp_path).greater_is_better is True
    for before, after in itertools.permutations(("sft", "dpo", "distill", "reward"), 2):
        found, fresh = again(TrainingArguments(objective=before), tmp_path, "--objective", after), {"objective": after}
        assert found == TrainingArguments(**fresh)


def test_a_share_of_warm_up_is_that_of_the_steps_of_a_repetition(tmp_path: Path) -> None:
    longer = again(Settings(warmup_steps=0.1, max_steps=40), tmp_path, "--max_steps", "400")
    assert (longer.warmup_steps, longer.warmup) == (0.1, 40)


def test_options_of_the_command_line_win_and_a_later_file_wins_over_an_earlier(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("max-steps: 7\nseed: 1\neval_strategy: no\nlora_r: null\nrank_pattern:\n")
    (tmp_path / "b.json").write_text(json.dumps({"seed": 2, "learning_rate": 2e-5, "dataset": "x.txt"}))
    words = ["--seed", "3", f"--config={tmp_path}/a.yaml", "--config", f"{tmp_path}/b.json"]
    (args,) = parse([TrainingArguments], words, None)
    assert (args.max_steps, args.seed, args.eval_strategy, args.learning_rate) == (7, 3, "no", 2e-5)
    (args,) = parse([TrainingArguments], words[2:], None)
    assert args.seed == 2


def test_a_file_is_read_as_yaml_1_2_and_lists_and_mappings_as_options_write_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text(
        "learning_rate: 2e-5\nprofile_steps: 10:13\nreport_to: [wandb, mlflow]\nmesh: {fsdp: 4, expert: 2}\n"
        "lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs:\n  min_lr_rate: 0.1\nmax_restarts: 2\n"
        "dataset: {a.jsonl: 0.7, owner/chats#train: 0.3}\neval_dataset: {chat: b.jsonl, code: c.jsonl}\nseed: 0042\n"
    )
    words = ["--config", str(tmp_path / "run.yaml")]
    (args,) = parse([TrainingArguments], words, None)
    assert (args.learning_rate, args.profile_steps, args.report_to) == (2e-5, "10:13", "wandb,mlflow")
    assert (args.mesh, args.lr_scheduler_kwargs) == ("fsdp=4,expert=2", {"min_lr_rate": 0.1})
    assert (args.dataset, args.eval_dataset) == ("a.jsonl:0.7,owner/chats#train:0.3", "chat=b.jsonl,code=c.jsonl")
    assert (asked_limit(with_files(words)), args.seed) == (2, 42)
    assert TrainingArguments(**read_options(words[1])) == args, "in Python as in a file"
    # LLaMA-Factory's, and transformers' rule for two ways to say a warm-up
    (tmp_path / "run.yaml").write_text("stage: dpo\ncutoff_len: 64\nwarmup_ratio: 0.1\nwarmup_steps: 0\n")
    (args,) = parse([TrainingArguments], words, None)
    assert (args.objective, args.sequence_length, args.warmup) == ("dpo", 128, 10)
    assert "--cutoff_len 64: --sequence_length 128, twice as long" in capsys.readouterr().err


def test_unknown_keys_are_refused_by_the_table_all_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.yaml").write_text(
        "max_seq_length: 64\nlearning_rat: 1\nfp16: true\ngradient_checkpointing: true\n"
    )
    with pytest.raises(SystemExit):
        parse([TrainingArguments], ["--config", str(tmp_path / "run.yaml")], None)
    told = capsys.readouterr().err
    assert "2 options that this command can't take" in told
    assert "no option --learning_rat; did you mean '--learning_rate'?" in told
    assert "--fp16 true: not to be had" in told


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("run.yaml", "a: [", "ParserError"),
        ("run.yaml", "a: 1\nb: 2\na: 3\n", "'a' comes twice"),
        ("run.yaml", "just words", "a str"),
        ("run.yaml", "1: 2", "1, a name that is no text"),
        ("run.yaml", "a: !!python/object/apply:os.getcwd []", "ConstructorError"),
        ("run.json", "{", "JSONDecodeError"),
        ("run.json", "[" * 100_000, "RecursionError"),
        ("other.yaml", None, "no such file"),
        ("run.yaml", b"\xff\xfe\x00", "UnicodeDecodeError"),
    ],
)
def test_what_is_no_file_of_options_is_refused(tmp_path: Path, name: str, text: Any, words: str) -> None:
    if text is not None:
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=words):
        with_files(["--config", str(tmp_path / name)])


def test_a_password_in_a_url_is_not_written_down() -> None:
    assert "secret" not in run_file(TrainingArguments(dataset="https://me:secret@host/rows.jsonl"))


def test_a_launch_gives_the_hosts_the_options_of_a_file_and_no_line_break_in_them(tmp_path: Path) -> None:
    options = LaunchArguments(topology="v5p:2x2x4", image="image")
    words = ["--config", str(tmp_path / "run.yaml"), "--seed", "3"]
    text = "output_dir: gs://bucket/run\nmax_length: 64\nnum_train_epochs: 2\nrecipe: llama_fsdp\n"
    (tmp_path / "run.yaml").write_text(text)
    train = read_request("jobset", options, words).train
    assert train[:3] == ("--output_dir=gs://bucket/run", "--max_length=64", "--num_train_epochs=2")
    (tmp_path / "run.yaml").write_text('run_name: "a\\nb"\noutput_dir: gs://bucket/run\n')
    with pytest.raises(UserError, match="a line break"):
        read_request("jobset", options, words)


def test_a_command_takes_of_a_runs_file_the_options_that_it_has(tmp_path: Path) -> None:
    text = "recipe: llama_fsdp\nmodel: tiny.json\nmesh: fsdp=4\noptim: lion\ntrain_mtp: false\nstreaming: true\n"
    (tmp_path / "run.yaml").write_text(text)
    parser = Parser("What it does.")
    parser.add_argument("--recipe", required=True)
    parser.add_argument("--model")
    parser.add_argument("--mesh")
    parser.add_argument("--train_mtp", action="store_true")
    parser.add_argument("--streaming", action="store_true")
    parser.takes_run_file()
    found = parser.parse_args(["--config", str(tmp_path / "run.yaml"), "--mesh", "fsdp=8"])
    assert (found.recipe, found.model, found.mesh) == ("llama_fsdp", "tiny.json", "fsdp=8")
    assert (found.train_mtp, found.streaming) == (False, True)
    assert check.parser().parse_args(["--config", str(tmp_path / "run.yaml")]).named == "tiny.json"
    assert export.parser().parse_args(["--config", str(tmp_path / "run.yaml"), "--checkpoint", "a", "--output", "b"])
