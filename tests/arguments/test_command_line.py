"""Command lines: an option is taken by its whole name alone, and a misspelt one is answered with the nearest."""

from __future__ import annotations

import importlib
import subprocess
import sys
from dataclasses import dataclass

import pytest

from shardwright.arguments.command_line import Parser, parse
from shardwright.arguments.option_values import option
from shardwright.arguments.training import TrainingArguments
from shardwright.compile.compile_arguments import CompileArguments
from tests.support.fork_server import run
from tests.support.paths import ROOT
from tests.support.training import environment


@dataclass
class Options:
    steps: int = option(1, "How many.")
    rate: float = option(0.5, "How fast.")
    text_column: str = option("text", "Which column.")
    loud: bool = option(False, "Whether to say so.")
    quick: bool | None = option(None, "Whether to hurry.")


def script(name: str, *words: str) -> subprocess.CompletedProcess[str]:
    return run(ROOT / "scripts" / name, *words, env=environment())


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("train.py", ["--recipe", "llama_tp", "--learning_rat=1"], "--learning_rat; did you mean '--learning_rate'?"),
        ("compile.py", ["--topolog", "v5p:4x4x4"], "--topolog; did you mean '--topology'?"),
        ("plan.py", ["--recipe", "mixtral_ep", "--device=4"], "--device; did you mean '--devices'?"),
        ("plan.py", ["--recipe", "mixtral_ep", "--sequence_length=8"], "--sequence_length; --help lists them"),
        ("export.py", ["--checkpoin", "output"], "--checkpoin; did you mean '--checkpoint'?"),
        ("measure/depth.py", ["--recip=x"], "--recip; did you mean '--recipe'?"),
        ("measure/files.py", ["load", "--round=1"], "--round; did you mean '--rounds'?"),
        ("measure/families.py", ["--onl=llama"], "--onl; did you mean '--only'?"),
        ("launch.py", ["jobset", "--topolog=v5p:2x2x4"], "--topolog; did you mean '--topology'?"),
        ("measure/launch_tools.py", ["--hom=x"], "--hom; did you mean '--home'?"),
        ("measure/step_times.py", ["--efficienc=x"], "--efficienc; did you mean '--efficiency'?"),
        ("measure/tpu_tables.py", ["--lis"], "--lis; did you mean '--list'?"),
    ],
)  # fmt: skip
def test_each_script_refuses_the_beginning_of_an_option_and_names_the_whole_one(name, words, message):
    done = script(name, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{name.rpartition('/')[2]}: error: no option {message}" in done.stderr
    assert "Traceback" not in done.stderr


def test_train_takes_compile_only_with_a_dash_too():
    done = script("train.py", "--recipe", "mixtral_ep", "--compile-only")
    assert done.returncode == 2
    assert "error: a compile for a TPU\n  found:   no --topology" in done.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], Options()),
        (["--steps", "5", "--text_column", "body"], Options(steps=5, text_column="body")),
        (["--steps=5", "--text-column=body"], Options(steps=5, text_column="body")),
        (["--rate", "-1.5"], Options(rate=-1.5)),
        (["--rate", "-.5"], Options(rate=-0.5)),
        (["--loud", "--steps", "2"], Options(steps=2, loud=True)),
        (["--loud", "false", "--quick", "true"], Options(quick=True)),
        (["--text_column", "--a=1 --b=2"], Options(text_column="--a=1 --b=2")),  # a value in quotes
        (["--text_column", "-"], Options(text_column="-")),
    ],
)
def test_options_are_taken_in_every_form_that_argparse_has(words, expected):
    assert parse([Options], words, None) == (expected,)


def test_several_dataclasses_share_one_command_line():
    first, second = parse([TrainingArguments, CompileArguments], ["--slices", "3", "--recipe", "llama_tp"], None)
    assert (first.recipe, second.slices) == ("llama_tp", 3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--step", "5"], "no option --step; did you mean '--steps'? --help lists them"),
        (["--steps", "5", "--rat=1"], "no option --rat; did you mean '--rate'? --help lists them"),
        (["--rtae", "1"], "no option --rtae; did you mean '--rate'? --help lists them"),
        (["-loud"], "no option -loud; did you mean '--loud'? --help lists them"),
        (["--text-colum", "x"], "no option --text-colum; did you mean '--text-column'? --help lists them"),
        (["--compile_onl"], "no option --compile_onl; did you mean '--compile_only'? --help lists them"),
        (["--zzz"], "no option --zzz; --help lists them"),
        (["stray"], "'stray' stands behind no option\n  why not: each value stands behind the name of its option\n"),
        (["--steps=--"], "error: --steps: '--' is no value"),
        (["--text_column=--"], "error: --text_column: '--' is no value"),
        (["--text_colum=two words"], "no option --text_colum; did you mean '--text_column'? --help lists them"),
    ],
)
def test_a_word_that_is_no_option_ends_the_command_with_code_2_and_the_nearest(words, message, capsys):
    with pytest.raises(SystemExit) as ended:
        parse([Options], words, None, flags={"--compile_only": "Compile alone."})
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_misspelt_option_is_named_before_a_missing_one_is_asked_for(capsys):
    parser = Parser("What it does.")
    parser.add_argument("--recipe", required=True)
    for words in (["--recip", "x"], ["-recipe", "x"]):
        with pytest.raises(SystemExit) as ended:
            parser.parse_args(words)
        assert ended.value.code == 2
        assert f"no option {words[0]}; did you mean '--recipe'?" in capsys.readouterr().err
    assert parser.parse_args(["--recipe", "x"]).recipe == "x"


@pytest.mark.parametrize(
    ("name", "words", "lacking", "offered"),
    [
        ("check", [], "ID_OR_FOLDER", "[options] ID_OR_FOLDER, or a run's file with --config"),
        ("compare", [], "RUN", "[options] RUN"),
        ("evaluate", ["nosuch"], "--model, --tasks", "--model TEXT --tasks TEXT [options]"),
        ("export", ["nosuch"], "--checkpoint, --output", "--checkpoint CHECKPOINT --output OUTPUT [options]"),
        ("plan", [], "--recipe", "--recipe RECIPE [options], or a run's file with --config"),
        ("port", [], "FILE", "[options] FILE"),
    ],
)
def test_a_command_says_what_it_lacks_in_four_parts(name, words, lacking, offered, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"shardwright.scripts.{name}").main()
    assert ended.value.code == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"error: {name}.py\n  found:   no {lacking}\n  why not: ")
    assert f"instead: {name}.py {offered}" in shown


def test_words_behind_two_dashes_are_no_options():
    parser = Parser("What it does.")
    parser.add_argument("tables", nargs="*")
    assert parser.parse_args(["--", "--recip"]).tables == ["--recip"]


def test_help_prints_descriptions_as_written_defaults_and_flags_of_the_callers(capsys):
    with pytest.raises(SystemExit) as ended:
        parse([Options], ["--help"], "One.\n\n  Two.", "Exit codes:\n  0  done", {"--compile_only": "Compile alone."})
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert "One.\n\n  Two.\n" in printed
    assert "Exit codes:\n  0  done\n" in printed
    assert "How many. (default: 1)" in printed
    assert "  --compile_only " in printed
    assert "compile-only" not in printed, "one spelling is enough"


@pytest.mark.parametrize(
    ("word", "shown", "hidden"),
    [
        ([], ["--recipe", "--eval_strategy {no,steps,epoch}", "more options:", "Exit codes"], ["--lora_alpha", "None"]),
        (["adapter"], ["--lora_alpha X", "--adapter_format {peft,per_expert}"], ["--recipe", "more options:"]),
        (["all"], ["--recipe", "--lora_alpha", "--packing", "--no_packing"], ["more options:"]),
    ],
)
def test_help_shows_the_common_options_a_group_or_all_each_once_with_its_choices(word, shown, hidden, capsys):
    with pytest.raises(SystemExit) as ended:
        parse([TrainingArguments], ["--help", *word], "What it does.", "Exit codes: 0")
    printed = capsys.readouterr().out
    assert ended.value.code == 0
    assert [text for text in shown if text not in printed] == []
    assert [text for text in hidden if text in printed] == []
    if not word:
        assert len(printed.splitlines()) < 110


def test_the_help_of_no_group_names_the_nearest(capsys):
    with pytest.raises(SystemExit) as ended:
        parse([TrainingArguments], ["--help", "adaptr"], None)
    assert ended.value.code == 2
    assert "no group 'adaptr'; did you mean 'adapter'?" in capsys.readouterr().err
