"""Trainer: the Python interface, under transformers' names; `scripts/train.py` goes the same way."""

import inspect
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import transformers
from datasets import Dataset, IterableDataset
from rich.console import Console
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, TrainerState
from transformers.trainer_utils import PredictionOutput, TrainOutput

from shardwright.arguments.training import TrainingArguments
from shardwright.checkpoint.output_folder import find_output
from shardwright.data.corpus import load_rows_of
from shardwright.data.rows.batches import as_batch
from shardwright.data.rows.rows import StoredRows
from shardwright.data.samples.collator import Collator, collated
from shardwright.errors import UserError
from shardwright.files.folder import Folder
from shardwright.hosts.output_streams import lasting_output
from shardwright.inputs import Records, TrainerCallbacks, check_records, named_sets, resolve
from shardwright.layout.recipe import Recipe
from shardwright.loop import TrainingLoop
from shardwright.models.ops.labels import targets
from shardwright.report.lines import Terminal
from shardwright.run import Start, prepare
from shardwright.step.eval_metrics import ComputeMetrics
from shardwright.step.loss import LossFunction
from shardwright.weights.hub_push import push_folder

# transformers' methods that nothing but a user's program calls, here as there
_CALLED_BY_USERS = {"train", "predict", "push_to_hub", "add_callback"}
# parts of the names of its other methods -> what takes their place
_IN_PLACE_OF = {
    "loss": "compute_loss_func=, which is traced into the step",
    "dataloader": "train_dataset= and eval_dataset=, in the order that --shuffle_rows false keeps; data_collator=",
    "sampler": "train_dataset= in the order wanted, with --shuffle_rows false",
    "optimizer": "--optim, or a file of your own in trainer/optimizers/",
    "scheduler": "--lr_scheduler_type and --lr_scheduler_kwargs",
    "log": "a callback's on_log",
    "eval": "compute_metrics=, which is traced into the evaluation; a callback's on_evaluate",
    "prediction": "compute_metrics=, which is traced into the evaluation; predict()",
    "save": "a callback's on_save; save_model() after train()",
}


class Trainer:
    """Trains a causal language model on a mesh: transformers' Trainer by name and meaning, with a ``recipe`` besides.

    Nothing is read, and no device opened, before :meth:`train`, :meth:`evaluate` or :meth:`predict`. Objects given here
    override what ``args`` name; docs/fine_tuning.md has an example and docs/run.md what differs from transformers.

    Args:
        model: a hub id or folder, whose weights are the start; a config of transformers, for a random init; or a
            ``PreTrainedModel`` on the CPU. Default: what ``args`` name, else the recipe's own small model.
        args: everything else that a run does. Once a run is prepared, the attribute ``args`` holds its frozen settings.
        recipe: a name, the path of a file, or a ``Recipe``. Default: what ``args`` name, which is ``auto``.
        train_dataset: a path or hub id, or a ``Dataset`` or ``IterableDataset``, whose records are of any shape that
            docs/data.md lists.
        eval_dataset: likewise, or a dict of several by their names, each logged as ``eval_NAME_loss``.
        processing_class: the tokenizer, or its name. Default: what lies with the weights.
        data_collator: makes ``input_ids`` and ``labels`` of a record. It is called with one record at a time, before
            training, and its padding is taken off: rows are packed, of one shape. Records must then be a ``Dataset`` or
            an ``IterableDataset`` of columns that it takes; a ``Dataset`` is collated at once.
        compute_loss_func: ``(outputs, labels, num_items_in_batch)`` → the loss, a tensor of no dimension: the *sum*
            over the scored targets divided by ``num_items_in_batch``. Traced into the step.
        compute_metrics: `Predictions` (`shardwright.step.eval_metrics`) of one batch → ``{name: (sum, count)}``, traced
            into the evaluation.
        callbacks: transformers' own, or yours.
        peft_config: a ``peft.LoraConfig``; what it says beyond plain LoRA is refused by name.

    Raises:
        UserError: an argument is of a kind that can't be trained with.
    """

    def __init__(
        self,
        model: str | Path | PretrainedConfig | PreTrainedModel | None = None,
        args: TrainingArguments | None = None,
        *,
        recipe: str | Path | Recipe | None = None,
        train_dataset: Records | None = None,
        eval_dataset: Records | Mapping[str, Records] | None = None,
        processing_class: str | PreTrainedTokenizerBase | None = None,
        data_collator: Collator | None = None,
        compute_loss_func: LossFunction | None = None,
        compute_metrics: ComputeMetrics | None = None,
        callbacks: TrainerCallbacks | None = None,
        peft_config: Any = None,
        console: Console | None = None,
    ) -> None:
        self.args, self._given = resolve(
            args,
            model=model,
            recipe=recipe,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            data_collator=data_collator,
            compute_loss_func=compute_loss_func,
            compute_metrics=compute_metrics,
            peft_config=peft_config,
        )
        self.console, self._callbacks = console or Terminal(), list(callbacks or ())
        self._start: Start | None = None
        self._loop: TrainingLoop | None = None

    def __init_subclass__(cls, **more: Any) -> None:
        """Refuse methods that transformers' Trainer would call, and this one never: their work is in the one step."""
        super().__init_subclass__(**more)
        for name in dir(transformers.Trainer):
            if name.startswith("__") or name in _CALLED_BY_USERS:
                continue
            if getattr(cls, name, None) is not getattr(Trainer, name, None):
                others = "a callback; compute_loss_func=; an objective or an optimizer in a file of its own"
                raise UserError(
                    asked=f"class {cls.__name__}(Trainer) with its own {name}",
                    found="a method that transformers' Trainer calls as it trains",
                    why="here a step is one computation, made of what the trainer is given: it would never be called",
                    instead=next((text for part, text in _IN_PLACE_OF.items() if part in name), others),
                )

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("args", "console") and name in inspect.signature(Trainer).parameters:
            raise UserError(
                asked=f"trainer.{name} = …",
                found="a trainer that is made",
                why="what it is given is resolved when it is made: this would change nothing",
                instead=f"Trainer(…, {name}=…)",
            )
        super().__setattr__(name, value)

    @property
    def loop(self) -> TrainingLoop:
        """The loop on the devices, opened on first use. Nothing is written yet."""
        if self._loop is None:
            return self._open(self._prepare(writes=False))
        return self._loop

    @property
    def state(self) -> TrainerState:
        """The run's steps, log and best evaluation, as transformers' callbacks see them."""
        return self.loop.state

    @lasting_output()
    def train(self, resume_from_checkpoint: str | Path | bool | None = None) -> TrainOutput:
        """Train to ``max_steps``, a signal or a loss that is not finite; leaves the output folder complete.

        Args:
            resume_from_checkpoint: a checkpoint's path; True: the newest in the output folder, or a new run if it has
                none yet. Default: what ``args`` say.

        Raises:
            UserError: anything that can't be; or the trainer has trained already.
        """
        if resume_from_checkpoint:
            where = "latest" if resume_from_checkpoint is True else str(resume_from_checkpoint)
            self.args, self._start, self._loop = replace(self.args, resume_from_checkpoint=where), None, None
        if self._start is None or self._loop is None:
            start = self._prepare(writes=True)
        else:
            start = self._start
            if self._loop.train_step.begun:
                raise UserError(
                    asked="train() once more",
                    found=f"this trainer has trained to step {self._loop.state.global_step}",
                    why="a run has one output folder, one learning rate schedule and one log",
                    instead="train(resume_from_checkpoint=True) to go on with a larger max_steps, or another Trainer",
                )
            find_output(self.args, start.job.recipe.name)  # it was opened for an evaluation, which writes nothing
        with start.claimed():
            loop = self._loop or self._open(start)
            while not start.trained(loop):
                loop = self._open(start)
        metrics = next((entry for entry in reversed(loop.state.log_history) if "train_runtime" in entry), {})
        return TrainOutput(loop.state.global_step, metrics.get("train_loss", math.nan), dict(metrics))

    def evaluate(
        self, eval_dataset: Records | Mapping[str, Records] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Loss, perplexity, token accuracy and your own metrics of the held-out sets, or of ``eval_dataset``.

        They are logged and told to the callbacks. A dict's sets are each named: ``eval_NAME_loss``. Of every set, the
        run's own or given here, ``args.max_eval_rows`` rows are read, spread evenly over all; 0: all of them.
        """
        if eval_dataset is None:
            return self.loop.evaluate(prefix=metric_key_prefix)
        sets = {name: self._rows(each) for name, each in named_sets("eval_dataset", eval_dataset).items()}
        return self.loop.evaluate(sets, metric_key_prefix)

    def predict(self, test_dataset: Records, metric_key_prefix: str = "test") -> PredictionOutput:
        """Predict every record's tokens; without logits, which would not fit on a host.

        Each record has a row of S = ``sequence_length`` tokens, in the order of the data; one that is dropped, split or
        has no scored token is treated as in training.

        Returns:
            ``predictions``: a pair of arrays [rows, S], the most likely token at each position (int32), and the
            log-probability of the token in ``label_ids`` (float32; 0 where there is none). ``label_ids``: int64 [rows,
            S], what each position is scored against, *already shifted*, else -100. ``metrics``: as :meth:`evaluate`.
        """
        self.args.check_beside(predict=[test_dataset])
        check_records("test_dataset", test_dataset)
        rows = self._rows(test_dataset)
        metrics, ids, log_probs = self.loop.evaluator.predict(rows, metric_key_prefix)
        labels, both = targets(as_batch(rows.read(np.arange(len(rows))))["labels"]), cast(Any, (ids, log_probs))
        return PredictionOutput(both, labels.numpy(), metrics)

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Write the model in the hub's format, or the adapter in PEFT's, with the tokenizer.

        ``output_dir`` is on disk or in a store; default: the run's ``model`` folder, as :meth:`train` leaves it.
        """
        self.loop.trained.write(Folder(str(output_dir)) if output_dir else self.loop.folder / "model")

    def push_to_hub(
        self,
        repo_id: str | None = None,
        commit_message: str = "End of training",
        *,
        token: str | None = None,
        private: bool = False,
        revision: str | None = None,
    ) -> str:
        """Write the model as :meth:`save_model` does, and upload that folder; returns the commit's address.

        Args:
            repo_id: ``owner/name``. Default: the output folder's name, under the token's owner.
            token: None: HF_TOKEN, or what `hf auth login` left. It is kept nowhere.

        Raises:
            UserError: the hub can't be reached or refuses this token, or the output folder is in a store.
        """
        folder = self.loop.folder / "model"
        if folder.remote:
            raise UserError(
                asked=f"to push {folder}",
                found="a folder in a store",
                why="the hub's client uploads what lies on disk",
                instead="save_model with a folder on disk, and `hf upload`",
            )
        self.save_model()
        self.loop.callbacks.on_push_begin(self.args, self.loop.state, self.loop.control)  # type: ignore[arg-type]
        repo = repo_id or self.loop.folder.name
        return push_folder(Path(str(folder)), repo, commit_message, token=token, private=private, revision=revision)

    def add_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Tell ``callback``, an instance or its class, of the events that follow."""
        self._callbacks.append(callback)
        if self._loop is not None:
            self._loop.callbacks.add_callback(callback)

    def _prepare(self, *, writes: bool) -> Start:
        self._start = prepare(self.args, self._given, self._callbacks, self.console, writes=writes)
        self.args = self._start.job.args
        return self._start

    def _open(self, start: Start) -> TrainingLoop:
        self._loop = start.open()
        self.args = self._loop.args
        return self._loop

    def _rows(self, records: Any) -> StoredRows:
        loop = self.loop  # sets _start
        assert self._start is not None
        if self._given.collator is not None and isinstance(records, Dataset | IterableDataset):
            records = collated(records, self._given.collator)
        return load_rows_of(records, self._start.data, loop.corpus.tokenizer)
