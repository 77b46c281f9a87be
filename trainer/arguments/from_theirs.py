"""transformers' TrainingArguments, and trl's configs, as those of this package."""

from dataclasses import fields
from enum import Enum
from typing import Any

from shardwright.arguments.training import TrainingArguments
from shardwright.objectives import DEFAULT
from shardwright.optimizers import OPTIMIZERS

_OBJECTIVES = {"DPOConfig": "dpo", "KTOConfig": "kto", "RewardConfig": "reward"}  # trl's config → --objective
_RENAMED = {"max_length": "sequence_length"}  # trl's field → the option
# options that only an objective of trl's has
_NUMBERS = ("beta", "desirable_weight", "undesirable_weight", "center_rewards_coefficient")


def is_theirs(args: Any) -> bool:
    """Whether ``args`` are transformers' TrainingArguments, or a subclass such as trl's SFTConfig."""
    return any(each.__module__.partition(".")[0] in ("trl", "transformers") for each in type(args).__mro__)


def arguments_like(args: Any) -> TrainingArguments:
    """Our arguments that mean what ``args``, transformers' or trl's, do.

    Their trainers pack nothing unless told to, so each sample has a row.
    """
    given = {each.name: getattr(args, each.name) for each in fields(args)}
    ours = {each.name for each in fields(TrainingArguments)}
    values: dict[str, Any] = {"packing": False, "objective": _OBJECTIVES.get(type(args).__name__, DEFAULT)}
    for name, value in given.items():
        name = _RENAMED.get(name, name)
        if name in ours and name not in ("loss_type", *_NUMBERS) and value is not None:
            values[name] = value.value if isinstance(value, Enum) else value
        elif name in _NUMBERS and values["objective"] != DEFAULT:
            values[name] = value
    optim = values["optim"].partition("_")[0]
    values["optim"] = optim if optim in OPTIMIZERS else values["optim"]
    values["report_to"] = ",".join(given["report_to"] or []) or "none"
    values["eval_steps"] = values.get("eval_steps") or values["logging_steps"]  # as transformers has it
    values["eval_steps"], values["logging_steps"], values["save_steps"] = (
        max(1, int(values[name])) for name in ("eval_steps", "logging_steps", "save_steps")
    )
    if isinstance(values.get("resume_from_checkpoint"), bool):
        del values["resume_from_checkpoint"]
    if values["max_steps"] > 0:
        del values["num_train_epochs"]
    return TrainingArguments(**values)
