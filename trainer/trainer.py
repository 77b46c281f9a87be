"""Trainer: the Python interface, under transformers' names; `scripts/train.py` goes the same way."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
from datasets import Dataset, IterableDataset
from rich.console import Console
from transformers import (
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)
from transformers.trainer_utils import PredictionOutput, TrainOutput

from shardwright.arguments.from_theirs import arguments_like, class_of
from shardwright.arguments.schedule import Schedule
from shardwright.arguments.training import TrainingArguments
from shardwright.checkpoint.output_folder import find_output
from shardwright.data.corpus import load_rows_of
from shardwright.data.rows.batches import as_batch
from shardwright.data.rows.rows import StoredRows
from shardwright.data.samples.collator import Collator, collated
from shardwright.errors import UserError
from shardwright.hosts.output_streams import lasting_output
from shardwright.inputs import Records, TrainerCallbacks, check_callbacks, check_records, named_sets, resolve
from shardwright.layout.recipe import Recipe
from shardwright.loop import TrainingLoop
from shardwright.models.ops.labels import targets
from shardwright.monitoring.callbacks import Callbacks
from shardwright.objectives import DEFAULT
from shardwright.report.lines import Terminal
from shardwright.run import Start, prepare
from shardwright.step.eval_metrics import ComputeMetrics
from shardwright.step.loss import LossFunction
from shardwright.upstream.absent_names import in_place_of, is_theirs, no_attribute, no_keyword
from shardwright.upstream.constructor_arguments import check_unused, formatted, translated, with_longest
from shardwright.upstream.outputs import Outputs, hub_options, shown
from shardwright.upstream.processes import keep_devices_free

_KEPT = ("args", "callbacks", "console")  # what is not resolved when a trainer is made
keep_devices_free()  # before a program makes transformers' TrainingArguments


class Trainer(Outputs):
    """Trains a causal language model on a mesh: transformers' Trainer by name and meaning, with a ``recipe`` besides.

    Nothing is read, and no device opened, before :meth:`train`, :meth:`evaluate` or :meth:`predict`. Objects given here
    override what ``args`` name; docs/fine_tuning.md has an example, docs/differences.md what differs from transformers.

    Args:
        model: a hub id or folder, whose weights are the start; a config of transformers, for a random init; or a
            ``PreTrainedModel`` on the CPU. Default: what ``args`` name, else the recipe's own small model.
        args: everything else that a run does; or transformers' TrainingArguments, or a config of trl's. Once a run is
            prepared, the attribute ``args`` holds its frozen settings.
        recipe: a name, the path of a file, or a ``Recipe``. Default: what ``args`` name, which is ``auto``.
        train_dataset: a path or hub id, or a ``Dataset`` or ``IterableDataset``, whose records are of any shape that
            docs/data.md lists.
        eval_dataset: likewise, or a dict of several by their names, each logged as ``eval_NAME_loss``.
        processing_class: the tokenizer, or its name. Default: what lies with the weights.
        model_init: makes the model, in place of ``model``.
        data_collator: makes ``input_ids`` and ``labels`` of a record. It is called with one record at a time, before
            training, and its padding is taken off: rows are packed, of one shape. Records must then be a ``Dataset`` or
            an ``IterableDataset`` of columns that it takes; a ``Dataset`` is collated at once.
        compute_loss_func: ``(outputs, labels, num_items_in_batch)`` → the loss, a tensor of no dimension: the *sum*
            over the scored targets divided by ``num_items_in_batch``. Traced into the step.
        compute_metrics: `Predictions` (`shardwright.step.eval_metrics`) of one batch → ``{name: (sum, count)}``, traced
            into the evaluation.
        callbacks: transformers' own, or yours.
        optimizers, optimizer_cls_and_kwargs: torch's AdamW and transformers' schedules, where options mean the same.
        formatting_func: the text of a record, which is trained on whole.
        quantization_config: NF4 of bitsandbytes, for the model under an adapter.
        tokenizer: ``processing_class`` under its earlier name.
        peft_config: a ``peft.LoraConfig``; what it says beyond plain LoRA is refused by name.

    Raises:
        UserError: an argument is of a kind that can't be trained with.
    """

    objective_name: ClassVar[str] = DEFAULT  # of arguments that name none

    def __init__(
        self,
        model: str | Path | PretrainedConfig | PreTrainedModel | None = None,
        args: Any = None,
        data_collator: Collator | None = None,
        train_dataset: Records | None = None,
        eval_dataset: Records | Mapping[str, Records] | None = None,
        processing_class: str | PreTrainedTokenizerBase | None = None,
        model_init: Callable[..., Any] | None = None,
        compute_loss_func: LossFunction | None = None,
        compute_metrics: ComputeMetrics | None = None,
        callbacks: TrainerCallbacks | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[type, dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: None = None,
        *,
        recipe: str | Path | Recipe | None = None,
        peft_config: Any = None,
        formatting_func: Callable[[Any], str] | None = None,
        quantization_config: Any = None,
        tokenizer: str | PreTrainedTokenizerBase | None = None,
        console: Console | None = None,
        **others: Any,
    ) -> None:
        asked = {name: value for name, value in locals().items() if name not in ("self", "others", *_KEPT)}
        for name in others:
            raise no_keyword(name, [*asked, *_KEPT], [each.name for each in fields(TrainingArguments)])
        self.hub_model_id, self._hub = hub_options(args)
        taken, given = translated(self._arguments(args), asked)
        self.args, self._given = resolve(taken, **given)
        if class_of(args) is not None and getattr(args, "max_length", None) is None:
            self.args = with_longest(self.args, self._given.train)
        self._asked = asked
        self.console, self._callbacks = console or Terminal(), check_callbacks(callbacks)
        self._start: Start | None = None
        self._loop: TrainingLoop | None = None

    def _arguments(self, args: Any) -> TrainingArguments:
        """The run's arguments, of the objective that a trainer of trl's name stands for."""
        made = TrainingArguments() if args is None else args
        if not isinstance(made, TrainingArguments):
            made = arguments_like(made)
        named = made.objective != DEFAULT or self.objective_name == DEFAULT
        return made if named else replace(made, objective=self.objective_name)

    def __init_subclass__(cls, **more: Any) -> None:
        """Refuse what transformers' or trl's trainers would use, and this one never: its work is in the one step."""
        super().__init_subclass__(**more)
        for name in dir(cls):
            if is_theirs(name) and getattr(cls, name) is not getattr(Trainer, name, None):
                raise _never_used(f"class {cls.__name__}(Trainer) with its own {name}", name)

    def __getattr__(self, name: str) -> Any:
        asked = vars(self).get("_asked", {})
        if name in asked:
            return asked[name]
        if hasattr(type(self), name):  # a property that failed with an AttributeError, which says what failed
            return object.__getattribute__(self, name)
        raise no_attribute(name, [*dir(self), *asked])

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("args", "console") and name in inspect.signature(Trainer).parameters:
            raise UserError(
                asked=f"trainer.{name} = …",
                found="a trainer that is made",
                why="what it is given is resolved when it is made: this would change nothing",
                instead=f"Trainer(…, {name}=…)",
            )
        if is_theirs(name) and name not in vars(self):
            raise _never_used(f"trainer.{name} = …", name)
        super().__setattr__(name, value)
        loop = vars(self).get("_loop")
        if name == "args" and loop is not None and loop.args is not value and not loop.train_step.begun:
            self._start = self._loop = None  # which an evaluation opened, by other arguments

    @property
    def loop(self) -> TrainingLoop:
        """The loop on the devices, opened on first use. Nothing is written yet."""
        if self._loop is None:
            self._loop = self._prepare(writes=False).open()
            self.args = self._loop.args
        return self._loop

    @property
    def model(self) -> PreTrainedModel:
        """The model given, which has the trained weights once :meth:`train` is over; else the one on the devices.

        Of the latter ``save_pretrained`` is :meth:`save_model`: its parameters are stacked, and lie on the mesh.
        """
        if self._given.model is not None and not self.args.has_adapter:
            return self._given.model
        return shown(self.loop.placed.model, self)

    @property
    def processing_class(self) -> PreTrainedTokenizerBase:
        """The tokenizer, the one given or that of the run."""
        given = self._given.tokenizer
        return self.loop.corpus.tokenizer if given is None else given

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """:attr:`processing_class` under its earlier name."""
        return self.processing_class

    @property
    def callback_handler(self) -> Callbacks:
        return self.loop.callbacks

    @property
    def control(self) -> TrainerControl:
        return self.loop.control

    @property
    def lr_scheduler(self) -> Schedule:
        """The schedule of learning rates, which has ``get_last_lr()`` alone."""
        return self.loop.schedule

    @property
    def state(self) -> TrainerState:
        """The run's steps, log and best evaluation, as transformers' callbacks see them."""
        return self.loop.state

    @lasting_output()
    def train(
        self,
        resume_from_checkpoint: str | Path | bool | None = None,
        trial: None = None,
        ignore_keys_for_eval: Sequence[str] | None = None,
    ) -> TrainOutput:
        """Train to ``max_steps``, a signal or a loss that is not finite; leaves the output folder complete.

        A ``model`` that was given has the trained weights then.

        Args:
            resume_from_checkpoint: a checkpoint's path; True: the newest in the output folder, or a new run if it has
                none yet. Default: what ``args`` say.

        Raises:
            UserError: anything that can't be; or the trainer has trained already.
        """
        check_unused(trial=trial, ignore_keys_for_eval=ignore_keys_for_eval)
        if resume_from_checkpoint:
            where = "latest" if resume_from_checkpoint is True else str(resume_from_checkpoint)
            self.args, self._start, self._loop = replace(self.args, resume_from_checkpoint=where), None, None
        if self._start is None or self._loop is None:
            start = self._prepare(writes=True)
        else:
            start = self._start
            if self._loop.train_step.begun:
                raise self._trained(self._loop)
            find_output(self.args, start.job.recipe.name)  # it was opened for an evaluation, which writes nothing
        if start.job.lora is None:
            self._given.check_frozen(start.job.facts)
        with start.claimed():
            for loop in start.attempts(self._loop or start.open()):
                self._loop, self.args = loop, loop.args
        if self._given.model is not None and loop.job.lora is None:
            loop.trained.into(self._given.model)
        metrics = next((entry for entry in reversed(loop.state.log_history) if "train_runtime" in entry), {})
        return TrainOutput(loop.state.global_step, metrics.get("train_loss", math.nan), dict(metrics))

    def _trained(self, loop: TrainingLoop) -> UserError:
        """The refusal of a second :meth:`train` after that of ``loop``."""
        at, most = loop.state.global_step, loop.args.max_steps
        if self.args.save_strategy == "no":
            instead = f"another Trainer, of the model {self.args.output_dir}/model: no checkpoint is kept"
        elif at < most:
            instead = "train(resume_from_checkpoint=True), which goes on from the newest checkpoint; or another Trainer"
        else:
            instead = (
                "another Trainer; or, to go on, trainer.args = replace(trainer.args, max_steps=…) and "
                "train(resume_from_checkpoint=True); `replace` is that of dataclasses"
            )
        return UserError(
            asked="train() once more",
            found=f"this trainer has trained to step {at}{f' of {most}' if at < most else ''}",
            why="a run has one output folder, one learning rate schedule and one log",
            instead=instead,
        )

    def evaluate(
        self,
        eval_dataset: Records | Mapping[str, Records] | None = None,
        ignore_keys: Sequence[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Loss, perplexity, token accuracy and your own metrics of the held-out sets, or of ``eval_dataset``.

        They are logged and told to the callbacks. A dict's sets are each named: ``eval_NAME_loss``. Of every set, the
        run's own or given here, ``args.max_eval_rows`` rows are read, spread evenly over all; 0: all of them.
        """
        check_unused(ignore_keys=ignore_keys)
        if eval_dataset is None:
            return self.loop.evaluate(prefix=metric_key_prefix)
        sets = {name: self._rows(each) for name, each in named_sets(eval_dataset).items()}
        return self.loop.evaluate(sets, metric_key_prefix)

    def predict(
        self, test_dataset: Records, ignore_keys: Sequence[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Predict every record's tokens; without logits, which would not fit on a host.

        Each record has a row of S = ``sequence_length`` tokens, in the order of the data; one that is dropped, split or
        has no scored token is treated as in training.

        Returns:
            ``predictions``: a pair of arrays [rows, S], the most likely token at each position (int32), and the
            log-probability of the token in ``label_ids`` (float32; 0 where there is none). ``label_ids``: int64 [rows,
            S], what each position is scored against, *already shifted*, else -100. ``metrics``: as :meth:`evaluate`.
        """
        check_unused(ignore_keys=ignore_keys)
        self.args.check_beside(predict=[test_dataset])
        check_records("test_dataset", test_dataset)
        rows = self._rows(test_dataset)
        metrics, ids, log_probs = self.loop.evaluator.predict(rows, metric_key_prefix)
        labels, both = targets(as_batch(rows.read(np.arange(len(rows))))["labels"]), cast(Any, (ids, log_probs))
        return PredictionOutput(both, labels.numpy(), metrics)

    def add_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Tell ``callback``, an instance or its class, of the events that follow."""
        self._callbacks += check_callbacks([callback])
        if self._loop is not None:
            self._loop.callbacks.add_callback(callback)

    def pop_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> TrainerCallback | None:
        """Tell ``callback``, an instance or the first of a class, of nothing more; returns it, None: there is none."""
        opened = self._loop.callbacks.pop_callback(callback) if self._loop is not None else None
        kept = [each if isinstance(each, type) else type(each) for each in self._callbacks]
        fits = [each == callback or kind is callback for each, kind in zip(self._callbacks, kept, strict=True)]
        found = self._callbacks.pop(fits.index(True)) if True in fits else None
        return opened or (found() if isinstance(found, type) else found)

    def remove_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Tell ``callback``, an instance or the first of a class, of nothing more."""
        self.pop_callback(callback)

    def get_num_trainable_parameters(self) -> int:
        """The number of trained numbers: of an adapter, its own."""
        return sum(math.prod(each.shape) for each in self.loop.job.stored.parameters if each.trained)

    def _prepare(self, *, writes: bool) -> Start:
        self._start = prepare(self.args, self._given, self._callbacks, self.console, writes=writes)
        self.args = self._start.job.args
        return self._start

    def _rows(self, records: Any) -> StoredRows:
        loop = self.loop  # sets _start
        assert self._start is not None
        if self._asked["formatting_func"] is not None:
            records = formatted("dataset", records, self._asked["formatting_func"], loop.corpus.tokenizer.eos_token)
        if self._given.collator is not None and isinstance(records, Dataset | IterableDataset):
            records = collated(records, self._given.collator)
        return load_rows_of(records, self._start.data, loop.corpus.tokenizer)


def _never_used(asked: str, name: str) -> UserError:
    return UserError(
        asked=asked,
        found="something that transformers' or trl's trainers use as they train",
        why="here a step is one computation, made of what the trainer is given: it would never be used",
        instead=in_place_of(name)
        or "a callback; compute_loss_func=; an objective or an optimizer in a file of its own",
    )
