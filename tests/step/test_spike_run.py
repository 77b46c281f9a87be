"""Runs that meet a batch of bad data: left out, or the end of the run, as they were told."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from rich.console import Console
from transformers import AutoConfig, PreTrainedTokenizerFast, TrainerCallback

from shardwright.arguments.training import TrainingArguments
from shardwright.checkpoint.read import open_checked
from shardwright.checkpoint.rollback import Back, way_back
from shardwright.data.corpus import Corpus
from shardwright.data.rows.rows import StoredRows
from shardwright.errors import UserError
from shardwright.files.folder import Folder
from shardwright.layout.load_recipe import load_recipe
from shardwright.loop import TrainingLoop
from shardwright.report.goodput import read_lives
from shardwright.run import train
from tests.support.events import CONFIG, LENGTH, VOCABULARY
from tests.support.jobs import job_of
from tests.test_trainer import corpus

STEPS, WINDOW, ROWS = 24, 8, 8
SAVE, EPOCH = 5, 35  # steps; in the first epoch of so many the odd row comes at step 17
# two layers, since one has spikes of its own; and room for the tokenizer that a run trains
MODEL = {**CONFIG, "num_hidden_layers": 2, "vocab_size": 304}
OPTIONS: dict[str, Any] = {
    "sequence_length": LENGTH,
    "max_steps": STEPS,
    "logging_steps": 4,
    "learning_rate": 0.1,
    "warmup_steps": 0,
    "spike_window": WINDOW,
    "eval_on_start": False,
    "save_steps": SAVE,
}


def one_odd_row() -> Corpus:
    """Rows that are soon known by heart, and one that is other: once an epoch the loss of a batch leaps."""
    usual = [[1] * LENGTH] * (EPOCH * ROWS - 1)
    odd = [[(i * 37) % VOCABULARY for i in range(LENGTH)]]
    given = corpus()
    tokenizer = given.tokenizer
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    return Corpus(StoredRows(Dataset.from_dict({"input_ids": usual + odd})), given.heldout_sets, tokenizer)


def loop(output: Path, policy: str, said: io.StringIO | None = None, resume: Path | None = None, **more: Any) -> Any:
    recipe = load_recipe("llama_fsdp").with_compute("scan=False,remat=none")
    config = AutoConfig.for_model("llama", **MODEL)
    job = job_of(recipe, config, output_dir=str(output), **(OPTIONS | {"on_spike": policy} | more))
    console = Console(file=said or io.StringIO(), width=400)
    found = None if resume is None else open_checked(Folder(resume), console)
    return TrainingLoop(job, one_odd_row(), resume=found, console=console)


@pytest.fixture(scope="module")
def skipped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]], str]:
    """A run that skips: its folder, its log and what it said."""
    output, said = tmp_path_factory.mktemp("skip"), io.StringIO()
    trainer = loop(output, "skip", said)
    return output, trainer.train().log_history, said.getvalue()


def spike_of(log: list[dict[str, Any]]) -> int:
    return next(entry["spike_step"] for entry in log if "spike_step" in entry)


@pytest.mark.slow
def test_a_run_that_skips_says_so_and_goes_on_as_before(skipped):
    _, log, said = skipped
    step = spike_of(log)
    (entry,) = [entry for entry in log if entry.get("spike_step") == step]
    assert entry["skipped_steps"] == 1
    assert entry["spike_loss"] > entry["spike_loss_limit"] or entry["spike_grad_norm"] > entry["spike_grad_norm_limit"]
    assert f"spike at step {step}" in said
    assert log[-1]["step"] == STEPS


@pytest.mark.slow
def test_a_run_that_goes_on_from_a_checkpoint_has_the_window_and_the_count_of_one_never_stopped(skipped, tmp_path):
    output, log, _ = skipped
    saved = (spike_of(log) - 1) // SAVE * SAVE  # before the spike, and with the window not in step with it
    rest = loop(tmp_path / "rest", "skip", resume=output / f"checkpoint-{saved}").train().log_history
    numbers = ("step", "loss", "grad_norm", "skipped_steps", "spike_step", "spike_loss_limit", "spike_grad_norm_limit")
    kept = [[[entry.get(name) for name in numbers] for entry in each if "loss" in entry] for each in (log, rest)]
    assert kept[0] == kept[1]


@pytest.mark.slow
def test_a_run_that_stops_names_step_loss_and_threshold_and_leaves_the_weights_of_before(skipped, tmp_path):
    step = spike_of(skipped[1])
    trainer = loop(tmp_path / "stop", "stop")
    with pytest.raises(UserError) as stopped:
        trainer.train()
    error = stopped.value
    assert error.asked == f"step {step} of {STEPS}, with --on_spike stop"
    assert "above" in error.found
    assert "8 times as far above the median of the last 8 good steps" in error.why
    assert "--learning_rate" in error.instead
    state = json.loads((tmp_path / "stop" / "trainer_state.json").read_text())
    assert state["global_step"] == step - 1
    assert (tmp_path / "stop" / "model" / "model.safetensors").exists()


# ---- rollback ----


@dataclass
class Rolled:
    """A run that rolls back.

    Args:
        epochs: (step, epochs of the data that were read) after each step.
    """

    output: Path
    log: list[dict[str, Any]]
    said: str
    epochs: list[tuple[int, float]]


@pytest.fixture(scope="module")
def rolled(tmp_path_factory: pytest.TempPathFactory) -> Rolled:
    output, said, epochs = tmp_path_factory.mktemp("rollback"), io.StringIO(), []
    (output / "config.json").write_text(json.dumps({"model_type": "llama", **MODEL}))

    class Reader(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            epochs.append((state.global_step, state.epoch))

    options = {**OPTIONS, "recipe": "llama_fsdp", "compute": "scan=False,remat=none", "on_spike": "rollback"}
    args = TrainingArguments(**options, model=str(output / "config.json"), output_dir=str(output / "run"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardwright.run._load_data", lambda start, console: one_odd_row())
        trainer = train(args, Console(file=said, width=400), [Reader()])
    return Rolled(output / "run", trainer.state.log_history, said.getvalue(), epochs)


@pytest.mark.slow
def test_a_run_that_rolls_back_goes_on_from_the_checkpoint_without_the_batches_up_to_the_spike(skipped, rolled):
    spike = spike_of(skipped[1])
    saved = (spike - 1) // SAVE * SAVE
    assert f"spike:   a spike at step {spike}: its " in rolled.said
    assert f"back to checkpoint-{saved}, and the {spike - saved} batches after it are left out" in rolled.said
    back = next(i for i in range(1, len(rolled.epochs)) if rolled.epochs[i][0] <= rolled.epochs[i - 1][0])
    assert rolled.epochs[back] == (saved + 1, (spike + 1) / EPOCH)
    assert rolled.epochs[-1] == (STEPS, (STEPS + spike - saved) / EPOCH)
    assert not any("skipped_steps" in entry for entry in rolled.log)
    lives = read_lives((rolled.output / "lives.json").read_bytes())
    assert [life.first for life in lives] == [0, saved]
    assert f"step {spike}" in lives[1].after
    (summary,) = [entry for entry in rolled.log if "train_runtime" in entry]
    assert summary["restarts"] == 1
    assert summary["seconds/again"] > 0


@pytest.mark.slow
def test_a_rollback_is_a_resume_bit_for_bit_and_compiles_no_step(skipped, rolled, tmp_path):
    spike = spike_of(skipped[1])
    saved = (spike - 1) // SAVE * SAVE
    other = loop(tmp_path / "resumed", "rollback", resume=rolled.output / f"checkpoint-{saved}")
    for _ in range(spike - saved):
        next(other.batches)
    expected = [(e["step"], e["loss"], e["grad_norm"]) for e in other.train().log_history if "loss" in e]
    assert [(e["step"], e["loss"], e["grad_norm"]) for e in rolled.log if "loss" in e] == expected
    compiles = [entry["compiles"] for entry in rolled.log if "compiles" in entry]
    assert compiles[-1] == compiles[0]


@pytest.mark.slow
def test_a_spike_before_the_first_checkpoint_ends_a_run_that_would_roll_back(tmp_path):
    trainer = loop(tmp_path / "none", "rollback", save_steps=1000)
    with pytest.raises(UserError, match="there is no checkpoint to go back to"):
        trainer.train()
    assert (tmp_path / "none" / "model" / "model.safetensors").exists()


def test_each_time_that_a_run_goes_back_to_a_checkpoint_more_is_left_out_and_not_for_ever():
    first = way_back(None, 24, 30)
    assert first == Back(24, 6, 1)
    second = way_back(first, 24, 27)  # its batch is the sixth and three more
    assert second == Back(24, 9, 2)
    third = way_back(second, 24, 26)
    assert third == Back(24, 11, 3)
    assert way_back(third, 24, 31) is None
    assert way_back(third, 36, 40) == Back(36, 4, 1)  # its cursor lies behind them all


def test_a_rollback_without_checkpoints_is_refused():
    with pytest.raises(UserError, match="--save_strategy no leaves no checkpoint"):
        job_of("llama_fsdp", on_spike="rollback", save_strategy="no")
