"""A run of a reward model: it starts from a language model and ends as transformers' sequence classification."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from rich.console import Console
from transformers import AutoConfig, AutoModelForSequenceClassification, LlamaConfig, LlamaForCausalLM

from shardwright.arguments.training import TrainingArguments
from shardwright.errors import UserError
from shardwright.files.arrays import whole as whole_array
from shardwright.job import Job
from shardwright.loop import TrainingLoop
from shardwright.model.classifier import reward_config
from shardwright.model.meta_model import meta_model
from shardwright.objectives.reward import Reward
from shardwright.run import train
from shardwright.weights.hub_read import open_hub_weights
from tests.step.test_packing import apart
from tests.step.test_preference_run import SMALL, losses
from tests.support.chats import byte_tokenizer, write_records


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs, and a language model with its tokenizer, whose texts end in the token that pads them."""
    made = tmp_path_factory.mktemp("reward")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SMALL)).save_pretrained(made / "base")
    byte_tokenizer().save_pretrained(made / "base")
    pairs = [{"prompt": f"{i}?", "chosen": f"{i * i} it is", "rejected": "no " * (i % 5 + 1)} for i in range(60)]
    write_records(made / "pairs.jsonl", pairs)
    return made


def options(folder: Path, output: str, **more: Any) -> TrainingArguments:
    given: dict[str, Any] = {"recipe": "llama_fsdp", "compute": "scan=False,remat=none", "objective": "reward"}
    given |= {"model": str(folder / "base"), "dataset": str(folder / "pairs.jsonl"), "sequence_length": 64}
    given |= {"max_steps": 2, "logging_steps": 1, "save_steps": 1, "learning_rate": 1e-2, "warmup_steps": 0}
    return TrainingArguments(**given | {"output_dir": str(folder / output), **more})


def run(folder: Path, output: str, **more: Any) -> tuple[TrainingLoop, str]:
    said = io.StringIO()
    return train(options(folder, output, **more), Console(file=said, width=200)), said.getvalue()


@pytest.fixture(scope="module")
def whole(folder: Path) -> tuple[TrainingLoop, str]:
    return run(folder, "whole")


def check_rewards(loop: TrainingLoop, model: Any) -> None:
    """The last evaluation's values are those of the rewards that ``model`` of transformers gives the held-out texts."""
    rows = loop.corpus.heldout
    batch = apart(rows.read(np.arange(len(rows))))
    tokens = torch.where(batch["attention_mask"] > 0, batch["input_ids"], model.config.pad_token_id)
    with torch.no_grad():
        rewards = model(input_ids=tokens, attention_mask=batch["attention_mask"]).logits.squeeze(-1)
    margins = rewards[0::2] - rewards[1::2]
    theirs = {"mean_reward": rewards, "accuracy": (margins > 0).float(), "margin": margins}
    ours = next(entry for entry in reversed(loop.state.log_history) if "eval_margin" in entry)
    for name, values in theirs.items():
        assert ours[f"eval_{name}"] == pytest.approx(values.mean().item(), rel=1e-4), name
    assert ours["eval_loss"] == pytest.approx(-torch.nn.functional.logsigmoid(margins).mean().item(), rel=1e-4)


@pytest.mark.slow
def test_a_run_says_that_the_score_begins_at_random_and_logs_rewards(whole: tuple[TrainingLoop, str]) -> None:
    loop, said = whole
    assert "those of a language model, without lm_head.weight; score.weight begins at random" in said
    first = next(entry for entry in loop.state.log_history if "loss" in entry)
    assert {*Reward.logged} <= first.keys()
    evaluated = [entry["eval_loss"] for entry in loop.state.log_history if "eval_loss" in entry]
    assert evaluated[-1] < evaluated[0]


@pytest.mark.slow
def test_its_export_is_transformers_sequence_classification_of_the_same_rewards(
    folder: Path, whole: tuple[TrainingLoop, str]
) -> None:
    loop, _ = whole
    model, info = AutoModelForSequenceClassification.from_pretrained(
        folder / "whole/model", output_loading_info=True, dtype=torch.float32
    )
    assert not any(info.values())
    assert type(model).__name__ == "LlamaForSequenceClassification"
    assert model.config.num_labels == 1
    assert model.config.pad_token_id == byte_tokenizer().eos_token_id
    check_rewards(loop, model)
    opened = open_hub_weights(str(folder / "whole/model"), meta_model(reward_config(model.config)))
    assert opened.begun == []  # what goes on from it keeps its score
    assert whole_array(opened("score.weight")).equal(model.score.weight)


@pytest.mark.slow
def test_a_run_that_goes_on_ends_as_one_that_never_stopped(folder: Path, whole: tuple[TrainingLoop, str]) -> None:
    loop, said = run(folder, "rest", resume_from_checkpoint=str(folder / "whole/checkpoint-1"))
    assert "begins at random" not in said
    assert losses(loop) == losses(whole[0])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft 0.21.2
def test_an_adapter_trains_the_score_and_loads_in_peft(folder: Path) -> None:
    loop, _ = run(folder, "lora", lora_r=2, base_dtype="float32", save_strategy="no")
    base = AutoModelForSequenceClassification.from_pretrained(
        folder / "base", num_labels=1, dtype=torch.float32, pad_token_id=byte_tokenizer().eos_token_id
    )
    model = PeftModel.from_pretrained(base, str(folder / "lora/model"))
    assert model.peft_config["default"].task_type == "SEQ_CLS"
    check_rewards(loop, model)


def test_what_a_reward_model_can_not_be_is_refused_by_name(folder: Path) -> None:
    def refused(match: str, **more: Any) -> None:
        with pytest.raises(UserError, match=match):
            Job.resolve(options(folder, "refused", **more), lambda: 8)

    config = reward_config(AutoConfig.from_pretrained(folder / "base"))
    config.save_pretrained(folder / "scores")
    scores = str(folder / "scores/config.json")
    refused("LlamaForSequenceClassification as a language model", model=scores, objective="sft")
    config.num_labels = 2
    config.save_pretrained(folder / "two")
    refused("LlamaForSequenceClassification with num_labels=2", model=str(folder / "two/config.json"))
    (folder / "gpt2.json").write_text('{"model_type": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 2}')
    refused("GPT2ForSequenceClassification, which computes its loss within", model=str(folder / "gpt2.json"))
    refused("without a class for sequence classification", model=None, recipe="llama4_ep", compute=None)
    refused("sample_prompts", sample_prompts=str(folder / "pairs.jsonl"))
    refused("--overflow truncate_right with the objective reward", overflow="truncate_right")
