"""The events of transformers' own Trainer, to compare ours with: a tiny Llama on the plain CPU, without torch_xla.

``python -m tests.support.events FOLDER`` prints as JSON what the Trainer told its callbacks under each of `SCHEDULES`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import EarlyStoppingCallback, TrainerCallback

from tests.support.paths import ROOT

ROWS, LENGTH, TRAIN_ROWS, HELDOUT_ROWS, VOCABULARY = 8, 16, 48, 16, 64  # two micro-batches a step: an epoch has 3 steps
CONFIG = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
}
COMMON = {
    "gradient_accumulation_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "logging_steps": 2,
    "eval_on_start": True,
    "warmup_steps": 0,
}
# options, then what a callback asks for: (event, step, flag)
SCHEDULES: dict[str, tuple[dict[str, Any], list[tuple[str, int, str]]]] = {
    "two epochs": ({**COMMON, "max_steps": 6, "save_steps": 3}, []),
    "a checkpoint an epoch": ({**COMMON, "max_steps": 4, "save_strategy": "epoch", "eval_on_start": False}, []),
    "both an epoch": (
        {**COMMON, "max_steps": 4, "save_strategy": "epoch", "eval_strategy": "epoch", "eval_on_start": False},
        [("on_epoch_end", 3, "should_log"), ("on_epoch_end", 4, "should_log")],
    ),
    # nothing is learned, so the second evaluation is no better than the first, and it stops after step 4 of 9
    "stopped early": (
        {**COMMON, "max_steps": 9, "save_steps": 2, "learning_rate": 1e-30, "load_best_model_at_end": True},
        [],
    ),
    "asked by a callback": (
        {**COMMON, "max_steps": 12, "save_strategy": "no"},
        [
            ("on_step_end", 1, "should_log"),  # ours logs what it evaluates, asked or not
            ("on_step_end", 1, "should_save"),
            ("on_step_end", 1, "should_evaluate"),
            ("on_evaluate", 2, "should_save"),
            ("on_step_begin", 2, "should_log"),
            ("on_log", 4, "should_save"),
            ("on_step_end", 4, "should_epoch_stop"),  # the second epoch ends after one step
            ("on_epoch_end", 7, "should_save"),
            ("on_step_end", 8, "should_training_stop"),
        ],
    ),
}


class Recorder(TrainerCallback):
    """Notes [event, step, epoch] of each event, and raises the flags of a schedule."""

    def __init__(self, asked: list[tuple[str, int, str]]) -> None:
        self.asked = asked
        self.events: list[list[Any]] = []
        self.given: dict[str, set[str]] = {}

    def note(self, event: str, args: Any, state: Any, control: Any, **given: Any) -> Any:
        self.given.setdefault(event, set()).update(name for name, value in given.items() if value is not None)
        kind = next((key for key in ("eval_loss", "loss", "train_runtime", "saved_step", "save_pause")
                     if key in given.get("logs", {})), "")  # fmt: skip
        self.events.append([f"{event} {kind}".strip(), state.global_step, round(state.epoch or 0, 6)])
        for name, step, flag in self.asked:
            if (name, step) == (event, state.global_step):
                setattr(control, flag, True)
        return control


def _noting(event: str) -> Any:
    return lambda self, args, state, control, **given: self.note(event, args, state, control, **given)


EVENTS = [name for name in vars(TrainerCallback) if name.startswith("on_")]
for _event in EVENTS:
    setattr(Recorder, _event, _noting(_event))


def tokens() -> torch.Tensor:
    """The rows of both sides, those that are held out last. [TRAIN_ROWS + HELDOUT_ROWS, LENGTH]"""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, VOCABULARY, (TRAIN_ROWS + HELDOUT_ROWS, LENGTH), generator=generator)


def callbacks(schedule: str) -> tuple[Recorder, list[TrainerCallback]]:
    """A schedule's recorder, and all of its callbacks."""
    options, asked = SCHEDULES[schedule]
    recorder = Recorder(asked)
    early = [EarlyStoppingCallback(1)] if "load_best_model_at_end" in options else []
    return recorder, [*early, recorder]


def theirs(folder: Path) -> dict[str, list[list[Any]]]:
    """Schedule -> what transformers' Trainer told a callback, in a process of its own."""
    environment = {**os.environ, "USE_TORCH_XLA": "0", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.events", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def _record(schedule: str, folder: Path) -> list[list[Any]]:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    options, _ = SCHEDULES[schedule]
    recorder, told = callbacks(schedule)
    rows = [{"input_ids": row, "labels": row} for row in tokens()]
    trainer = Trainer(
        LlamaForCausalLM(LlamaConfig(**CONFIG)),
        TrainingArguments(
            str(folder / schedule.replace(" ", "_")),
            per_device_train_batch_size=ROWS,
            per_device_eval_batch_size=ROWS,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
            **options,
        ),
        train_dataset=rows[:TRAIN_ROWS],
        eval_dataset=rows[TRAIN_ROWS:],
        callbacks=told,
    )
    trainer.train()
    trainer.evaluate()  # as our run does at its end
    return recorder.events


if __name__ == "__main__":
    sys.modules["torch_xla"] = None  # type: ignore[assignment]  # accelerate would take its device
    print(json.dumps({schedule: _record(schedule, Path(sys.argv[1])) for schedule in SCHEDULES}))
