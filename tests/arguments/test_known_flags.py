"""Other trainers' arguments: each has an entry; what means the same is taken, the rest is named, all at once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import peft
import pytest
import transformers
import trl
from transformers.training_args import OptimizerNames

from shardwright.arguments.command_line import parse
from shardwright.arguments.from_theirs import arguments_like, class_of
from shardwright.arguments.known_flags.entry import MISSING, OURS, Entry
from shardwright.arguments.known_flags.page import pages
from shardwright.arguments.known_flags.table import TABLE, find
from shardwright.arguments.port.defaults import DEFAULTS
from shardwright.arguments.training import TrainingArguments
from shardwright.errors import UserError
from shardwright.scripts import export
from tests.support.paths import ROOT

OF_TRANSFORMERS = {each.name for each in fields(transformers.TrainingArguments)}
CLASSES: dict[str, Any] = {
    "transformers' TrainingArguments": transformers.TrainingArguments,
    "trl's ScriptArguments": trl.ScriptArguments,
    "trl's DatasetMixtureConfig": trl.DatasetMixtureConfig,
    "trl's ModelConfig": trl.ModelConfig,
    "trl's SFTConfig": trl.SFTConfig,
    "trl's DPOConfig": trl.DPOConfig,
    "trl's KTOConfig": trl.KTOConfig,
    "trl's RewardConfig": trl.RewardConfig,
    "trl's GRPOConfig": trl.GRPOConfig,
    "peft's LoraConfig": peft.LoraConfig,
}
PROGRAMS = {
    "transformers": transformers.TrainingArguments,
    "trl sft": trl.SFTConfig,
    "trl dpo": trl.DPOConfig,
    "trl kto": trl.KTOConfig,
    "trl reward": trl.RewardConfig,
}
# making such an object opens a device, by a name that torch_xla has deprecated
OPENS = pytest.mark.filterwarnings("ignore:Use torch_xla.device:DeprecationWarning")
OPTIONS = {each.name for each in fields(TrainingArguments)}


def every_entry() -> Iterator[tuple[str, str, Entry]]:
    for source, entries in TABLE.items():
        for name, entry in entries.items():
            for each in (entry, *entry.at.values()):
                yield source, name, each


@pytest.mark.parametrize("source", CLASSES)
def test_each_argument_of_the_installed_packages_has_an_entry(source: str) -> None:
    names = {each.name for each in fields(CLASSES[source])}
    if source != "transformers' TrainingArguments" and names > OF_TRANSFORMERS:
        names -= OF_TRANSFORMERS
    assert names - TABLE[source].keys() == set()


def test_entries_name_options_that_there_are_and_say_why_there_are_none() -> None:
    for source, name, entry in every_entry():
        named = {entry.name, *entry.options, *entry.fill} - {""}
        assert named <= OPTIONS, (source, name)
        assert entry.kind == OURS or entry.at or entry.why, (source, name)
        assert entry.kind != MISSING or entry.instead, (source, name)


def test_each_optimizer_of_transformers_is_one_of_ours_or_has_an_entry() -> None:
    entry = find("optim")
    assert entry is not None
    assert {each.value for each in OptimizerNames} - entry.at.keys() == {"adafactor"}


@pytest.mark.parametrize("program", PROGRAMS)
def test_defaults_that_a_port_writes_down_are_those_of_the_packages(program: str) -> None:
    theirs = {each.name: each.default for each in fields(PROGRAMS[program])}
    found = {}
    for name in DEFAULTS[program]:
        there = next((each for each in theirs if (entry := find(each, program)) and entry.name == name), name)
        if there == "packing" and there not in theirs:  # trl packs no answers
            found[name] = False
        else:
            entry = find(there, program)
            found[name] = entry.made(theirs[there])[name] if entry else theirs[there]
    if program in ("trl dpo", "trl kto", "trl reward"):
        found["sequence_length"] *= 2  # two answers share a row
    assert found == DEFAULTS[program]


def test_the_pages_of_the_table_are_up_to_date_and_have_every_source() -> None:
    for name, text in pages().items():
        assert (ROOT / "docs/reference" / name).read_text(encoding="utf-8") == text
    assert {*re.findall(r"^## (.*)$", "".join(pages().values()), re.MULTILINE)} == {*TABLE}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--model_name_or_path", "a/b", "--max_seq_length", "64"], {"model": "a/b", "sequence_length": 64}),
        (["--model-name-or-path=a/b", "--max-length=64"], {"model": "a/b", "sequence_length": 64}),
        # two answers share a row, whatever comes first; our own name is that of the row
        (["--max-length=64", "--objective", "dpo"], {"sequence_length": 128}),
        (["--objective", "dpo", "--sequence_length", "64"], {"sequence_length": 64}),
        (["--dataset_name", "a/b", "--dataset_config", "c"], {"dataset": "a/b:c"}),
        (["--dataset", "a/b", "--dataset_config_name=c"], {"dataset": "a/b:c"}),
        (["--bf16", "--packing"], {"bf16": True, "packing": True}),
        (
            ["--use_peft"],
            {"lora_r": 16, "lora_alpha": 32.0, "lora_dropout": 0.05, "lora_target": "q_proj,v_proj"},
        ),
        (["--use_peft", "--lora_target_modules", "o_proj"], {"lora_r": 16, "lora_target": "o_proj"}),
        (["--lora_r", "4", "--use_peft", "--load_in_4bit"], {"lora_r": 4, "lora_alpha": 32.0, "base_dtype": "nf4"}),
        (
            ["--lora_r=4", "--lora_target_modules", "q_proj", "v_proj", "--seed", "3"],
            {"lora_target": "q_proj,v_proj", "seed": 3},
        ),
        (["--report_to", "wandb", "tensorboard"], {"report_to": "wandb,tensorboard"}),
        (["--optim", "adamw_torch_fused", "--evaluation_strategy=epoch"], {"optim": "adamw", "eval_strategy": "epoch"}),
        (["--warmup_ratio", "0.1", "--max_steps", "50"], {"warmup": 5}),
        (["--gradient_checkpointing", "--deepspeed", "ds.json", "--fp16", "false"], {"bf16": None}),
        (["--no_dataloader_pin_memory", "--push_to_hub=False"], {}),
        (["--completion_only_loss", "false", "--truncation_mode", "keep_end"], {"train_on_prompt": True}),
    ],
)
def test_words_that_mean_the_same_are_taken(words: list[str], expected: dict[str, Any]) -> None:
    (args,) = parse([TrainingArguments], words, None)
    assert {name: getattr(args, name) for name in expected} == expected


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        parse([TrainingArguments], words, None)
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_all_that_a_command_can_not_take_is_named_in_one_answer(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--fp16", "--learning_rat", "1", "--num_generations=4", "--seed", "1", "--optim", "sgd", "--quux", "stray"]
    told = refused([*words, "--warmup_ratio", "7", "-seed", "1"], capsys)
    assert "7 options that this command can't take" in told
    assert "\n  --fp16: not to be had, TPUs compute in bfloat16 or float32; instead: --bf16 true\n" in told
    assert "\n  no option --learning_rat; did you mean '--learning_rate'?\n" in told
    assert "\n  --num_generations 4: not to be had" in told
    assert "\n  --optim sgd: not to be had" in told
    assert "\n  no option --quux\n" in told
    assert "\n  --warmup_ratio 7: not to be had, '7': it is a share of the steps" in told
    assert "\n  no option -seed; did you mean '--seed'?\n" in told


def test_what_has_no_effect_is_said_and_what_asks_for_nothing_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    parse([TrainingArguments], ["--gradient_checkpointing", "true", "--push_to_hub", "false", "--tf32=1"], None)
    told = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in told] == ["--gradient_checkpointing", "--tf32"]
    assert all("not needed here, because" in line for line in told)


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("--model_path_or_name", ""),  # near to nothing, in letters
        ("--gradient_checkpoint", "--gradient_checkpointing"),  # theirs
        ("--learning-rat", "--learning-rate"),
        ("--sample_tok", "--sample_tokens"),
    ],
)
def test_a_spelling_is_a_hint_only_if_it_is_near(word: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = refused([word, "1"], capsys)
    assert ("did you mean" in told) == bool(hint)
    assert hint in told


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--fp16"], "no option --fp16; --help lists them"),  # theirs, and of no command but a run's
        (["--output_dir", "x"], "no option --output_dir; did you mean '--output'? --help lists them"),  # a run's own
        (["--learning_rate=1"], "no option --learning_rate; --help lists them"),
        (
            ["--max_seq_length=8"],
            "no option --max_seq_length; it would be --sequence_length, which this command has not; --help lists them",
        ),
        (["--key_forma", "hub"], "no option --key_forma; did you mean '--key_format'? --help lists them"),
    ],
)
def test_a_hint_of_another_command_never_names_the_word_itself(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        export.parser().parse_args(words)
    assert capsys.readouterr().err.partition("error: ")[2] == said + "\n"


def test_python_takes_their_names_and_values() -> None:
    args = TrainingArguments(
        warmup_ratio=0.1, gradient_checkpointing=True, report_to=["wandb"], optim=OptimizerNames.ADAMW_TORCH_FUSED,
        eval_strategy="epoch", bf16=True, max_length=64, lr_scheduler_type=transformers.SchedulerType.COSINE,
    )  # fmt: skip
    assert (args.warmup, args.report_to, args.optim, args.eval_strategy) == (10, "wandb", "adamw", "epoch")
    assert (args.bf16, args.sequence_length, args.lr_scheduler_type) == (True, 64, "cosine")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"fp16": True}, "fp16: not to be had, TPUs compute in bfloat16"),
        ({"learning_rat": 1.0}, "no option --learning_rat; did you mean '--learning_rate'"),
        ({"fp16": True, "push_to_hub": True, "nothing": 1}, r"fp16(.|\n)*push_to_hub(.|\n)*no option --nothing"),
        ({"warmup_ratio": 0.1, "warmup_steps": 5}, "both set the same option"),
        ({"warmup_ratio": 1.0}, "a share of the steps, from 0 to below 1"),
    ],
)
def test_python_refuses_all_that_it_can_not_take_in_one_error(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        TrainingArguments(**options)


@OPENS
def test_an_object_of_transformers_means_the_same_here(tmp_path: Any) -> None:
    theirs = transformers.TrainingArguments(
        str(tmp_path), eval_strategy="steps", eval_steps=50, save_steps=50, load_best_model_at_end=True, seed=7,
        lr_scheduler_type="cosine", weight_decay=0.1, optim="adamw_torch", report_to=["tensorboard"],
    )  # fmt: skip
    assert class_of(theirs) == "TrainingArguments"
    ours = arguments_like(theirs, recipe="llama_tp")
    for name in ("output_dir", "eval_steps", "save_steps", "load_best_model_at_end", "seed", "weight_decay"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert (ours.recipe, ours.lr_scheduler_type, ours.report_to, ours.optim) == (
        *("llama_tp", "cosine", "tensorboard", "adamw"),
    )
    # what decides which numbers come out, though nobody set it
    assert (ours.num_train_epochs, ours.per_device_train_batch_size, ours.learning_rate) == (3.0, 8, 5e-5)
    assert (ours.warmup_steps, ours.logging_steps, ours.eval_on_start) == (0, 10, True)


@OPENS
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")  # trl's own use of it
def test_an_object_of_trl_means_the_same_here(tmp_path: Any) -> None:
    sft = arguments_like(trl.SFTConfig(str(tmp_path), max_length=128, packing=True, max_steps=7, bf16=False))
    assert (sft.sequence_length, sft.packing, sft.max_steps, sft.learning_rate) == (128, True, 7, 2e-5)
    dpo = arguments_like(trl.DPOConfig(str(tmp_path), beta=0.3, bf16=False, loss_type=["ipo"]))
    assert (dpo.objective, dpo.beta, dpo.learning_rate) == ("ipo", 0.3, 1e-6)
    # both answers of a pair lie in its row, and a batch has so many pairs
    assert (dpo.sequence_length, dpo.packing) == (2048, False)
    split = trl.SFTConfig(str(tmp_path), packing=True, packing_strategy="bfd_split", bf16=False)
    assert (arguments_like(split).overflow, arguments_like(split).sequence_length) == ("split", 1024)
    assert arguments_like(trl.SFTConfig(str(tmp_path), max_length=None, bf16=False)).overflow == "error"


@OPENS
def test_all_that_an_object_asks_for_and_can_not_be_had_is_named(tmp_path: Any) -> None:
    theirs = transformers.TrainingArguments(str(tmp_path), optim="sgd", data_seed=4, ignore_data_skip=True)
    with pytest.raises(UserError, match=r"--optim sgd(.|\n)*--ignore_data_skip(.|\n)*--data_seed 4"):
        arguments_like(theirs)
    with pytest.raises(UserError, match=r"found:   a dict"):
        arguments_like({"output_dir": "x"})


@OPENS
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")  # trl's own use of it
def test_arguments_of_a_training_that_is_not_here_are_not_taken_for_those_of_their_base_class(tmp_path: Any) -> None:
    class GKDConfig(trl.SFTConfig):
        __module__ = "trl.experimental.gkd"

    for theirs in (trl.GRPOConfig(str(tmp_path), bf16=False), GKDConfig(str(tmp_path), bf16=False)):
        with pytest.raises(UserError, match=r"instead: .*KTOConfig or RewardConfig; docs/objectives.md"):
            arguments_like(theirs)
