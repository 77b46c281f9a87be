"""Scripts for transformers' and trl's trainers, as people write them, run here with another import."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, LlamaForCausalLM

from tests.support.chats import CHATML, byte_tokenizer, chats, write_records
from tests.support.fork_server import run
from tests.support.logs import logged
from tests.support.paths import ROOT

SCRIPTS = ROOT / "tests/scripts_of_others"
SIZES: dict[str, Any] = {
    "vocab_size": 304,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
COMMON = ["--max_steps", 2, "--per_device_train_batch_size", 2, "--learning_rate", 1e-2, "--logging_steps", 1]
OF_TRL = ["--model_name_or_path", "base", "--max_length", 64, "--output_dir", "out", *COMMON]
RUN_CLM = ["--train_file", "train.txt", "--validation_file", "valid.txt", "--block_size", 32, "--do_train", "--do_eval"]
# script → its words
WORDS: dict[str, list[Any]] = {
    "run_clm": ["--model_name_or_path", "base", *RUN_CLM, "--output_dir", "out", *COMMON],
    "sft": ["--dataset_name", "chats.jsonl", *OF_TRL, "--use_peft", "--lora_target_modules", "q_proj", "v_proj"],
    "dpo": ["--dataset_name", "pairs.jsonl", *OF_TRL, "--beta", 0.2],
    "kto": ["--dataset_name", "marked.jsonl", *OF_TRL],
    "reward": ["--dataset_name", "pairs.jsonl", *OF_TRL],
    "course_trainer": [],
    "course_loop": [],
}
# script → its file, and the class that it imports from here; trl's scripts differ by the names in them alone
FILES = {
    "run_clm": ("run_clm.py", "Trainer"),
    **{name: ("trl_sft.py", f"{kind}Trainer") for name, kind in
       {"sft": "SFT", "dpo": "DPO", "kto": "KTO", "reward": "Reward"}.items()},
    "course_trainer": ("course_trainer.py", "Trainer"),
    "course_loop": ("course_loop.py", "Accelerator"),
}  # fmt: skip


def script_of(name: str) -> str:
    """The script after its port: a class imported from here, on one line, and no more from where it was."""
    file, kind = FILES[name]
    text = (SCRIPTS / file).read_text().replace("SFT", kind.removesuffix("Trainer"))
    left_out, place = f"    {kind},\n", text.index("\nfrom ") + 1
    if name == "course_loop":  # on a line of its own
        left_out = f"from accelerate import {kind}\n"
    assert text.count(left_out) == 1
    return text[:place] + f"from shardwright import {kind}\n" + text[place:].replace(left_out, "")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small model and data, under the names that the scripts have for them."""

    def text(i: int) -> str:
        return f"{i} and {i} are {2 * i}, and so on, and on, and on."

    torch.manual_seed(0)
    tokenizer = byte_tokenizer(CHATML, "<|im_end|>")
    for name in ("base", "tokenizer"):
        tokenizer.save_pretrained(tmp_path / name)
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(tmp_path / "base")
    small = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}
    GPT2Config(**small, vocab_size=304, bos_token_id=0, eos_token_id=0).save_pretrained(tmp_path / "gpt2-small")
    for name, numbers in {"train": range(96), "valid": range(900, 932)}.items():
        (tmp_path / f"{name}.txt").write_text("\n".join(map(text, numbers)))
        write_records(tmp_path / f"{name}.jsonl", [{"content": text(i)} for i in numbers])
    write_records(tmp_path / "chats.jsonl", chats(40, 4))
    pairs = [{"prompt": f"{i} and {i}?", "chosen": f" {2 * i}.", "rejected": f" {2 * i + 1}."} for i in range(40)]
    write_records(tmp_path / "pairs.jsonl", pairs)
    marked = [{"prompt": p["prompt"], "completion": p[key], "label": key == "chosen"} for p in pairs
              for key in ("chosen", "rejected")]  # fmt: skip
    write_records(tmp_path / "marked.jsonl", marked)
    return tmp_path


def ported(name: str, folder: Path) -> tuple[str, Path]:
    """The words that the ported script prints, and its output folder."""
    (folder / f"{name}.py").write_text(script_of(name))
    few = {**os.environ, "CPU_NUM_DEVICES": "2"}  # they run sooner
    few.pop("USE_TORCH_XLA", None)  # which scripts that open no device set, and transformers' configs ask
    done = run(folder / f"{name}.py", *WORDS[name], cwd=folder, env=few)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout, folder / {"course_trainer": "codeparrot-ds", "course_loop": "weighted"}.get(name, "out")


@pytest.mark.slow
def test_run_clm_trains_evaluates_and_writes_its_metrics_and_card(folder):
    said, output = ported("run_clm", folder)
    assert re.search(r"\*+ train metrics \*+(.|\n)*train_samples +=.*(.|\n)*\*+ eval metrics \*+", said)
    results = json.loads((output / "all_results.json").read_text())
    assert results == {**json.loads((output / "train_results.json").read_text()),
                       **json.loads((output / "eval_results.json").read_text())}  # fmt: skip
    assert results["eval_loss"] == pytest.approx(logged(output, "eval_loss")[-1])
    assert json.loads((output / "training_args.json").read_text())["sequence_length"] == 32, "a block has a row"
    card = ModelCard.load(output / "model/README.md")
    assert card.data.datasets == ["my/texts"]
    assert card.data.pipeline_tag == "text-generation"
    AutoModelForCausalLM.from_pretrained(output / "model")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sft", "dpo", "kto", "reward"])
def test_trls_script_trains_and_saves_where_it_says(name, folder):
    said, output = ported(name, folder)
    assert "Training completed." in said
    assert "Model saved to out." in said
    assert (output / ("adapter_model.safetensors" if name == "sft" else "model.safetensors")).is_file()
    args = json.loads((output / "training_args.json").read_text())
    assert (args["objective"], args["sequence_length"]) == (name, 64 if name == "sft" else 2 * 64), "of both answers"
    assert not args["packing"]
    assert args["lora_target"] == ("q_proj.weight,v_proj.weight" if name == "sft" else "all-linear")
    assert len(logged(output, "loss")) == 2
    if name == "dpo":
        assert args["beta"] == 0.2


@pytest.mark.slow
def test_the_courses_trainer_leaves_the_trained_weights_in_the_scripts_own_model(folder):
    _, output = ported("course_trainer", folder)
    saved, left = (
        AutoModelForCausalLM.from_pretrained(path).state_dict()
        for path in (folder / "codeparrot-small", output / "model")
    )
    assert all(torch.equal(saved[name], left[name]) for name in left)
    losses = logged(output, "loss")
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_the_courses_loop_trains_its_own_loss_and_saves_the_scripts_own_model(folder):
    said, output = ported("course_loop", folder)
    (loss,) = re.findall(r"'loss/eval': ([\d.]+)", said)
    start, left = (AutoModelForCausalLM.from_pretrained(path) for path in (folder / "base", output))
    assert float(loss) < 5.6, "of weights that know nothing it is 5.72"
    assert not torch.equal(start.lm_head.weight, left.lm_head.weight)
