"""TrainingArguments in place of an object of transformers' or trl's arguments."""

import warnings
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from shardwright.arguments.known_flags.from_python import options_of
from shardwright.arguments.known_flags.table import find
from shardwright.arguments.known_flags.translate import translated
from shardwright.arguments.training import TrainingArguments
from shardwright.errors import of_another_kind

# their class → the arguments that it has, as the table names them, and the objective that it trains
_CLASSES: dict[str, tuple[str, str | None]] = {
    "SFTConfig": ("trl sft", None),
    "DPOConfig": ("trl dpo", "dpo"),
    "KTOConfig": ("trl kto", "kto"),
    "RewardConfig": ("trl reward", "reward"),
    "TrainingArguments": ("transformers", None),
}
# what decides which numbers come out, and has another default here: it counts even where it is not set
_DECIDES = ("num_train_epochs", "per_device_train_batch_size", "learning_rate", "warmup_steps", "max_length", "packing")


def class_of(args: Any) -> str | None:
    """The class of transformers' or trl's arguments that ``args`` are, or a subclass of; None: of none that is here."""
    if isinstance(args, TrainingArguments) or not is_dataclass(args):
        return None
    made: Any = type(args)
    theirs = [each for each in made.__mro__ if each.__module__.partition(".")[0] in ("trl", "transformers")]
    if theirs and theirs[0].__module__.startswith("trl.") and theirs[0].__name__ not in _CLASSES:
        return None  # of a training of its own, such as GRPOConfig and GKDConfig, whatever they are subclasses of
    kinds = [each.__name__ for each in theirs]
    return next((name for name in _CLASSES if name in kinds), None)


def arguments_like(args: Any, **more: Any) -> TrainingArguments:
    """Our arguments that mean what ``args``, transformers' or trl's, do; ``more``: options of ours besides.

    Fields that have the value that their class gives them ask for nothing, but for those that decide which numbers come
    out: epochs, batch, learning rate, warm-up, length and packing.

    Raises:
        UserError: ``args`` are of another kind, or have fields that can't be had here: all of them are named.
    """
    name = class_of(args)
    if name is None:
        wanted = (
            "shardwright.TrainingArguments(objective=…), transformers' TrainingArguments, or trl's SFTConfig, "
            "DPOConfig, KTOConfig or RewardConfig; docs/objectives.md lists what can be learned"
        )
        raise of_another_kind("args", args, wanted)
    program, objective = _CLASSES[name]
    plain = _plain(args)
    given = {
        each.name: getattr(args, each.name)
        for each in fields(args)
        if each.init and (getattr(args, each.name) != plain.get(each.name) or each.name in _DECIDES)
    }
    if given.get("max_steps", -1) > 0:
        given.pop("num_train_epochs", None)
    known = {each.name for each in fields(TrainingArguments)}
    found = translated(given.items(), known, lambda each: find(each, program), objective=objective)
    # trl packs texts alone: of answers each record is a row of its own, and a batch has so many
    options = {"objective": objective, "packing": False} if objective else {}
    return TrainingArguments(**{**options, **options_of(found, type(args).__name__), **more})


def _plain(args: Any) -> dict[str, Any]:
    """The values of an object of the same class to which nothing but ``output_dir`` is given."""
    try:
        with warnings.catch_warnings(action="ignore"):  # the caller has heard them
            made = type(args)(output_dir=args.output_dir)
    except Exception:  # a subclass of the caller's, that needs more: then its fields' defaults
        defaults = {each.name: each.default for each in fields(args) if each.default is not MISSING}
        return {"output_dir": None, **defaults}
    return {each.name: getattr(made, each.name) for each in fields(args)} | {"output_dir": None}
