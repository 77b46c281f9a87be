"""Published commands and YAML files of the kind that people share, in our options, each argument accounted for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwright.arguments.command_line import parse
from shardwright.arguments.known_flags.entry import MISSING, OURS
from shardwright.arguments.known_flags.translate import NO_OPTION
from shardwright.arguments.port.port import Port, ported
from shardwright.arguments.port.published import read_published
from shardwright.arguments.training import TrainingArguments
from shardwright.data.samples.chat import chat_of
from shardwright.errors import UserError
from tests.support.fork_server import run
from tests.support.paths import ROOT
from tests.support.training import environment

FOLDER = ROOT / "tests/arguments/published"
ALPACA = {"model": "meta-llama/Llama-2-7b-hf", "dataset": "./alpaca_data.json", "warmup_steps": 0.03, "bf16": True}
QLORA = {"lora_r": 32, "lora_alpha": 16.0, "base_dtype": "nf4", "lora_target": "all-linear", "eval_strategy": "epoch"}
CHATS = {
    "dataset": "chats.jsonl,more.jsonl,my/chats:en#train_sft",
    "eval_strategy": "steps",
    "optimizer_dtype": "bfloat16",
}
CHATS |= {"eval_dataset": "held_out=held_out.jsonl,unseen=my/unseen"}
NAMED = f"{FOLDER}/data/identity.json,my/alpaca:en#train_demo,chats.jsonl"  # by the dataset_info.json there
LORA = {"lora_r": 32, "lora_target": "q_proj,k_proj,v_proj,o_proj", "lora_dropout": 0.05}
# file → arguments, those that are not carried, some of the options
CASES: dict[str, tuple[int, set[str], dict[str, Any]]] = {
    "alpaca_full.sh": (20, set(), ALPACA),
    "trl_sft.sh": (9, {"push_to_hub"}, {"sequence_length": 2048, "packing": True, "learning_rate": 2e-5}),
    "trl_sft_lora.sh": (17, {"eos_token"}, LORA),
    "trl_dpo.sh": (17, set(), {"objective": "dpo", "beta": 0.05, "max_steps": 1000, "optim": "adamw"}),
    "zephyr_sft.sh": (
        38,
        {"push_to_hub"},
        {"num_train_epochs": 1.0, "dataset": "chats/zephyr_200k#train_sft", "packing": False},
    ),
    "zephyr_dpo_qlora.yaml": (33, set(), {"objective": "dpo", "base_dtype": "nf4", "lora_r": 128, "warmup_steps": 0.1}),
    "axolotl_qlora.yml": (
        37,
        {"chat_template"},
        {**QLORA, "sequence_length": 4096, "per_device_train_batch_size": 2, "overflow": "drop"},
    ),
    "axolotl_full.sh": (
        41,
        {"optimizer", "datasets.roles"},
        {**CHATS, "run_name": "first"},
    ),
    "llamafactory_lora_sft.yaml": (
        33,
        set(),
        {
            "dataset": NAMED,
            "columns": "messages=conversations,tools=functions",
            "lora_r": 8,
            "lora_target": "all-linear",
            "packing": False,
        },
    ),
    "llamafactory_dpo.sh": (
        26,
        set(),
        # twice the length of an answer there
        {"objective": "orpo", "learning_rate": 1e-6, "base_dtype": "nf4", "lora_r": 16, "sequence_length": 4096},
    ),
    "run_clm.sh": (20, {"fp16"}, {"dataset": "wikitext:wikitext-103-raw-v1", "bf16": True, "warmup_steps": 500}),
}  # fmt: skip
# command of no objective here → what its refusal names
REFUSED = {
    **dict.fromkeys(
        ("trl rloo", "trl ppo", "python examples/scripts/online_dpo.py", "python nash_md.py", "python scripts/grpo.py"),
        "--objective dpo or kto on answers ranked before",
    ),
    **dict.fromkeys(("trl distillation", "python examples/scripts/gkd.py"), "--objective distill"),
    "python prm.py": "--objective reward",
    "torchrun run_mlm.py": "a causal model",
    "accelerate launch run_glue.py": "prompts with completions",
    "python run_translation_no_trainer.py": "prompts with completions",
}


def port_of(name: str) -> Port:
    return ported(read_published(str(FOLDER / name)))


@pytest.mark.parametrize("name", CASES)
def test_each_argument_is_carried_or_named_and_the_options_parse(name: str, tmp_path: Path) -> None:
    count, lost, options = CASES[name]
    found = port_of(name)
    assert len(found.outcomes) == count
    named = {each.name for each in found.outcomes if each.kind in (MISSING, NO_OPTION)}
    assert named == lost
    assert {key: found.options[key] for key in options} == options
    assert all(became for _, _, became in found.rows)
    (tmp_path / "run.yaml").write_text(found.text)
    (by_file,) = parse([TrainingArguments], ["--config", str(tmp_path / "run.yaml")], None)
    (by_words,) = parse([TrainingArguments], found.words, None)
    assert by_file == by_words == TrainingArguments(**found.options)


def test_columns_of_datasets_are_joined_under_the_names_that_the_objective_reads(tmp_path: Path) -> None:
    entries = {
        "asked": {"file_name": "a.json", "columns": {"prompt": "question", "query": "context", "response": "output"}},
        "other": {"file_name": "b.json", "columns": {"prompt": "query"}},
        "pairs": {"file_name": "c.json", "columns": {"prompt": "question", "chosen": "good", "rejected": "rejected"}},
        "labelled": {"file_name": "d.json", "columns": {"prompt": "question", "response": "said", "kto_tag": "liked"}},
    }
    (tmp_path / "dataset_info.json").write_text(json.dumps(entries))
    for stage, names, columns, lost in (
        ("sft", "asked", "instruction=question,input=context", []),
        ("sft", "asked,other", "instruction=question,input=context", ["dataset.columns.prompt"]),
        ("dpo", "pairs", "prompt=question,chosen=good", []),
        ("kto", "labelled", "prompt=question,completion=said,label=liked", []),
    ):
        (tmp_path / "train.yaml").write_text(f"stage: {stage}\ndataset: {names}\ndataset_dir: .\n")
        found = ported(read_published(str(tmp_path / "train.yaml")))
        assert found.options["columns"] == columns
        assert [each.name for each in found.outcomes if each.kind == MISSING] == lost
        assert TrainingArguments(**found.options).reads[0].names


def test_an_adapters_arguments_count_where_one_is_trained_and_a_mixture_keeps_its_shares(
    tmp_path: Path,
) -> None:
    for text, adapted in (("trl sft --lora_r 8 --load_in_4bit", False), ("trl sft --lora_r 8 --use_peft", True)):
        (tmp_path / "train.sh").write_text(text)
        assert ("lora_r" in ported(read_published(str(tmp_path / "train.sh"))).options) == adapted
    mixed = "datasets: [{path: a/b, name: en, fraction: 0.75, columns: [messages]}, "
    mixed += "{path: c/d, data_dir: data/rl, fraction: 0.25}]\n"
    (tmp_path / "sft.yaml").write_text(mixed)
    (tmp_path / "train.sh").write_text("trl sft --config sft.yaml")
    assert ported(read_published(str(tmp_path / "train.sh"))).options["dataset"] == "a/b:en:0.75,c/d/data/rl:0.25"
    for more, dataset, lost in (
        ("mix_strategy: interleave_over\ninterleave_probs: 0.7,0.3", "a/b:0.7,c/d.jsonl:0.3", set()),
        ("mix_strategy: interleave_under", "a/b:1,c/d.jsonl:1", set()),
        ("mix_strategy: concat", "a/b,c/d.jsonl", set()),
        ("mix_strategy: interleave_over\ninterleave_probs: '1'", "a/b,c/d.jsonl", {"mix_strategy", "interleave_probs"}),
    ):
        (tmp_path / "train.yaml").write_text(f"stage: sft\ndataset: a/b, c/d.jsonl\n{more}\n")
        found = ported(read_published(str(tmp_path / "train.yaml")))
        assert found.options["dataset"] == dataset
        assert {each.name for each in found.outcomes if each.kind == MISSING} == lost
    (tmp_path / "train.sh").write_text("accelerate launch dpo.py --loss_type sigmoid --rpo_alpha 0.5")
    pairs = ported(read_published(str(tmp_path / "train.sh"))).options
    assert (pairs["loss_type"], pairs["loss_weights"], "objective" in pairs) == ("sigmoid,sft", "1,0.5", True)
    (tmp_path / "dataset_info.json").write_text('{"mine": {"file_name": ["a.json"]}}')
    (tmp_path / "train.yaml").write_text("stage: sft\ndataset: mine\ndataset_dir: .\n")
    found = ported(read_published(str(tmp_path / "train.yaml")))
    assert next(each.name for each in found.outcomes if each.kind != OURS) == "dataset.file_name"
    for more, asked in (
        ("pref_loss: hinge\npref_ftx: 0.5", {"objective": "dpo", "loss_type": "hinge,sft", "loss_weights": "1,0.5"}),
        ("pref_ftx: 0.5\npref_loss: ipo", {"objective": "dpo", "loss_type": "ipo,sft", "loss_weights": "1,0.5"}),
        ("pref_loss: orpo\npref_ftx: 0.5", {"objective": "orpo"}),
    ):
        (tmp_path / "train.yaml").write_text(f"stage: dpo\nmodel_name_or_path: a/b\n{more}\n")
        options = ported(read_published(str(tmp_path / "train.yaml"))).options
        assert {name: options[name] for name in ("objective", "loss_type", "loss_weights") if name in options} == asked
        TrainingArguments(**options)
    for more, beta in (("{beta: 0.2, num_generations: null}", 0.2), ("{beta: 0.2, num_generations: 4}", None)):
        (tmp_path / "train.yaml").write_text(f"base_model: a/b\nrl: dpo\ntrl: {more}\n")
        assert ported(read_published(str(tmp_path / "train.yaml"))).options.get("beta") == beta
    for odd in ("datasets: [5]", "datasets: [{path: a.jsonl, roles: [assistant]}]"):
        (tmp_path / "train.yaml").write_text(f"base_model: a/b\n{odd}\n")
        assert [each.kind for each in ported(read_published(str(tmp_path / "train.yaml"))).outcomes][-1] == MISSING
    read = "roles: {tool: [ipython, observation], user: human, system: developer}"
    (tmp_path / "train.yaml").write_text(f"base_model: a/b\nrl: kto\ndatasets: [{{path: a.jsonl, {read}}}]\n")
    found = ported(read_published(str(tmp_path / "train.yaml")))
    assert (found.options["sequence_length"], {each.kind for each in found.outcomes}) == (1024, {OURS})
    assert chat_of({"messages": [{"role": "ipython", "content": "4"}]}).messages[0]["role"] == "tool"
    for texts in ("datasets: [{path: a.jsonl, type: completion, field: b}]", "pretraining_dataset: [{path: a/b}]"):
        for more, overflow in (("", "split"), ("excess_length_strategy: truncate", "truncate_right")):
            (tmp_path / "train.yaml").write_text(f"base_model: a/b\n{texts}\n{more}\n")
            assert ported(read_published(str(tmp_path / "train.yaml"))).options["overflow"] == overflow
    for more, steps in (("warmup_steps: 0", 0.1), ("warmup_steps:", 0.1), ("warmup_steps: 5", 5)):
        text = f"base_model: a/b\nwarmup_ratio: 0.1\n{more}\nsave_steps: 0.25\nadapter: lora\n"
        text += "lora_target_linear: true\nlora_target_modules: [q_proj]\n"
        (tmp_path / "train.yaml").write_text(text)
        found = ported(read_published(str(tmp_path / "train.yaml")))
        assert (found.options["warmup_steps"], found.options["lora_target"]) == (steps, "all-linear")
        assert {each.name for each in found.outcomes if each.kind == MISSING} == {"save_steps"}, "a share of all steps"
    for more, packing in (("", True), ("packing: false", False)):
        (tmp_path / "train.yaml").write_text(f"stage: pt\nmodel_name_or_path: a/b\n{more}\n")
        assert ported(read_published(str(tmp_path / "train.yaml"))).options["packing"] == packing
    (tmp_path / "train.yaml").write_text("stage: sft\nmodel_name_or_path: a/b\n")
    assert ported(read_published(str(tmp_path / "train.yaml"))).options["lora_r"] == 8  # LLaMA-Factory's default


def test_the_global_batch_there_is_said_where_the_launcher_names_its_processes() -> None:
    assert "2 × 8 processes × 8 = 128 rows" in port_of("trl_dpo.sh").batch
    assert port_of("trl_sft.sh").batch == ""


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("train.sh", "pip install trl\necho done\n", "2 commands, none of which starts a training"),
        ("train.sh", "trl sft --config absent.yaml\n", "absent.yaml"),
        ("train.yaml", "- a\n- b\n", "a list"),
        ("train.yaml", "a: [\n", "ParserError"),
        ("train.sh", "trl vllm-serve --model a/b\ntrl env\nllamafactory-cli chat a.yaml\n", "none of which starts"),
        ("train.sh", "trl vllm-serve --model a/b &\ntrl grpo --model_name_or_path a/b\n", "--objective dpo or kto"),
        *(("train.sh", f"{name} --model_name_or_path a/b\n", words) for name, words in REFUSED.items()),
        ("grpo/config.yaml", "model_name_or_path: a/b\n", "--objective dpo or kto"),
        ("config.yaml", "model_name_or_path: a/b\nnum_generations: 8\n", "--objective dpo or kto"),
        ("config.yaml", "base_model: a/b\nrl: grpo\n", "rl: grpo(.|\n)*--objective dpo or kto"),
        ("config.yaml", "base_model: a/b\nrl: ebft\n", "rl: ebft(.|\n)*--objective dpo"),
        ("config.yaml", "base_model: a/b\nprocess_reward_model: true\n", "--objective reward"),
        ("config.yaml", "model_name_or_path: a/b\nstage: ppo\n", "stage: ppo(.|\n)*--objective dpo or kto"),
    ],
)
def test_what_is_no_training_is_refused(tmp_path: Path, name: str, text: str, words: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=words):
        ported(read_published(str(tmp_path / name)))


def test_the_command_prints_what_became_of_each_and_writes_a_file_that_train_takes(tmp_path: Path) -> None:
    script, out = ROOT / "scripts/port.py", tmp_path / "run.yaml"
    done = run(script, str(FOLDER / "zephyr_dpo_qlora.yaml"), "--write", str(out), env=environment())
    assert (done.returncode, done.stderr) == (0, "")
    assert "33 of 33 arguments carried over" in done.stdout
    assert f"--config {out}" in done.stdout
    (args,) = parse([TrainingArguments], ["--config", str(out)], None)
    assert (args.objective, args.beta) == ("dpo", 0.01)
    again = run(script, str(FOLDER / "zephyr_dpo_qlora.yaml"), "--write", str(out), env=environment())
    assert again.returncode == 2
    assert "a file that is there already" in again.stderr
    absent = run(script, str(FOLDER / "zephyr_dpo_qlora.yaml"), "--write", "absent/run.yaml", env=environment())
    assert (absent.returncode, absent.stdout) == (2, "")
    assert "no folder absent" in absent.stderr
