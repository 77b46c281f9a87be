"""Trainer: recipe → mesh → plan → weights → step → loop → export, top to bottom."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch_xla
from rich.console import Console
from transformers import DefaultFlowCallback, PretrainedConfig, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler

from trainer.arguments import TrainingArguments
from trainer.checkpoint.host_state import random_state, set_random_state, versions
from trainer.checkpoint.read import RunCheckpoint, folder_of, open_checked
from trainer.checkpoint.write import CheckpointWriter, Saved, as_json, run_texts
from trainer.data.batches import TrainingBatches, heldout_batches
from trainer.data.corpus import Corpus
from trainer.data.unigram import unigram_loss
from trainer.errors import UserError
from trainer.layout.plan import make_plan
from trainer.layout.recipe import Recipe
from trainer.model import meta_model
from trainer.preemption import StopRequests
from trainer.report.bars import tracked
from trainer.report.curve import loss_curve
from trainer.report.terminal import ProgressCallback, closing_table
from trainer.step.build import build
from trainer.step.eval_step import EvalStep
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
    """Trains one causal language model by a recipe.

    Everything that can be refused is refused in the constructor, before a byte is allocated on a device.

    Args:
        recipe: layouts and compute policy.
        args: what the run does.
        config: the model; its class is transformers' own.
        corpus: rows to train on and held-out rows.
        source: where the weights come from; default: the model's random init from ``args.seed``.
        resume: the checkpoint of a run to go on with, under whatever recipe and mesh it was saved.
        callbacks: transformers callbacks.

    Raises:
        UserError: recipe, model, mesh and batch don't go together.
    """

    def __init__(
        self,
        recipe: Recipe,
        args: TrainingArguments,
        config: PretrainedConfig,
        corpus: Corpus,
        *,
        source: Source | None = None,
        resume: RunCheckpoint | None = None,
        callbacks: Sequence[TrainerCallback] = (),
        console: Console | None = None,
    ) -> None:
        self.recipe, self.args, self.config, self.corpus = recipe, args, config, corpus
        self.console = console or Console()

        # ---- plan: all errors surface here ----
        self.plain_model = meta_model(config)
        devices = torch_xla.runtime.global_runtime_device_count()
        self.plain_plan = make_plan(self.recipe, self.plain_model, devices, **args.state_dtypes)
        self._rows = args.per_device_train_batch_size * self.plain_plan.batch_shards
        self.tokens_per_step = self._rows * args.gradient_accumulation_steps * args.sequence_length
        self._check_vocabulary()
        self.mesh = build_mesh(self.recipe.mesh)
        self._share = batch_share(self.mesh, self.recipe.batch)  # of each batch's rows, this process's
        rows, (index, count) = self._rows * args.gradient_accumulation_steps, self._share
        self.batches = TrainingBatches(corpus.train, rows, seed=args.seed, process_index=index, process_count=count)

        # ---- weights and steps: from a checkpoint, given, or random ----
        self.resume = resume
        self.rate = args.learning_rate or (5e-5 if source else 2e-3)
        restored = None
        if resume is not None:
            resume.check_model(self.plain_plan)
            source = restored = resume
            self.rate = args.learning_rate or resume.host["learning_rate"]
        source = source or seeded_init(self.plain_model, args.seed)
        with self.console.status("placing the weights on the devices …"):
            built = build(self.recipe, args, config, self.plain_plan, self.mesh, source, restored)
        self.model, self.plan, self.parameters, self.train_step = built.model, built.plan, built.parameters, built.step
        self.eval_step = EvalStep(built.loss, built.parameters, self.mesh, self.recipe.batch)
        self.schedule = Schedule(args.lr_scheduler_type, self.rate, args.warmup_steps, args.max_steps)

        # ---- the loop's state, in transformers' own classes ----
        self.state = TrainerState()
        if resume is not None:
            self.state = resume.trainer_state
            self.train_step.metrics_read = resume.host["metrics_read"]
            self.schedule.skip(resume.step)
            self.batches.load_state_dict(resume.host["data"])
        self.state.max_steps, self.state.train_batch_size = args.max_steps, args.per_device_train_batch_size
        for name in ("logging_steps", "eval_steps", "save_steps"):
            setattr(self.state, name, getattr(args, name))
        self.control = TrainerControl()
        self.callbacks = CallbackHandler(
            [DefaultFlowCallback(), ProgressCallback(self.console), *callbacks],
            self.model,
            corpus.tokenizer,
            None,
            None,
        )

        # ---- what it leaves ----
        self.stop = StopRequests()
        self.folder = Folder(str(args.output_dir))
        self._texts = {
            "recipe.json": recipe.as_dict(),
            "training_args.json": args.as_dict(),
            "plan.json": self.plain_plan.as_json(),
        }
        texts = run_texts(self._texts, config, corpus.tokenizer)
        self.checkpoints = CheckpointWriter(self.folder, texts, args.save_total_limit)

    def train(self) -> TrainerState:
        """Run the loop to ``max_steps``, a signal or a loss that is not finite; leaves the output directory complete.

        Raises:
            UserError: the loss became NaN or infinite (names the step; the last good state is saved), a step would
                compile again, or a checkpoint could not be written.
        """
        for name, content in self._texts.items():
            self.folder.write(name, as_json(content))
        with self.console.status("counting tokens for the unigram model …"):
            unigram = unigram_loss(self.corpus.train, self.corpus.heldout, self.config.get_text_config().vocab_size)
        with self.stop.listen():
            self.checkpoints.remove_half_written()
            before = self._loss_before()
            try:
                self._loop()
            except Exception as why:
                try:
                    self._write_out(unigram)
                except StorageError as error:  # what stopped the run is what the user must hear
                    self.console.print(f"nor could the model be saved: {error.asked}: {error.found}", soft_wrap=True)
                raise why from None
            self._load_best()
            self._write_out(unigram)
            after = None if self.stop.any else self._evaluate_and_log()
            self._write_state(unigram)
        self._print_closing(before, after, unigram)
        return self.state

    def evaluate(self) -> float:
        """Mean cross entropy over the held-out rows; nats a token."""
        batches = heldout_batches(self.corpus.heldout, self._rows, *self._share)
        total = math.ceil(len(self.corpus.heldout) / self._rows)
        return self.eval_step(tracked(self.console, "held-out rows", batches, total))

    def save_model(self, folder: Folder) -> None:
        """Write the model in the hub's format: `AutoModelForCausalLM.from_pretrained(folder)` loads it."""
        live = LiveWeights(self.model, self.plan, self.mesh, self.parameters)
        with self.console.status(f"writing {folder} …"):
            export(folder, meta_model(self.config), live, self.corpus.tokenizer, console=self.console)

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
                state.num_input_tokens_seen += self.tokens_per_step
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
        """What a step is followed by. A stop by signal saves first and logs later, as if there had been no stop."""
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
            "mesh": self.plan.mesh,
            "versions": versions(),
        }
        pause, before = self.checkpoints.save(self.train_step.state, host, state)
        self._log_saved(before)
        self._log({"save_pause": pause})
        args: Any = self.args
        self.control.should_save = False
        self.control = self.callbacks.on_save(args, state, self.control)

    def _log_saved(self, saved: Saved | None) -> None:
        if saved is not None:
            self._log({"saved_step": saved.step, "save_bytes": saved.bytes, "save_seconds": saved.seconds})

    def _log_metrics(self) -> None:
        metrics = self.train_step.read_metrics()
        now = time.perf_counter()
        if metrics.bad_step:
            self._stop_on_bad_loss(metrics)
        logs = {
            "loss": metrics.loss,
            "learning_rate": self._last_rate,
            "grad_norm": metrics.grad_norm,
            "tokens_per_second": metrics.steps * self.tokens_per_step / (now - self._clock),
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

    def _evaluate_and_log(self) -> float:
        started, state = time.perf_counter(), self.state
        loss = self.evaluate()
        self.control.should_evaluate = False
        self._log({"eval_loss": loss})
        better = math.isfinite(loss) and (state.best_metric is None or loss < state.best_metric)
        if better and state.global_step:
            state.best_metric, state.best_global_step = loss, state.global_step
            self.control.should_save |= self.args.save_strategy == "best"
        self._clock = getattr(self, "_clock", started) + time.perf_counter() - started
        return loss

    def _loss_before(self) -> float:
        """The held-out loss before the first step, also where that was another process's."""
        first = next((entry["eval_loss"] for entry in self.state.log_history if "eval_loss" in entry), None)
        return self._evaluate_and_log() if first is None else first

    def _load_best(self) -> None:
        best = self.state.best_model_checkpoint
        if not self.args.load_best_model_at_end or self.stop.any or best is None:
            return
        self._log_saved(self.checkpoints.wait())
        if best == str(folder_of(self.folder, self.state.global_step)):
            return
        source = open_checked(Folder(best), self.console)
        # step, evaluation and export share this dict: all see the new weights, the old are freed one by one
        self.parameters.clear()
        self.parameters.update(place_parameters(self.model, self.plan, self.mesh, source))
        self.console.print(f"the best weights are those of {best}", highlight=False, soft_wrap=True)

    def _stop_on_bad_loss(self, metrics: StepMetrics) -> None:
        self.state.global_step = metrics.bad_step - 1
        raise UserError(
            asked=f"step {metrics.bad_step} of {self.args.max_steps}",
            found=f"its loss or gradient norm is not finite (loss {metrics.loss}, gradient norm {metrics.grad_norm})",
            why="training on would spread it to every weight; the weights are as step "
            f"{metrics.bad_step - 1} left them, saved in {self.args.output_dir}/model",
            instead="a lower --learning_rate, some --warmup_steps, --max_grad_norm 1.0, or --bf16 false",
        )

    # ---- parts ----

    def _check_vocabulary(self) -> None:
        vocabulary, known = len(self.corpus.tokenizer), self.config.get_text_config().vocab_size
        if vocabulary > known:
            raise UserError(
                asked=f"a tokenizer of {vocabulary} tokens",
                found=f"the model's embedding has {known} rows",
                why="a token beyond them has no embedding",
                instead="the model's own tokenizer (--tokenizer), or a model with a larger vocab_size",
            )

    def _write_out(self, unigram: float) -> None:
        """State, curve and model (which a preempted run has no time for); waits for the checkpoint under way."""
        self._write_state(unigram)
        if not self.stop.preempted:
            self.save_model(self.folder / "model")
        self._log_saved(self.checkpoints.wait())

    def _write_state(self, unigram: float) -> None:
        self.folder.write("trainer_state.json", as_json(asdict(self.state)))
        self.folder.write("loss_curve.png", loss_curve(self.state.log_history, unigram))

    def _print_closing(self, before: float, after: float | None, unigram: float) -> None:
        # the first reading's rate has the compile in it
        rates = [entry["tokens_per_second"] for entry in self.state.log_history if "tokens_per_second" in entry][1:]
        rows = [
            ("held-out loss before", f"{before:.4f} nats/token"),
            ("held-out loss after", "not measured: interrupted" if after is None else f"{after:.4f} nats/token"),
            ("unigram model's loss", f"{unigram:.4f} nats/token (the same held-out tokens)"),
            (
                "tokens/s",
                f"{sorted(rates)[len(rates) // 2]:,.0f} (median, compile left out)" if rates else "too few steps",
            ),
            ("compiles", str(compile_count())),
            ("written to", str(self.folder)),
        ]
        self.console.print(closing_table(rows))
