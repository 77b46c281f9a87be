"""Runs that meet a batch of bad data: left out, or the end of the run, as they were told."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from rich.console import Console
from transformers import AutoConfig, PreTrainedTokenizerFast

from tests.support.events import CONFIG, LENGTH, VOCABULARY
from tests.support.jobs import job_of
from tests.test_trainer import corpus
from trainer.checkpoint.read import open_checked
from trainer.data.corpus import Corpus
from trainer.data.rows import StoredRows
from trainer.errors import UserError
from trainer.layout.load import load_recipe
from trainer.loop import TrainingLoop
from trainer.storage import Folder

STEPS, WINDOW, ROWS = 50, 8, 8


def one_odd_row() -> Corpus:
    """Rows that are soon known by heart, and one that is other: once an epoch of 40 steps the loss of a batch leaps."""
    usual = [[i % 5 for i in range(LENGTH)]] * (40 * ROWS - 1)
    odd = [[(i * 37) % VOCABULARY for i in range(LENGTH)]]
    given = corpus()
    tokenizer = given.tokenizer
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    return Corpus(StoredRows(Dataset.from_dict({"input_ids": usual + odd})), given.heldout, tokenizer)


def loop(output: Path, policy: str, said: io.StringIO | None = None, resume: Path | None = None, **more: Any) -> Any:
    options: dict[str, Any] = {"sequence_length": LENGTH, "max_steps": STEPS, "logging_steps": 4, "learning_rate": 1e-2}
    options |= {"on_spike": policy, "spike_window": WINDOW, "eval_on_start": False, "save_steps": 12, "warmup_steps": 0}
    recipe = load_recipe("llama_fsdp").with_compute("scan=False,remat=none")
    config = AutoConfig.for_model("llama", **CONFIG)
    job = job_of(recipe, config, output_dir=str(output), **(options | more))
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
    saved = spike_of(log) // 12 * 12  # before the spike, and with the window not in step with it
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
