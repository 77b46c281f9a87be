"""A model card, as huggingface_hub reads it."""

from __future__ import annotations

from typing import Any

import pytest
from huggingface_hub import ModelCard

from shardwright import TrainingArguments, UserError
from shardwright.upstream.model_card import Card, last_metrics, may_write


def card(**more: Any) -> Card:
    args = TrainingArguments(learning_rate=3e-4, dataset="me/chats:large", output_dir="/home/me/secret", lora_r=4)
    facts: dict[str, Any] = {"args": args, "recipe": "auto", "mesh": {"fsdp": 8}, "base": "org/base@abc"}
    return Card(**{**facts, "adapter": True, "metrics": {"eval_loss": 1.23456}, "versions": {"torch": "2.9"}, **more})


def test_a_card_tells_base_data_options_numbers_and_versions_and_nothing_of_this_machine():
    text = card().text("mine")
    data = ModelCard(text).data
    assert data.base_model == "org/base"
    assert data.datasets == ["me/chats"]
    assert data.tags == ["shardwright", "sft", "lora"]
    assert (data.library_name, data.pipeline_tag) == ("peft", "text-generation")
    for words in ("# mine", "| learning_rate | 0.0003 |", "| lora_r | 4 |", "| eval_loss | 1.235 |", "| torch | 2.9 |"):
        assert words in text
    assert "secret" not in text
    args = TrainingArguments(dataset="me/chats#train_sft:0.5,you/texts@abc:0.5", lora_r=4, lora_target="(q|v)_proj")
    text = card(args=args).text("mine")
    assert ModelCard(text).data.datasets == ["me/chats", "you/texts"]
    assert r"| lora_target | (q\|v)_proj |" in text


def test_what_a_caller_says_wins(tmp_path):
    said = {"language": "en", "license": "mit", "tags": "chat", "model_name": "Mine", "finetuned_from": "org/other"}
    text = card(base=str(tmp_path)).text("mine", **said, dataset_name="you/set", tasks=["text-classification"])
    data = ModelCard(text).data
    assert (data.language, data.license, data.base_model) == (["en"], "mit", "org/other")
    assert (data.tags, data.datasets, data.pipeline_tag) == (
        ["shardwright", "chat"], ["you/set"], "text-classification",
    )  # fmt: skip
    assert "# Mine" in text
    assert str(tmp_path.parent) not in text
    with pytest.raises(UserError, match="colour"):
        card().text("mine", colour="red")


def test_the_numbers_are_those_of_every_held_out_set():
    """Each set has a log entry; the best weights are evaluated at the last step once more."""
    before, last = [{"eval_a_loss": 3.0, "step": 1}], [{"eval_a_loss": 2.0, "step": 2}, {"eval_b_loss": 5.0, "step": 2}]
    again = [{"loss": 1.0, "step": 2}, {"eval_a_loss": 1.5, "step": 2}, {"train_runtime": 1.0, "step": 2}]
    assert last_metrics([*before, *last, *again]) == {"eval_a_loss": 1.5, "eval_b_loss": 5.0}
    assert last_metrics([{"loss": 1.0, "step": 1}]) == {}


def test_a_readme_of_somebodys_own_stays():
    assert may_write(None)
    assert may_write(card().text("mine").encode())
    assert not may_write(b"# My model\n")
