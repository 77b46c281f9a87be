"""trl's trainers and configs by name: Trainer and TrainingArguments with the objective that each stands for."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel

from shardwright.arguments.training import TrainingArguments
from shardwright.errors import UserError
from shardwright.objectives import DEFAULT
from shardwright.trainer import Trainer


class SFTTrainer(Trainer):
    """Supervised fine-tuning, which is Trainer's default."""


class RewardTrainer(Trainer):
    """A reward model, learned from pairs of answers."""

    objective_name: ClassVar[str] = "reward"


class _WithReference(Trainer):
    """A trainer of trl's with a second model, the reference, which here is the starting weights."""

    def __init__(self, model: Any = None, ref_model: Any = None, args: Any = None, *given: Any, **more: Any) -> None:
        if ref_model is not None and not _same(model, ref_model):
            raise UserError(
                asked="ref_model=…",
                found=f"another {type(ref_model).__name__} than model=",
                why="the loss compares with the starting weights, which are read once",
                instead="no ref_model; for other starting weights, model= with these",
            )
        super().__init__(model, args, *given, **more)


class DPOTrainer(_WithReference):
    """DPO, or another objective of pairs that its arguments name."""

    objective_name: ClassVar[str] = "dpo"


class KTOTrainer(_WithReference):
    """KTO: answers that are good or bad, each by itself."""

    objective_name: ClassVar[str] = "kto"


def _same(model: Any, other: Any) -> bool:
    """Whether both are one model: by its name, or by all of its weights."""
    if not (isinstance(model, PreTrainedModel) and isinstance(other, PreTrainedModel)):
        return isinstance(model, str) and model == other
    one, two = model.state_dict(), other.state_dict()
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def _config(objective: str) -> Callable[..., TrainingArguments]:
    def config(output_dir: str | None = None, **options: Any) -> TrainingArguments:
        return TrainingArguments(output_dir=output_dir, objective=options.pop("objective", objective), **options)

    return config


SFTConfig, RewardConfig = _config(DEFAULT), _config(RewardTrainer.objective_name)
DPOConfig, KTOConfig = _config(DPOTrainer.objective_name), _config(KTOTrainer.objective_name)
