"""TrainingLoop: from the first batch to the last checkpoint, and what it logs, saves and leaves."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from transformers import DefaultFlowCallback, TrainerCallback, TrainerControl, TrainerState

from trainer.arguments.training import DEFAULT_RATE
from trainer.callbacks import Callbacks
from trainer.checkpoint.host_state import host_state, set_random_state
from trainer.checkpoint.lineage import folder_of, noted, noted_folder
from trainer.checkpoint.read import RunCheckpoint, open_checked, saved_buffers
from trainer.checkpoint.write import CheckpointWriter, Saved, as_json, run_texts
from trainer.data.batches import Batch, TrainingBatches, heldout_batches
from trainer.data.corpus import Corpus
from trainer.data.unigram import unigram_loss
from trainer.endings import best_unread, farewell, not_finite, other_devices, set_aside
from trainer.errors import UserError
from trainer.job import Job
from trainer.lock import FolderLock
from trainer.preemption import StopRequests
from trainer.reference import Reference
from trainer.report.bars import tracked
from trainer.report.lines import say, waiting
from trainer.report.terminal import ProgressCallback, closing_table
from trainer.state import is_evaluated, loss_before, note_if_best, state_at_the_start
from trainer.step.build import build
from trainer.step.meter import Meter, least_seconds
from trainer.step.reference import ReferenceStep
from trainer.step.train_step import StepMetrics
from trainer.storage import Folder, StorageError
from trainer.streams import lasting_output
from trainer.trackers import Tracker
from trainer.unused import notice
from trainer.watch import Watch
from trainer.weights.adapters import files_of, save_adapter, weights_of
from trainer.weights.hub_write import export
from trainer.weights.live import LiveWeights
from trainer.weights.place import place_parameters
from trainer.weights.sources import Source, part_and_rest, seeded_init
from trainer.xla.batch import batch_share
from trainer.xla.mesh import build_mesh
from trainer.xla.profile import ProfileCallback
from trainer.xla.runtime import chip, compile_count


class TrainingLoop:
    """Trains one causal language model.

    What the data or a checkpoint can't be is refused in the constructor, before a weight is placed.

    Args:
        job: what to train, checked.
        corpus: rows to train on and held-out rows, of which ``max_eval_rows`` are evaluated.
        source: where the weights come from, under the names of ``job.whole``; default: its random init from the
            arguments' seed.
        resume: the checkpoint of a run to go on with, under whatever recipe and mesh it was saved.
        callbacks: transformers callbacks; docs/run.md says what they are told, and when.
        lock: the output folder's, where the caller holds it already; :meth:`train` takes it for its own length.

    Raises:
        UserError: the job is for another number of devices, the rows don't fill a batch, or the checkpoint is another
            model's or of other data.
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
        lock: FolderLock | None = None,
    ) -> None:
        self.job, self.args, self.corpus, self.resume = job, job.args, corpus, resume
        self.heldout, train = corpus.heldout.spread(self.args.max_eval_rows), corpus.train
        self.reference: Reference | None = None
        self._pairs = self.args.most_pairs(self.args.sequence_length)
        if self.args.has_reference:
            self.reference = Reference(train, self.heldout, self._pairs)
            self.heldout, train = self.reference.heldout, self.reference.train
        self.console, self.stop = console or Console(), StopRequests()
        self.folder = Folder(str(self.args.output_dir))
        self.lock = lock or FolderLock(self.folder, self.console)
        self.watch = Watch(self.folder, job, self.console, resume, self.lock.check_held)

        # ---- batches, and where they go on ----
        corpus.check_fits(self.args.sequence_length, job.config.get_text_config().vocab_size)
        self.mesh = build_mesh(job.recipe.mesh)
        if self.mesh.size() != job.devices:
            raise other_devices(job, self.mesh.size())
        self._share = batch_share(self.mesh, job.recipe.batch)
        self.batches = TrainingBatches(train, job.rows, self.args.seed, *self._share)
        self.rate = self.args.learning_rate or DEFAULT_RATE["given" if source else "random"]
        self.base = source or seeded_init(job.whole, self.args.seed)
        if resume is not None:
            resume.check_model(job.adapted, job.config)
            self.batches.load_state_dict(resume.host["data"])
            self.rate = self.args.learning_rate or resume.host["learning_rate"]
            if self.reference is not None:
                self.reference.load(resume.folder.parent)

        # ---- weights and steps ----
        if job.lora is None and (words := notice(*job.unused)) is not None:
            say(self.console, f"unused:  {words}")
        with waiting(self.console, "placing the weights on the devices …"):
            built = build(job, self.mesh, weights_of(job, self.base, resume), resume)
        self.model, self.placed = built.model, built.placed
        self.train_step, self.eval_step = built.step, built.evaluation
        self.schedule = self.args.schedule(self.rate)

        # ---- the loop's state, in transformers' own classes ----
        if resume is not None:
            self.train_step.metrics_read = resume.host["metrics_read"]
            self.schedule.skip(resume.step)
        self.state, self.control = state_at_the_start(self.args, resume), TrainerControl()
        flow = [DefaultFlowCallback(), ProgressCallback(self.console), *callbacks]
        if self.args.profile_steps is not None:
            flow.append(Tracker("profile", ProfileCallback(*self.args.profiled, self.folder), self.console))
        self.callbacks = Callbacks(flow, self.model, corpus.tokenizer, self.schedule, self.state.stateful_callbacks)
        texts = run_texts(job.as_texts(), job.config, corpus.tokenizer)
        self.checkpoints = CheckpointWriter(self.folder, texts, self.args.save_total_limit, self.lock.check_held)
        self._saved, self._epoch, self._last_rate = self.state.global_step, 0, self.rate
        self.meter = Meter(built.step, job.tokens, self._saved, least_seconds(job, chip()))
        self._event("on_init_end")

    @lasting_output()
    def train(self) -> TrainerState:
        """Run the loop to ``max_steps``, a signal or a loss that is not finite; leaves the output folder complete.

        Raises:
            UserError: the loss became NaN or infinite (names the step; the last good state is saved), a step would
                compile again, a checkpoint could not be written, or the best one could not be read (the last step's
                weights are written then).
        """
        if not self._pairs:  # their losses are none of tokens
            with waiting(self.console, "counting tokens for the unigram model …"):
                vocabulary = self.job.config.get_text_config().vocab_size
                self.watch.unigram = unigram_loss(self.corpus.train, self.heldout, vocabulary)
        with self.lock, self.checkpoints, self.stop.listen():
            self._take_over_the_folder()
            self._refer()
            try:
                self._loop()
                best = self._best()
            except Exception as why:
                try:
                    if not self.train_step.guard.first:  # before the first step nothing was learned
                        self._write_out()
                except StorageError as error:  # the user must hear what stopped the run, not this
                    say(self.console, f"nor could the model be saved: {error.asked}: {error.found}")
                raise why from None
            problem = self._write_out_with(best)
            after = None if self.stop.any else self._evaluate_and_log()
            self._write_state()
            self.watch.finish(self.state, self.meter.expert_load)
        losses = loss_before(self.state), after, self.watch.unigram
        self.console.print(closing_table(losses, self.state.log_history, compile_count(), str(self.folder)))
        if problem is not None:
            raise problem
        return self.state

    def evaluate(self) -> dict[str, float]:
        """``eval_loss`` (nats a token), ``eval_perplexity`` and ``eval_accuracy`` of the rows that are evaluated."""
        self._refer(kept=False)
        return self.eval_step(self._heldout_batches()).entries

    def save_model(self, folder: Folder, source: Source | None = None) -> None:
        """Write the model in the hub's format, which `AutoModelForCausalLM.from_pretrained(folder)` loads; or the
        adapter in PEFT's, which `PeftModel.from_pretrained` loads onto the model.

        Args:
            source: of the weights; default: those that are being trained.
        """
        weights = source or LiveWeights(self.model, self.job.stored, self.mesh, self.placed.parameters)
        with waiting(self.console, f"writing {folder} …"):
            if self.job.lora is not None:
                save_adapter(folder, files_of(self.job), weights, self.corpus.tokenizer, self.console)
                return
            # a copy, since a model's config is written with the dtype of its weights
            whole = part_and_rest(weights, self.base, self.job.names_in_whole)
            export(folder, copy.deepcopy(self.job.whole), whole, self.corpus.tokenizer, console=self.console)

    # ---- the loop ----

    def _refer(self, *, kept: bool = True) -> None:
        """Have what the starting weights say of all rows, if the objective asks for it; ``kept``: in the folder too."""
        if self.reference is None:
            return
        if not self.reference.known:
            step = ReferenceStep(self.train_step.loss, self.placed, self._pairs)
            with self.watch.clock.on("evaluation"):
                rows, stopped = self.job.evaluation_rows, lambda: self.stop.any
                self.reference.compute(step, rows, self._share, stopped, self.console)
        if kept and self.reference.known:
            self.reference.save(self.folder)

    def _event(self, name: str, **more: Any) -> None:
        """Tell the callbacks of an event; what they return is the control from then on."""
        args: Any = self.args  # they want transformers' own class; ours has the fields that they read
        self.control = getattr(self.callbacks, name)(args, self.state, self.control, **more)

    def _loop(self) -> None:
        if self.resume is not None:
            set_random_state(self.resume.host["random"])
        self._event("on_train_begin")
        self.meter.begin()
        try:
            self._evaluate_first()
            self.watch.clock.turn_to("steps")
            while not self._ends():
                self._run_epoch()
            self._log(self.meter.summary())
        finally:
            self.watch.clock.turn_to("save")
            self._event("on_train_end")
        if self.stop.any:
            say(self.console, farewell(self.stop.interrupted, self.state.global_step))

    def _ends(self) -> bool:
        done = self.state.global_step >= self.args.max_steps
        return done or self.control.should_training_stop or self.stop.any

    def _evaluate_first(self) -> None:
        """Evaluate before the first step, if that is asked for.

        A resumed run evaluates only if a signal cut the evaluation short after which it was saved: its losses and its
        best weights are then those of a run that was never stopped.
        """
        state, args = self.state, self.args
        if self.resume is None:
            if args.eval_on_start:
                self._evaluate_and_log()
            return
        due = not state.global_step % args.eval_steps or state.global_step == args.max_steps
        if args.eval_strategy == "steps" and due and not is_evaluated(state):
            self._evaluate_for_best()
            if state.best_global_step == state.global_step:
                state.best_model_checkpoint = noted(self.resume.folder, self.folder)

    def _run_epoch(self) -> None:
        """Steps until the data's epoch ends, or a callback or a signal ends it or the run."""
        self._event("on_epoch_begin")
        self._epoch = int(self.batches.epoch)
        while True:
            self._step()
            self._log_evaluate_save()
            if int(self.batches.epoch) > self._epoch or self._ends():
                break
        self._event("on_epoch_end")
        self._log_evaluate_save()

    def _step(self) -> None:
        """One optimizer step and its events: those of what lies inside its computation come right before and after."""
        state, step = self.state, self.state.global_step + 1
        self._event("on_step_begin")
        with self.watch.clock.on("data"):
            batch = next(self.batches)
        for _ in range(self.args.gradient_accumulation_steps - 1):
            self._event("on_substep_end")
        self._event("on_pre_optimizer_step")
        self._last_rate = self.schedule.learning_rate
        self.train_step(batch, step=step, learning_rate=self._last_rate)
        self._event("on_optimizer_step")
        self.schedule.advance()
        state.global_step, state.epoch = step, self.batches.epoch
        state.num_input_tokens_seen += self.job.tokens
        self._event("on_step_end")
        self.stop.after_step(step)

    def _log_evaluate_save(self) -> None:
        """What follows a step, and an epoch. A stop by signal saves before it logs: what is saved is as in a run that
        went on.
        """
        control = self.control
        if control.should_log or control.should_evaluate or control.should_training_stop:
            self._log_metrics()
        if self.control.should_evaluate:
            self._evaluate_for_best()
        if self.control.should_epoch_stop and int(self.batches.epoch) == self._epoch:
            self.batches.skip_epoch()  # before a save, whose cursor says which batch comes next
        wanted = self.stop.preempted or (self.stop.interrupted and self.args.save_strategy != "no")
        if (self.control.should_save or wanted) and self._saved < self.state.global_step:
            self._save_checkpoint()
            self._saved = self.state.global_step
        else:
            self._log_saved(self.checkpoints.finished())
        if self.stop.interrupted:
            self._log_metrics()

    # ---- evaluation and logs ----

    def _heldout_batches(self, *, stoppable: bool = False) -> Iterator[Batch]:
        """The batches of an evaluation; if ``stoppable``, none after a signal."""
        rows = self.job.evaluation_rows
        batches = heldout_batches(self.heldout, rows, *self._share)
        for batch in tracked(self.console, "held-out rows", batches, math.ceil(len(self.heldout) / rows)):
            if stoppable and self.stop.any:
                return
            yield batch
            self._event("on_prediction_step")

    def _evaluate_and_log(self) -> float | None:
        """The held-out loss, logged and told to the callbacks; None, and neither, if a signal cut it short."""
        started = time.perf_counter()
        with self.watch.clock.on("evaluation"):
            found = self.eval_step(self._heldout_batches(stoppable=True))
        self.meter.leave_out(time.perf_counter() - started)
        self.control.should_evaluate = False
        if self.stop.any:
            return None
        self._log(found.entries)
        self._event("on_evaluate", metrics={**found.entries, "epoch": self.state.epoch})
        return found.loss

    def _evaluate_for_best(self) -> None:
        if note_if_best(self.state, self._evaluate_and_log()):
            self.control.should_save |= self.args.save_strategy == "best"

    def _log_metrics(self) -> None:
        """Read and log what the steps since the last log line came to, if there were any."""
        if (read := self.meter.read(self.state.global_step, self._last_rate)) is not None:
            metrics, logs = read
            if metrics.bad_step:
                self._stop_on_bad_loss(metrics)
            self._log(logs)

    def _log(self, logs: dict[str, Any]) -> None:
        logs = {**logs, "epoch": self.state.epoch}
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self._event("on_log", logs=logs)
        self.watch.update(self.state, self.meter.expert_load)

    def _log_saved(self, saved: Saved | None) -> None:
        if saved is not None:
            self._log({"saved_step": saved.step, "save_bytes": saved.bytes, "save_seconds": saved.seconds})

    def _stop_on_bad_loss(self, metrics: StepMetrics) -> None:
        self.state.global_step = metrics.bad_step - 1
        raise not_finite(metrics, self.args)

    # ---- what it saves and leaves ----

    def _save_checkpoint(self) -> None:
        metrics = self.train_step.read_metrics(and_begin_anew=False)
        if metrics.bad_step:  # a state after it must not pass for a good one
            self._stop_on_bad_loss(metrics)
        state, step = self.state, self.state.global_step
        if state.best_global_step == step:
            state.best_model_checkpoint = noted(folder_of(self.folder, step), self.folder)
        data, read = self.batches.state_dict(), self.train_step.metrics_read
        host = host_state(step, self.rate, data, read, self.job.plan.mesh)
        state.stateful_callbacks = self.callbacks.states()  # type: ignore[assignment]  # a dict, once it is saved
        everything = {**self.train_step.state, **saved_buffers(self.model)}
        for name in self.job.untrained if self.job.lora is not None else ():
            del everything[name]  # frozen weights under an adapter are where the run took them from
        with self.watch.clock.on("save"):
            pause, before = self.checkpoints.save(everything, host, state)
        self._log_saved(before)
        self._log({"save_pause": pause})
        self._event("on_save")

    def _take_over_the_folder(self) -> None:
        for name, content in self.job.as_texts().items():
            self.folder.write(name, as_json(content))
        if aside := self.checkpoints.begin(self.resume):
            say(self.console, set_aside((folder_of(self.folder, step).name for step in aside), self.folder))
        self.watch.update(self.state, ())

    def _best(self) -> Folder | None:
        """The checkpoint of the weights to end with, its write ended; None: they are those on the devices."""
        best = self.state.best_model_checkpoint
        last = noted(folder_of(self.folder, self.state.global_step), self.folder)
        if not self.args.load_best_model_at_end or self.stop.any or best is None or best == last:
            return None
        self._log_saved(self.checkpoints.wait())
        return noted_folder(best, self.folder)

    def _write_out_with(self, best: Folder | None) -> UserError | None:
        """Write out with the weights in ``best``, and place them on the devices, though not before all is written.

        If they can't be read, the last step's weights are written, and the error to end with is returned.
        """
        if best is None:
            self._write_out()
            return None
        try:
            source = open_checked(best, self.console)
            source.check_model(self.job.adapted, self.job.config)
            self._write_out(source)
        except UserError as error:
            self._write_out()
            return best_unread(error, self.state, self.folder)
        # step, evaluation and export share this dict: all see the new weights, and the old are freed one by one
        parameters = self.placed.parameters
        parameters.clear()
        weights = weights_of(self.job, self.base, source)
        parameters.update(place_parameters(self.model, self.job.stored, self.mesh, weights))
        say(self.console, f"the best weights are those of {best}")
        return None

    def _write_out(self, source: Source | None = None) -> None:
        """Write the state and, unless preempted or stopped before anything was learned, the model; wait for the
        checkpoint under way; write the pictures and the page.
        """
        self.lock.check_held()
        self._write_state()
        if not (self.stop.preempted or (self.stop.any and not self.state.global_step)):
            self.save_model(self.folder / "model", source)
        self._log_saved(self.checkpoints.wait())
        self.watch.finish(self.state, self.meter.expert_load)

    def _write_state(self) -> None:
        self.folder.write("trainer_state.json", as_json(asdict(self.state)))
