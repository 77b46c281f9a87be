"""A run on chats: recognised and said, kept apart in rows, and refused where the model can't keep them apart."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from transformers import FalconConfig, LlamaConfig

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
def test_a_run_on_chats_says_what_it_found_and_keeps_them_apart(arguments, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path / "cache"))
    said = io.StringIO()
    trainer = train(TrainingArguments(**arguments), Console(file=said, width=200))
    assert "records with messages; trained on: the assistant's turns" in said.getvalue()
    assert "80 samples in " in said.getvalue()
    assert "warning" not in said.getvalue(), "every turn ends in a token that the model's config calls an end"
    assert trainer.state.global_step == 2
    assert json.loads((tmp_path / "out" / "training_args.json").read_text())["isolate_documents"] is True


def test_a_model_that_cannot_keep_chats_apart_is_refused_before_they_are_read(arguments, tmp_path) -> None:
    FalconConfig(**SMALL, new_decoder_architecture=True, num_kv_heads=2).save_pretrained(tmp_path / "falcon")
    with pytest.raises(UserError, match="falcon"):
        train(
            TrainingArguments(
                **{**arguments, "recipe": "auto", "model": str(tmp_path / "falcon" / "config.json"), "mesh": "fsdp=8"}
            )
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "falcon"])
def test_without_packing_each_sample_has_its_row_and_each_length_of_rows_is_compiled_once(
    arguments, tmp_path, monkeypatch, family
) -> None:
    """Falcon can't keep samples of a row apart, and here it need not."""
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path / "cache"))
    if family == "falcon":
        FalconConfig(**SMALL, new_decoder_architecture=True, num_kv_heads=2).save_pretrained(tmp_path / "falcon")
        arguments |= {"recipe": "auto", "model": str(tmp_path / "falcon" / "config.json"), "mesh": "fsdp=8"}
    arguments |= {"packing": False, "per_device_train_batch_size": 2, "max_steps": 12, "logging_steps": 1}
    said = io.StringIO()
    trainer = train(TrainingArguments(**arguments), Console(file=said, width=200))
    assert "batches of rows of 64, 128, 256, 512 tokens, each length compiled once" in said.getvalue()
    met = {length for length, guard in trainer.train_step.guards.items() if not guard.first}
    assert 2 <= len(met) <= 4
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
