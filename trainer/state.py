"""A run's state, in transformers' own class: what it begins with, and what it knows of its evaluations."""

from __future__ import annotations

import math

from transformers import TrainerState

from trainer.arguments import TrainingArguments
from trainer.checkpoint.read import RunCheckpoint
from trainer.storage import Folder


def state_at_the_start(args: TrainingArguments, resume: RunCheckpoint | None) -> TrainerState:
    """A new run's state, or that of the run to go on with, which counts on towards this run's steps."""
    state = TrainerState() if resume is None else resume.trainer_state
    state.best_model_checkpoint = None if resume is None else resume.best_for(Folder(str(args.output_dir)))
    state.max_steps, state.train_batch_size = args.max_steps, args.per_device_train_batch_size
    for name in ("logging_steps", "eval_steps", "save_steps"):
        setattr(state, name, getattr(args, name))
    return state


def is_evaluated(state: TrainerState) -> bool:
    """Whether the held-out loss of the state's step is known."""
    return any("eval_loss" in entry and entry["step"] == state.global_step for entry in state.log_history)


def note_if_best(state: TrainerState, loss: float | None) -> bool:
    """Notes ``loss``, the held-out one of the state's step, if it is the lowest yet; returns whether it is."""
    lowest = loss is not None and math.isfinite(loss) and (state.best_metric is None or loss < state.best_metric)
    if lowest:
        state.best_metric, state.best_global_step = loss, state.global_step
    return lowest


def loss_before(state: TrainerState) -> float | None:
    """The held-out loss before the first step; None if it was not measured."""
    return next((entry["eval_loss"] for entry in state.log_history if "eval_loss" in entry and not entry["step"]), None)
