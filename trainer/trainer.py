"""Trainer: the loop from the first batch to the last checkpoint, and what it logs, saves and leaves."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from transformers import DefaultFlowCallback, TrainerCallback, TrainerControl, TrainerState

# semi-private: transformers/trainer_callback.py, transformers 5.23
from transformers.trainer_callback import CallbackHandler

from trainer.arguments import TrainingArguments
from trainer.checkpoint.host_state import random_state, set_random_state, versions
from trainer.checkpoint.read import RunCheckpoint, folder_of, open_checked
from trainer.checkpoint.write import CheckpointWriter, Saved, as_json, run_texts
from trainer.data.batches import TrainingBatches, heldout_batches
from trainer.data.corpus import Corpus
from trainer.data.tokenizer import check_vocabulary
from trainer.data.unigram import unigram_loss
from trainer.errors import UserError
from trainer.job import Job
from trainer.preemption import StopRequests
from trainer.report.bars import tracked
from trainer.report.curve import loss_curve
from trainer.report.terminal import ProgressCallback, closing_table
from trainer.step.build import build
from trainer.step.schedule import Schedule
from trainer.step.train_step import StepMetrics
from trainer.storage import Folder, StorageError
from trainer.weights.hub_write import export
from trainer.weights.live import LiveWeights
from trainer.weights.place import place_parameters
from trainer.weights.sources import Source, seeded_init
from trainer.xla.batch import batch_share
from trainer.xla.mesh import build_mesh
from trainer.xla.runtime import compile_count


class Trainer:
    """Trains one causal language model.

    What the data or a checkpoint can't be is refused in the constructor, before a weight is placed.

    Args:
        job: what to train, checked.
        corpus: rows to train on and held-out rows.
        source: where the weights come from; default: the model's random init from the arguments' seed.
        resume: the checkpoint of a run to go on with, under whatever recipe and mesh it was saved.
        callbacks: transformers callbacks.

    Raises:
        UserError: the rows don't fill a batch, or the checkpoint is another model's or of other data.
    """

    def __init__(
        self,
        job: Job,
        corpus: Corpus,
        *,
        source: Source | None = None,
        resume: RunCheckpoint | None = None,
        callbacks: Sequence[TrainerCallback] = (),
        console: Console | None = None,
    ) -> None:
        self.job, self.args, self.corpus, self.resume = job, job.args, corpus, resume
        self.console = console or Console()
        self.folder = Folder(str(self.args.output_dir))

        # ---- batches, and where they go on ----
        check_vocabulary(corpus.tokenizer, job.config.get_text_config().vocab_size)
        self.mesh = build_mesh(job.recipe.mesh)
        self._share = batch_share(self.mesh, job.recipe.batch)
        index, count = self._share
        self.batches = TrainingBatches(
            corpus.train, job.rows, seed=self.args.seed, process_index=index, process_count=count
        )
        self.rate = self.args.learning_rate or (5e-5 if source else 2e-3)
        restored = None
        if resume is not None:
            resume.check_model(job.plan)
            self.batches.load_state_dict(resume.host["data"])
            source = restored = resume
            self.rate = self.args.learning_rate or resume.host["learning_rate"]

        # ---- weights and steps ----
        with self.console.status("placing the weights on the devices …"):
            built = build(job, self.mesh, source or seeded_init(job.model, self.args.seed), restored)
        self.model, self.placed = built.model, built.placed
        self.train_step, self.eval_step = built.step, built.evaluation
        self.schedule = Schedule(self.args.lr_scheduler_type, self.rate, self.args.warmup_steps, self.args.max_steps)

        # ---- the loop's state, in transformers' own classes ----
        if resume is not None:
            self.train_step.metrics_read = resume.host["metrics_read"]
            self.schedule.skip(resume.step)
        self.state, self.control = _state_at_the_start(self.args, resume), TrainerControl()
        flow = [DefaultFlowCallback(), ProgressCallback(self.console), *callbacks]
        self.callbacks = CallbackHandler(flow, self.model, corpus.tokenizer, None, None)
        self.stop = StopRequests()
        texts = run_texts(job.as_texts(), job.config, corpus.tokenizer)
        self.checkpoints = CheckpointWriter(self.folder, texts, self.args.save_total_limit)
        self._clock = time.perf_counter()  # when the steps of the next log line began
        self._last_rate = self.rate

    def train(self) -> TrainerState:
        """Run the loop to ``max_steps``, a signal or a loss that is not finite; leaves the output folder complete.

        Raises:
            UserError: the loss became NaN or infinite (names the step; the last good state is saved), a step would
                compile again, or a checkpoint could not be written.
        """
        for name, content in self.job.as_texts().items():
            self.folder.write(name, as_json(content))
        with self.console.status("counting tokens for the unigram model …"):
            vocabulary = self.job.config.get_text_config().vocab_size
            unigram = unigram_loss(self.corpus.train, self.corpus.heldout, vocabulary)
        with self.stop.listen():
            self.checkpoints.remove_half_written()
            before = self._loss_before()
            try:
                self._loop()
            except Exception as why:
                try:
                    self._write_out(unigram)
                except StorageError as error:  # the user must hear what stopped the run, not this
                    self.console.print(f"nor could the model be saved: {error.asked}: {error.found}", soft_wrap=True)
                raise why from None
            self._load_best()
            self._write_out(unigram)
            after = None if self.stop.any else self._evaluate_and_log()
            self._write_state(unigram)
        history, compiles = self.state.log_history, compile_count()
        self.console.print(closing_table((before, after, unigram), history, compiles, str(self.folder)))
        return self.state

    def evaluate(self) -> float:
        """Mean cross entropy over the held-out rows, in nats a token."""
        rows = self.job.micro_batch_rows
        batches = heldout_batches(self.corpus.heldout, rows, *self._share)
        return self.eval_step(
            tracked(self.console, "held-out rows", batches, math.ceil(len(self.corpus.heldout) / rows))
        )

    def save_model(self, folder: Folder) -> None:
        """Write the model in the hub's format: `AutoModelForCausalLM.from_pretrained(folder)` loads it."""
        live = LiveWeights(self.model, self.job.stored, self.mesh, self.placed.parameters)
        with self.console.status(f"writing {folder} …"):
            # a copy, since a model's config is written with the dtype of its weights
            export(folder, copy.deepcopy(self.job.model), live, self.corpus.tokenizer, console=self.console)

    # ---- the loop ----

    def _loop(self) -> None:
        args: Any = self.args  # transformers' callbacks want its own class; ours has the fields that they read
        state, control, batches = self.state, self.control, self.batches
        if self.resume is not None:
            set_random_state(self.resume.host["random"])
        self.callbacks.on_train_begin(args, state, control)
        self._clock = time.perf_counter()
        try:
            while state.global_step < args.max_steps and not (control.should_training_stop or self.stop.any):
                control = self.callbacks.on_step_begin(args, state, control)
                step = state.global_step + 1
                self._last_rate = self.schedule.learning_rate
                self.train_step(next(batches), step=step, learning_rate=self._last_rate)
                self.schedule.advance()
                epochs, state.epoch = int(state.epoch or 0), batches.epoch
                state.global_step = step
                state.num_input_tokens_seen += self.job.tokens
                control = self.callbacks.on_step_end(args, state, control)
                if int(state.epoch) > epochs:
                    control = self.callbacks.on_epoch_end(args, state, control)
                self.stop.after_step(step)
                self._log_evaluate_save(control)
        finally:
            self.control = control
            self.callbacks.on_train_end(args, state, control)
        if self.stop.any:
            what = "saving what was learned" if self.stop.interrupted else "the same command resumes from there"
            word = "interrupted" if self.stop.interrupted else "preempted (SIGTERM)"
            self.console.print(f"{word} after step {state.global_step}: {what}", highlight=False, soft_wrap=True)

    def _log_evaluate_save(self, control: TrainerControl) -> None:
        """What follows a step. A stop by signal saves before it logs: what is saved is as in a run that went on."""
        logging = control.should_log or control.should_evaluate or control.should_training_stop
        if logging:
            self._log_metrics()
        if control.should_evaluate:
            self._evaluate_and_log()
        wanted = self.stop.preempted or (self.stop.interrupted and self.args.save_strategy != "no")
        if self.control.should_save or wanted:
            self._save_checkpoint()
        else:
            self._log_saved(self.checkpoints.finished())
        if self.stop.interrupted and not logging:
            self._log_metrics()

    # ---- evaluation and logs ----

    def _log_metrics(self) -> None:
        metrics = self.train_step.read_metrics()
        now = time.perf_counter()
        if metrics.bad_step:
            self._stop_on_bad_loss(metrics)
        logs = {
            "loss": metrics.loss,
            "learning_rate": self._last_rate,
            "grad_norm": metrics.grad_norm,
            "tokens_per_second": metrics.steps * self.job.tokens / (now - self._clock),
            "compiles": compile_count(),
        }
        if metrics.dropped_fraction is not None:
            logs["dropped_fraction"] = metrics.dropped_fraction
        self._clock = now
        self._log(logs)

    def _log(self, logs: dict[str, Any]) -> None:
        self.state.log_history.append({**logs, "step": self.state.global_step, "epoch": self.state.epoch})
        self.control.should_log = False
        args: Any = self.args
        self.control = self.callbacks.on_log(args, self.state, self.control, logs)

    def _log_saved(self, saved: Saved | None) -> None:
        if saved is not None:
            self._log({"saved_step": saved.step, "save_bytes": saved.bytes, "save_seconds": saved.seconds})

    def _evaluate_and_log(self) -> float:
        started, state = time.perf_counter(), self.state
        loss = self.evaluate()
        self.control.should_evaluate = False
        self._log({"eval_loss": loss})
        better = math.isfinite(loss) and (state.best_metric is None or loss < state.best_metric)
        if better and state.global_step:
            state.best_metric, state.best_global_step = loss, state.global_step
            self.control.should_save |= self.args.save_strategy == "best"
        self._clock += time.perf_counter() - started  # no part of the steps' time
        return loss

    def _loss_before(self) -> float:
        """The held-out loss before the first step; a resumed run finds it in its history."""
        first = next((entry["eval_loss"] for entry in self.state.log_history if "eval_loss" in entry), None)
        return self._evaluate_and_log() if first is None else first

    def _stop_on_bad_loss(self, metrics: StepMetrics) -> None:
        self.state.global_step = metrics.bad_step - 1
        raise UserError(
            asked=f"step {metrics.bad_step} of {self.args.max_steps}",
            found=f"its loss or gradient norm is not finite (loss {metrics.loss}, gradient norm {metrics.grad_norm})",
            why="training on would spread it to every weight; the weights are as step "
            f"{metrics.bad_step - 1} left them, saved in {self.args.output_dir}/model",
            instead="a lower --learning_rate, some --warmup_steps, --max_grad_norm 1.0, or --bf16 false",
        )

    # ---- what it saves and leaves ----

    def _save_checkpoint(self) -> None:
        metrics = self.train_step.read_metrics(and_begin_anew=False)
        if metrics.bad_step:  # a state after it must not pass for a good one
            self._stop_on_bad_loss(metrics)
        state, step = self.state, self.state.global_step
        if state.best_global_step == step:
            state.best_model_checkpoint = str(folder_of(self.folder, step))
        host = {
            "step": step,
            "learning_rate": self.rate,
            "data": self.batches.state_dict(),
            "metrics_read": self.train_step.metrics_read,
            "random": random_state(),
            "mesh": self.job.plan.mesh,
            "versions": versions(),
        }
        pause, before = self.checkpoints.save(self.train_step.state, host, state)
        self._log_saved(before)
        self._log({"save_pause": pause})
        args: Any = self.args
        self.control.should_save = False
        self.control = self.callbacks.on_save(args, state, self.control)

    def _load_best(self) -> None:
        best = self.state.best_model_checkpoint
        if not self.args.load_best_model_at_end or self.stop.any or best is None:
            return
        self._log_saved(self.checkpoints.wait())
        if best == str(folder_of(self.folder, self.state.global_step)):
            return
        source = open_checked(Folder(best), self.console)
        # step, evaluation and export share this dict: all see the new weights, and the old are freed one by one
        parameters = self.placed.parameters
        parameters.clear()
        parameters.update(place_parameters(self.model, self.job.stored, self.mesh, source))
        self.console.print(f"the best weights are those of {best}", highlight=False, soft_wrap=True)

    def _write_out(self, unigram: float) -> None:
        """Write state, curve and, unless preempted, the model; then wait for the checkpoint under way."""
        self._write_state(unigram)
        if not self.stop.preempted:
            self.save_model(self.folder / "model")
        self._log_saved(self.checkpoints.wait())

    def _write_state(self, unigram: float) -> None:
        self.folder.write("trainer_state.json", as_json(asdict(self.state)))
        self.folder.write("loss_curve.png", loss_curve(self.state.log_history, unigram))


def _state_at_the_start(args: TrainingArguments, resume: RunCheckpoint | None) -> TrainerState:
    """A new run's state, or that of the run to go on with, which counts on towards this run's steps."""
    state = TrainerState() if resume is None else resume.trainer_state
    state.max_steps, state.train_batch_size = args.max_steps, args.per_device_train_batch_size
    for name in ("logging_steps", "eval_steps", "save_steps"):
        setattr(state, name, getattr(args, name))
    return state
