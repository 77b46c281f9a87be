"""Trainer: recipe → mesh → plan → weights → step → loop → export, top to bottom."""

from __future__ import annotations

import contextlib
import json
import math
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch_xla
from rich.console import Console
from transformers import DefaultFlowCallback, PretrainedConfig, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler

from trainer import sharding, weights
from trainer.arguments import TrainingArguments
from trainer.assembly import build
from trainer.data import Corpus, TrainingBatches, heldout_batches, unigram_loss
from trainer.errors import UserError
from trainer.export import export
from trainer.mesh import build_mesh
from trainer.model import meta_model
from trainer.optimizer import Schedule
from trainer.plan import make_plan
from trainer.recipe import Recipe
from trainer.report import ProgressCallback, closing_table, loss_curve, tracked
from trainer.step import EvalStep, StepMetrics, compile_count


class Trainer:
    """Trains one causal language model by a recipe.

    Everything that can be refused is refused in the constructor, before a byte is allocated on a device.

    Args:
        recipe: layouts and compute policy.
        args: what the run does.
        config: the model; its class is transformers' own.
        corpus: rows to train on and held-out rows.
        source: where the weights come from; default: the model's random init from ``args.seed``.
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
        source: weights.Source | None = None,
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
        self._share = sharding.batch_share(self.mesh, self.recipe.batch)  # of each batch's rows, this process's
        rows, (index, count) = self._rows * args.gradient_accumulation_steps, self._share
        self.batches = TrainingBatches(corpus.train, rows, seed=args.seed, process_index=index, process_count=count)

        # ---- weights and steps ----
        rate = args.learning_rate or (5e-5 if source else 2e-3)
        source = source or weights.seeded_init(self.plain_model, args.seed)
        with self.console.status("placing the weights on the devices …"):
            built = build(self.recipe, args, config, self.plain_plan, self.mesh, source)
        self.model, self.plan, self.parameters, self.train_step = built.model, built.plan, built.parameters, built.step
        self.eval_step = EvalStep(built.loss, built.parameters, self.mesh, self.recipe.batch)
        self.schedule = Schedule(args.lr_scheduler_type, rate, args.warmup_steps, args.max_steps)

        # ---- the loop's state, in transformers' own classes ----
        self.state = TrainerState(
            max_steps=args.max_steps,
            logging_steps=args.logging_steps,
            eval_steps=args.eval_steps,
            train_batch_size=args.per_device_train_batch_size,
        )
        self.control = TrainerControl()
        self.callbacks = CallbackHandler(
            [DefaultFlowCallback(), ProgressCallback(self.console), *callbacks],
            self.model,
            corpus.tokenizer,
            None,
            None,
        )
        self.interrupted = False

    def train(self) -> TrainerState:
        """Run the loop to ``max_steps``, Ctrl-C or a loss that is not finite; leaves the output directory complete.

        Raises:
            UserError: the loss became NaN or infinite (names the step; the last good state is saved), or a step
                would compile again.
        """
        args: Any = self.args  # transformers' callbacks want its own class; ours has the fields that they read
        state, folder = self.state, Path(str(self.args.output_dir))
        _write_json(folder / "recipe.json", self.recipe.as_dict())
        _write_json(folder / "training_args.json", args.as_dict())
        _write_json(folder / "plan.json", self.plain_plan.as_json())
        with self.console.status("counting tokens for the unigram model …"):
            unigram = unigram_loss(self.corpus.train, self.corpus.heldout, self.config.get_text_config().vocab_size)
        with self._clean_interrupts():
            before = self._evaluate_and_log()
            self.callbacks.on_train_begin(args, state, self.control)
            try:
                self._loop()
            finally:
                self.callbacks.on_train_end(args, state, self.control)
                self._write_state(folder, unigram)
                self.save_model(folder / "model")
            after = None if self.interrupted else self._evaluate_and_log()
            self._write_state(folder, unigram)
        self._print_closing(folder, before, after, unigram)
        return state

    def evaluate(self) -> float:
        """Mean cross entropy over the held-out rows; nats a token."""
        batches = heldout_batches(self.corpus.heldout, self._rows, *self._share)
        total = math.ceil(len(self.corpus.heldout) / self._rows)
        return self.eval_step(tracked(self.console, "held-out rows", batches, total))

    def save_model(self, folder: Path) -> None:
        """Write the model in the hub's format: `AutoModelForCausalLM.from_pretrained(folder)` loads it."""
        live = weights.LiveWeights(self.model, self.plan, self.mesh, self.parameters)
        with self.console.status(f"writing {folder} …"):
            export(folder, meta_model(self.config), live, self.corpus.tokenizer, console=self.console)

    # ---- the loop ----

    def _loop(self) -> None:
        args: Any = self.args
        state, control = self.state, self.control
        self._clock = time.perf_counter()
        while not (control.should_training_stop or self.interrupted):
            control = self.callbacks.on_step_begin(args, state, control)
            step = state.global_step + 1
            self._last_rate = self.schedule.learning_rate
            self.train_step(next(self.batches), step=step, learning_rate=self._last_rate)
            self.schedule.advance()
            state.global_step = step
            state.epoch = self.batches.epoch
            state.num_input_tokens_seen += self.tokens_per_step
            control = self.callbacks.on_step_end(args, state, control)
            stopping = control.should_training_stop or self.interrupted
            if control.should_log or control.should_evaluate or stopping:
                self._log_metrics()
            if control.should_evaluate:
                self._evaluate_and_log()
        self.control = control
        if self.interrupted:
            self.console.print(f"interrupted after step {state.global_step}: saving what was learned")

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
        started = time.perf_counter()
        loss = self.evaluate()
        self.control.should_evaluate = False
        self._log({"eval_loss": loss})
        self._clock = getattr(self, "_clock", started) + time.perf_counter() - started
        return loss

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

    def _write_state(self, folder: Path, unigram: float) -> None:
        self.state.save_to_json(str(folder / "trainer_state.json"))
        loss_curve(folder / "loss_curve.png", self.state.log_history, unigram)

    def _print_closing(self, folder: Path, before: float, after: float | None, unigram: float) -> None:
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
            ("written to", str(folder)),
        ]
        self.console.print(closing_table(rows))

    @contextlib.contextmanager
    def _clean_interrupts(self) -> Iterator[None]:
        """Ctrl-C ends the loop after the step under way; a second one ends the program at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = signal.getsignal(signal.SIGINT)

        def note(signum: int, frame: Any) -> None:
            self.interrupted = True
            signal.signal(signal.SIGINT, previous)

        signal.signal(signal.SIGINT, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
