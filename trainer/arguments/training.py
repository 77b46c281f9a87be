"""TrainingArguments: transformers' names and meanings, with only the fields that this trainer honours."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import FrozenInstanceError, dataclass, field, fields, replace
from typing import Any

from shardwright.arguments.adapter_options import AdapterArguments
from shardwright.arguments.data_options import DataArguments
from shardwright.arguments.known_flags.from_python import takes_known_flags
from shardwright.arguments.model_options import ModelArguments
from shardwright.arguments.objective_options import ObjectiveArguments
from shardwright.arguments.optimizer_options import OptimizerArguments
from shardwright.arguments.option_values import check_values, option
from shardwright.arguments.output_options import OutputArguments
from shardwright.arguments.schedule import KINDS, Schedule
from shardwright.errors import UserError, without_credentials
from shardwright.objectives.objective import Objective, RecordShape

DEFAULT_STEPS = 100  # if neither steps nor epochs are set
DEFAULT_RATE = {"random": 2e-3, "given": 5e-5}  # learning rate, by where the weights come from
# option → those of which one must be given for it to mean anything
_NEEDED = {
    "adapter_format": ("lora_r", "adapter"),
    "eval_steps": ("eval_strategy",),
    "router_balance": ("router_balance_coef",),
    "sample_tokens": ("sample_prompts",),
    "sample_temperature": ("sample_prompts",),
    "sample_top_p": ("sample_temperature",),
    "shuffle_rows": ("streaming",),
    "spike_threshold": ("on_spike",),
    "spike_window": ("on_spike",),
}


@takes_known_flags
@dataclass
class TrainingArguments(
    OutputArguments, ObjectiveArguments, AdapterArguments, OptimizerArguments, DataArguments, ModelArguments
):
    """The options of a run, apart from its layout, which the recipe defines. Sizes are counts, and times are steps.

    Other trainers' arguments are taken where they mean one of these, or nothing (docs/reference/flags.md).

    The bases are in reverse: ``--help`` lists the options of the last one first.
    """

    group_title = "The batch, the length of the run, learning rates and routers."
    # what the short help shows
    COMMON = (
        *("recipe", "model", "mesh", "dataset", "sequence_length", "optim", "lora_r", "objective", "output_dir"),
        *("eval_strategy", "eval_steps", "save_steps", "resume_from_checkpoint", "sample_prompts"),
        *("per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "max_steps"),
        *("learning_rate", "warmup_steps"),
    )

    per_device_train_batch_size: int = option(
        1, "Rows a micro-batch for each device along the recipe's batch axes; evaluation takes no more."
    )
    gradient_accumulation_steps: int = option(1, "Micro-batches an optimizer step; all inside one XLA computation.")
    num_train_epochs: float | None = option(
        None,
        "Times through the data, where --max_steps says nothing; --streaming knows no length, and takes those.",
    )
    max_steps: int = option(
        -1,
        "Optimizer steps; they win over --num_train_epochs. Default: as many as the epochs are, and without those "
        f"{DEFAULT_STEPS}.",
    )
    learning_rate: float | None = option(
        None,
        "Peak learning rate. Default: 2e-3 for a random init, 5e-5 (transformers' default) for given weights.",
    )
    lr_scheduler_type: str = option(
        "linear", f"One of transformers' schedulers that need no loss: {', '.join(KINDS)}.", choices=KINDS
    )
    lr_scheduler_kwargs: dict | str | None = field(
        default=None, metadata={"help": """Further arguments of that scheduler, as JSON: '{"min_lr_rate": 0.1}'."""}
    )
    warmup_steps: float = option(
        20, "Steps over which the learning rate rises from 0; below 1 their share of --max_steps."
    )
    max_grad_norm: float = option(1.0, "Gradients are scaled down to this global norm; 0 leaves them.")
    router_z_loss_coef: float = option(
        0.0, "Add so many times the router z-loss, which keeps logits small, summed over layers (ST-MoE: 0.001)."
    )
    router_balance_coef: float = option(
        0.0, "Add so many times a loss that balances the load of experts, summed over layers (DeepSeek-V3: 0.0001)."
    )
    router_balance: str = option(
        "sequence",
        "What --router_balance_coef balances: each `sequence` (a row) by itself, or a whole micro-`batch`.",
        choices=("sequence", "batch"),
    )
    router_bias_update_rate: float = option(
        0.0,
        "After each step, move what routers add to their scores for selection by so much: up for experts below the "
        "mean load, down for those above (DeepSeek-V3: 0.001).",
    )

    def __post_init__(self) -> None:
        check_values(self)
        self.check_model()
        self.check_objective()
        self.overflow = self.overflow or self.entry.overflow
        self.check_data()
        self.check_adapter()
        if self.train_mtp and self.has_adapter:
            raise UserError(
                asked="--train_mtp with an adapter",
                found=f"--adapter {self.adapter}" if self.adapter else f"--lora_r {self.lora_r}",
                why="under an adapter all weights are frozen, and an adapter's file has no place for MTP layers",
                instead="no --train_mtp; or no adapter, and all weights are trained",
            )
        given = {name: getattr(self, name) for name in ("text_column", "train_on_prompt", "streaming", "train_mtp")}
        given["split_special_tokens"] = None if self.split_special_tokens is None else str(self.split_special_tokens)
        given["sample_prompts"] = self.sample_prompts
        cuts = self.overflow in ("split", "truncate_right") and self.overflow != self.entry.overflow
        self.check_beside(**given, overflow=cuts and self.overflow)
        _ = self.reads
        self.isolate_documents |= self.goal.groups is not None  # its loss tells the segments of a row apart
        sizes = ("per_device_train_batch_size", "gradient_accumulation_steps")
        self.at_least(1, "it counts something that a run needs one of", *sizes)
        routers = ("router_z_loss_coef", "router_balance_coef", "router_bias_update_rate")
        self.at_least(0, "it can't be negative", *routers, "warmup_steps", "max_grad_norm")
        self.check_optimizer()
        self.check("learning_rate", self.learning_rate is None or self.learning_rate > 0, "it must be above 0", 5e-5)
        self._read_schedule()
        self.check_output()
        self._read_length()
        self.goal.check()
        if (option := self.goal.whole_batch) and (count := self.gradient_accumulation_steps) > 1:
            raise UserError(
                asked=f"--gradient_accumulation_steps {count} with {option}",
                found="a loss of all records of a micro-batch together",
                why="micro-batches of another size would give another loss",
                instead="--gradient_accumulation_steps 1, and a larger --per_device_train_batch_size or more devices",
            )

    @property
    def goal(self) -> Objective:
        return self.entry({name: getattr(self, name) for name in self.entry.options}, self.sequence_length)

    @property
    def idle(self) -> list[str]:
        """A line for each option that has no effect, as another is missing or the run is too short."""
        usual = {each.name: each.default for each in fields(TrainingArguments)}
        given = {name for name, value in usual.items() if getattr(self, name) != value}
        off = {name: needed for name, needed in _NEEDED.items() if name in given and given.isdisjoint(needed)}
        lines = [f"--{name} has no effect without --{' or --'.join(needed)}" for name, needed in off.items()]
        if self.on_spike != "no" and 0 < self.max_steps <= self.spike_window:
            steps = f"the first {self.spike_window} steps are not judged (--spike_window), and the run has no more"
            lines.append(f"--on_spike {self.on_spike} has no effect: {steps}")
        return lines

    @property
    def reads(self) -> Sequence[RecordShape]:
        """The shapes that records may have, in the order in which they are tried; first with the columns' names.

        Raises UserError if no shape has all the columns that ``--columns`` names.
        """
        if not (names := self.named_columns):
            return self.entry.shapes
        sets = {(*shape.required, *shape.optional): shape for shape in self.entry.shapes}
        if found := [shape.called(names) for columns, shape in sets.items() if names.keys() <= {*columns}]:
            return found if self.columns is None else [*found, *self.entry.shapes]  # of another set in a mixture
        raise UserError(
            asked=f"--columns {self.columns}" + (f" --text_column {self.text_column}" if self.text_column else ""),
            found=f"no kind of record has all of {', '.join(names)}",
            why=f"they have, for --objective {self.objective}, one of these sets: {'; '.join(map(', '.join, sets))}",
            instead=f"names of one set before each =, such as --columns {next(iter(sets))[0]}=NAME",
        )

    def _read_length(self) -> None:
        epochs = self.num_train_epochs
        self.check("max_steps", self.max_steps >= 1 or self.max_steps == -1, "a run has a step at least", DEFAULT_STEPS)
        self.check("num_train_epochs", epochs is None or epochs > 0, "it counts times through the data", 3)
        if epochs is None or self.max_steps > 0:
            self._settle_steps(self.max_steps if self.max_steps > 0 else DEFAULT_STEPS)
        elif self.streaming:
            raise UserError(
                asked=f"--num_train_epochs {epochs:g} of --streaming",
                found="a stream, whose length shows where it ends",
                why="the learning rate falls with the steps, so their number must be known before the first",
                instead=f"--max_steps {DEFAULT_STEPS}, which may go through the data several times; or no --streaming",
            )

    def _settle_steps(self, steps: int) -> None:
        self.max_steps = steps
        if self.warmup_steps == 0 or self.warmup_steps >= 1:  # a share stays one, of whatever steps a repetition has
            self.warmup_steps = int(self.warmup_steps)
        for rate in [self.learning_rate] if self.learning_rate else DEFAULT_RATE.values():
            self.schedule(rate)
        if self.profile_steps is not None:
            first, last = self.profiled
            part = f"{min(2, steps)}:{min(4, steps)}"
            self.check("profile_steps", 1 <= first <= last <= steps, "it is a part of the run's steps", part)

    def _read_schedule(self) -> None:
        options = self.lr_scheduler_kwargs
        try:
            self.lr_scheduler_kwargs = json.loads(options) if isinstance(options, str) else options
            json.dumps(self.lr_scheduler_kwargs)
        except (ValueError, TypeError, RecursionError) as error:
            self.lr_scheduler_kwargs = f"{options!r:.80}: {error}"
        if not isinstance(self.lr_scheduler_kwargs, dict | None):
            raise UserError(
                asked=f"--lr_scheduler_kwargs {options!r:.80}",
                found=f"{self.lr_scheduler_kwargs!r:.200}",
                why="it is a JSON object: names and values",
                instead="""--lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs '{"min_lr_rate": 0.1}'""",
            )

    @property
    def warmup(self) -> int:
        """The steps of warm-up, as transformers counts them."""
        asked = self.warmup_steps
        return int(asked) if asked >= 1 else math.ceil(self.max_steps * asked)

    def schedule(self, peak: float) -> Schedule:
        """The learning rates of a run with the given ``peak``; raises as :class:`Schedule`."""
        given: Any = self.lr_scheduler_kwargs or {}
        return Schedule(self.lr_scheduler_type, peak, self.warmup, self.max_steps, given)

    def as_dict(self) -> dict[str, Any]:
        """Name → value of each option, JSON-able and safe to publish: ``user:password@`` in a URL is left out."""
        values = {each.name: getattr(self, each.name) for each in fields(TrainingArguments)}.items()
        return {name: without_credentials(value) if isinstance(value, str) else value for name, value in values}

    to_dict = as_dict  # transformers' integrations call these three

    def to_json_string(self) -> str:
        return json.dumps(self.as_dict(), indent=2)

    def to_sanitized_dict(self) -> dict[str, Any]:
        """The options for trackers that only know numbers and texts."""
        known = (bool, int, float, str)
        return {name: value if type(value) in known else str(value) for name, value in self.as_dict().items()}


@dataclass
class Settings(TrainingArguments):
    """The checked and frozen arguments of a run. ``dataclasses.replace`` resolves one of them, checked anew."""

    # rows of a micro-batch for each device and micro-batches a step, as in the command; a run resumed on other devices
    # may train with other values, for the same global batch
    asked_batch: tuple[int, ...] = ()
    kept_batch: tuple[int, ...] = ()  # those other values
    steps_of_epochs: int = 0  # that `max_steps` became of `num_train_epochs`
    isolates_samples: bool = False  # `isolate_documents` is so for the records' sake

    def __post_init__(self) -> None:
        super().__post_init__()
        self.asked_batch = self.asked_batch or (self.per_device_train_batch_size, self.gradient_accumulation_steps)
        self._resolved = True

    def __setattr__(self, name: str, value: Any) -> None:
        if "_resolved" in self.__dict__:
            raise FrozenInstanceError(
                f"cannot assign to {name!r}: a run's settings stay as they are; for other ones, another Trainer, or "
                f"trainer.args = dataclasses.replace(trainer.args, {name}=…)"
            )
        super().__setattr__(name, value)

    @classmethod
    def of(cls, args: TrainingArguments) -> Settings:
        """Raises UserError if an argument was set to an invalid value meanwhile.

        What an earlier run's settings had made of epochs, of its records, or of a batch that was changed since, is made
        anew.
        """
        values = {each.name: getattr(args, each.name) for each in fields(args)}
        if isinstance(args, Settings):
            if args.steps_of_epochs == args.max_steps:
                values["max_steps"] = -1
            if args.kept_batch != (args.per_device_train_batch_size, args.gradient_accumulation_steps):
                values["asked_batch"] = ()
            values["isolate_documents"] &= not args.isolates_samples
            values["isolates_samples"] = False
        return cls(**values)

    def with_epochs_of(self, steps: int) -> Settings:
        """The settings with ``max_steps``, unless set, from epochs of ``steps`` each; raises as the class."""
        if self.max_steps > 0 or self.num_train_epochs is None:
            return self
        found = math.ceil(self.num_train_epochs * steps)
        return replace(self, max_steps=found, steps_of_epochs=found)
