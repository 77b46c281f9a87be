"""A run on chats: recognised and said, kept apart in rows, and refused where the model can't keep them apart."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, StableLmConfig

from shardwright.arguments.training import TrainingArguments
from shardwright.errors import UserError
from shardwright.run import train
from tests.support.chats import CHATML, DATED, byte_tokenizer, chats, clock, write_records

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 304}


@pytest.fixture
def arguments(tmp_path: Path) -> dict:
    byte_tokenizer(CHATML, "<end>").save_pretrained(tmp_path / "tokenizer")
    # the end of a turn is none of the tokenizer's, and the model's config names it
    stop = byte_tokenizer().convert_tokens_to_ids("<|im_end|>")
    LlamaConfig(**SMALL, intermediate_size=32, eos_token_id=[256, stop]).save_pretrained(tmp_path / "model")
    return {
        "recipe": "llama_fsdp",
        "compute": "scan=False,remat=none",
        "max_eval_rows": 16,
        "model": str(tmp_path / "model" / "config.json"),
        "tokenizer": str(tmp_path / "tokenizer"),
        "dataset": str(write_records(tmp_path / "chats.jsonl", chats(80))),
        "sequence_length": 512,
        "max_steps": 2,
        "output_dir": str(tmp_path / "out"),
    }


@pytest.mark.slow
def test_a_base_model_learns_to_chat_by_one_option_and_transformers_answers_with_it(
    arguments, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path / "cache"))
    base = byte_tokenizer(None, "<end>")  # no template, and another end of texts than a turn's
    torch.manual_seed(0)
    sizes = {**SMALL, "hidden_size": 32, "num_key_value_heads": 2, "intermediate_size": 32}
    LlamaForCausalLM(LlamaConfig(**sizes, eos_token_id=base.eos_token_id)).save_pretrained(tmp_path / "base")
    base.save_pretrained(tmp_path / "base")
    asked = [{"role": "user", "content": "7?"}]
    records = [
        {"messages": [{**asked[0], "content": f"{i}?"}, {"role": "assistant", "content": "yes"}]} for i in range(80)
    ]
    arguments |= {"model": str(tmp_path / "base"), "tokenizer": None, "chat_template": "chatml"}
    arguments |= {"dataset": str(write_records(tmp_path / "chats.jsonl", records)), "sequence_length": 64}
    arguments |= {"max_steps": 36, "learning_rate": 3e-2, "eval_on_start": False}
    said = io.StringIO()
    trainer = train(TrainingArguments(**arguments), Console(file=said, width=200))
    assert "records with messages; trained on: the assistant's turns" in said.getvalue()
    assert (
        "chats are written by the template chatml, kept with the tokenizer; turns end with <|im_end|>"
        in said.getvalue()
    )
    assert "80 samples in " in said.getvalue()
    assert "warning" not in said.getvalue(), "every turn ends in a token that ends a generation"
    assert trainer.state.global_step == 36
    assert json.loads((tmp_path / "out" / "training_args.json").read_text())["isolate_documents"] is True
    tokenizer, model = (
        kind.from_pretrained(tmp_path / "out" / "model") for kind in (AutoTokenizer, AutoModelForCausalLM)
    )
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, do_sample=False, max_new_tokens=20)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "yes<|im_end|>"


def test_a_model_that_cannot_keep_chats_apart_is_refused_before_they_are_read(arguments, tmp_path) -> None:
    StableLmConfig(**SMALL, num_key_value_heads=2, intermediate_size=32).save_pretrained(tmp_path / "stablelm")
    with pytest.raises(UserError, match="stablelm"):
        train(
            TrainingArguments(
                **{**arguments, "recipe": "auto", "model": str(tmp_path / "stablelm" / "config.json"), "mesh": "fsdp=8"}
            )
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "stablelm"])
def test_without_packing_each_sample_has_its_row_and_each_length_of_rows_is_compiled_once(
    arguments, tmp_path, monkeypatch, family
) -> None:
    """StableLM can't keep samples of a row apart, and here it need not."""
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path / "cache"))
    if family == "stablelm":
        StableLmConfig(**SMALL, num_key_value_heads=2, intermediate_size=32).save_pretrained(tmp_path / "stablelm")
        arguments |= {"recipe": "auto", "model": str(tmp_path / "stablelm" / "config.json"), "mesh": "fsdp=8"}
    arguments |= {"packing": False, "per_device_train_batch_size": 2, "max_steps": 12, "logging_steps": 1}
    # of one turn, 50 to 120 tokens
    arguments |= {"dataset": str(write_records(tmp_path / "short.jsonl", chats(240, 8)[::3]))}
    said = io.StringIO()
    trainer = train(TrainingArguments(**arguments), Console(file=said, width=200))
    assert "batches of rows of 64, 128, 256, 512 tokens, each length compiled once" in said.getvalue()
    met = {length for length, guard in trainer.train_step.guards.items() if not guard.first}
    assert met == {64, 128}, "of the lengths that there are"
    assert trainer.train_step.compiles == len(met)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 12
    saved = json.loads((tmp_path / "out" / "training_args.json").read_text())
    assert saved["isolate_documents"] is (family == "llama")


@pytest.mark.slow
def test_a_run_resumed_on_another_day_and_machine_writes_the_date_of_its_first_start(
    arguments, tmp_path, monkeypatch
) -> None:
    byte_tokenizer(DATED, "<end>").save_pretrained(tmp_path / "tokenizer")
    arguments |= {"save_steps": 1, "eval_on_start": False}
    corpora, said = [], io.StringIO()
    for day in (1, 2):
        monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", clock(day))
        monkeypatch.setattr("shardwright.run.today", clock(day).today().isoformat)
        monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path / f"cache{day}"))
        again = {"max_steps": day, **({"resume_from_checkpoint": "latest"} if day == 2 else {})}
        loop = train(TrainingArguments(**{**arguments, **again}), Console(file=said, width=200))
        assert loop.state.global_step == day
        corpora.append(loop.corpus)
    assert said.getvalue().count("the date of the run's first start: 2026-11-01") == 2
    assert corpora[0].train.fingerprint == corpora[1].train.fingerprint
    assert "on 01 Nov 2026" in corpora[1].tokenizer.decode(corpora[1].heldout.dataset[0]["input_ids"])
    host = json.loads((tmp_path / "out" / "checkpoint-2" / "host.json").read_text())
    assert host["data"]["date"] == "2026-11-01"
