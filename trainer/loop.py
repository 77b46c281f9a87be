"""TrainingLoop: from the first batch to the last checkpoint, with its logs and saves."""

import copy
import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Console
from transformers import DefaultFlowCallback, TrainerControl, TrainerState

from shardwright.arguments.run_file import RUN_FILE, run_file
from shardwright.arguments.training import DEFAULT_RATE
from shardwright.checkpoint import host_state, lineage, output_folder, staging, write
from shardwright.checkpoint.read import RunCheckpoint
from shardwright.checkpoint.trained_model import TrainedModel
from shardwright.data.corpus import Corpus
from shardwright.data.rows.batches import TrainingBatches
from shardwright.data.rows.rows import StoredRows
from shardwright.data.unigram import unigram_loss
from shardwright.errors import UserError
from shardwright.evaluation.heldout import Evaluator
from shardwright.evaluation.prompt_samples import Samples
from shardwright.evaluation.reference_rows import check_sets, referred
from shardwright.files.folder import Folder, StorageError, as_json
from shardwright.files.lock import FolderLock
from shardwright.hosts.hosts import hosts
from shardwright.hosts.output_streams import lasting_output
from shardwright.inputs import TrainerCallbacks
from shardwright.job import Job
from shardwright.model.classifier import padding_token
from shardwright.model.unused_parameters import notice
from shardwright.monitoring import messages
from shardwright.monitoring import state as states
from shardwright.monitoring.callbacks import Callbacks, Tracker
from shardwright.monitoring.log import RunLog
from shardwright.monitoring.run_page import RunPage
from shardwright.report.lines import Terminal, say, waiting
from shardwright.report.terminal import ProgressCallback
from shardwright.step.build import evaluation_step, place_model
from shardwright.step.eval_metrics import ComputeMetrics
from shardwright.step.loss import LossFunction
from shardwright.step.train_step import TrainStep
from shardwright.weights.adapter_weights import weights_of
from shardwright.weights.weight_sources import Source, seeded_init
from shardwright.xla.batch import batch_share
from shardwright.xla.device_mesh import build_mesh
from shardwright.xla.profile import ProfileCallback
from shardwright.xla.stop_requests import StopRequests


class TrainingLoop:
    """Trains one causal language model, or one that scores texts.

    Args:
        source: the starting weights, under the names of ``job.facts.whole``; default: a random init from the seed.
        resume: the checkpoint to go on from, under whatever recipe and mesh it was saved.
        callbacks: transformers'; docs/callbacks.md says what they are told, and when.
        compute_loss: the loss, of the model's outputs, in place of its own.
        goes_on_after: whether the run begins again after an error, so that the model is not written out then.
        after: the error that ended the process before this one, if the run itself goes on after it.
        lock: the output folder's, where the caller holds it already; else :meth:`train` takes it.

    Raises:
        UserError: before a weight is placed: the job is for another number of devices, the rows don't fill a batch, or
            the checkpoint is another model's or of other data.
    """

    def __init__(
        self,
        job: Job,
        corpus: Corpus,
        *,
        source: Source | None = None,
        resume: RunCheckpoint | None = None,
        callbacks: TrainerCallbacks = (),
        console: Console | None = None,
        lock: FolderLock | None = None,
        compute_loss: LossFunction | None = None,
        compute_metrics: ComputeMetrics | None = None,
        goes_on_after: Callable[[Exception], bool] = lambda error: False,
        after: str = "",
    ) -> None:
        corpus, self.reference = referred(corpus, job.args)
        held = {f"held-out rows {name}": rows.fingerprint for name, rows in corpus.heldout_sets.items()}
        hosts().check_same({"rows to train on": corpus.train.fingerprint, **held})
        job, self.state, measures = states.settled(job, corpus, resume, compute_loss, compute_metrics)
        self.job, self.args, self.corpus, self.resume, self.goes_on_after = job, job.args, corpus, resume, goes_on_after
        self.console, self.stop = console or Terminal(), StopRequests()
        self.folder = output_folder.output_folder(self.args)
        self.lock = lock or FolderLock(self.folder, self.console)
        self.watch = RunPage(self.folder, job, self.state, self.console, resume, self.lock.check_held, after)
        self.watch.data = corpus.said

        # ---- batches, and where they go on ----
        self.mesh = build_mesh(job.recipe.mesh)
        if self.mesh.size() != job.devices:
            raise messages.other_devices(job, self.mesh.size())
        self._share = share = batch_share(self.mesh, job.recipe.batch)
        self.batches = TrainingBatches(corpus.train, job.rows, self.args.seed, *share, job.row_lengths, corpus.date)
        self.rate = self.args.learning_rate or DEFAULT_RATE["given" if source else "random"]
        self.base = source or seeded_init(job.facts.whole, self.args.seed)
        if resume is not None:
            resume.check_model(job.adapted, job.config)
            self.batches.load_state_dict(resume.host["data"])
            self.rate = self.args.learning_rate or resume.host["learning_rate"]
            if self.reference is not None:
                self.reference.load(resume.folder.parent)
        if self.args.sample_prompts is not None:
            self.watch.samples = Samples(job, corpus.tokenizer, self.folder, self.console, resume)

        # ---- weights and steps ----
        if (words := notice(*job.unused)) is not None and job.lora is None:  # job.unused refuses a loss of no parameter
            say(self.console, f"unused:  {words}")
        with waiting(self.console, "placing the weights on the devices …"):
            self.placed = placed = place_model(job, self.mesh, weights_of(job, self.base, resume), loss=compute_loss)
            placed.loss.objective.padding = padding_token(corpus.tokenizer)
            self.train_step = TrainStep(placed, resume, resume.arguments.get("z_loss", 0.0) if resume else None)
        self.watch.model = placed.model
        tokenizer, step = corpus.tokenizer, evaluation_step(placed, measures)
        self.trained = TrainedModel(job, placed.model, self.mesh, placed.parameters, self.base, tokenizer, self.console)
        self.evaluator = Evaluator(job, corpus, step, share, self.console, self.stop, self._event, self._tell_evaluated)
        self.schedule = self.args.schedule(self.rate)
        if self.schedule.notice:
            say(self.console, f"rate:    {self.schedule.notice}")

        # ---- the loop's state, in transformers' own classes ----
        if resume is not None:
            self.train_step.metrics_read = resume.host["metrics_read"]
            self.schedule.advance(resume.step)
        self.control = TrainerControl()
        flow: list[Any] = [DefaultFlowCallback(), ProgressCallback(self.console), *callbacks]
        if self.args.profile_steps is not None:
            flow.append(Tracker("profile", ProfileCallback(*self.args.profiled, self.folder), self.console))
        self.callbacks = Callbacks(flow, placed.model, tokenizer, self.schedule, self.state.stateful_callbacks)
        texts = write.run_texts(job.as_texts(), job.config, tokenizer)
        output = Folder(str(self.folder))  # where every host writes its part
        staged = staging.open_staging(self.args.staging_dir, output) if self.args.staging_dir else None
        tell, limit = functools.partial(say, self.console), self.args.save_total_limit
        self.checkpoints = write.CheckpointWriter(output, texts, limit, self.lock.check_held, staged, tell)
        self.state.is_world_process_zero = hosts().first
        self._saved, self._epoch, self._last_rate = self.state.global_step, 0, self.rate
        self._untold: dict[int, TrainerState] = {}  # step -> state of saves that callbacks have not been told of
        self.log = RunLog(job, self.train_step, self.state, self.watch, self.console, self._event)
        self._event("on_init_end")

    @lasting_output()
    def train(self) -> TrainerState:
        """Run the loop to ``max_steps``, a signal or a loss that is not finite; leaves the output folder complete.

        Raises:
            UserError: the loss became NaN or infinite (the last good state is saved), a step would compile again, a
                checkpoint could not be written, or the best one not read (the last step's weights are written then).
        """
        if not self.args.goal.parts:  # the loss is that of tokens
            with waiting(self.console, "counting tokens for the unigram model …"):
                vocabulary = self.job.config.get_text_config().vocab_size
                self.watch.unigram = unigram_loss(self.corpus.train, self.evaluator.first, vocabulary)
        watched = hosts().watchdog.over(self.args.hang_timeout, self.watch.clock)
        with self.lock, self.checkpoints, self.stop.listen(), watched:
            self._write_texts()
            if aside := self.checkpoints.begin(self.resume):
                say(self.console, messages.set_aside(aside, self.folder))
            self.watch.update()
            self._refer()
            try:
                self._loop()
                best = self._best()
            except Exception as why:
                try:
                    # before the first step nothing was learned; of all errors only a UserError is raised on every host
                    if self.train_step.begun and (isinstance(why, UserError) or not hosts().several):
                        goes_on = not self.stop.any and self.goes_on_after(why)
                        self.watch.note_end() if goes_on else self._write_out()
                except StorageError as error:  # the user must hear what stopped the run, not this
                    say(self.console, f"nor could the model be saved: {error.asked}: {error.found}")
                raise why from None
            problem = self._write_out_with(best)
            found = None if self.stop.any else self._evaluate_and_log()
            self._write_state()
            self.watch.finish()
        self.log.programs()
        first, unigram = self.evaluator.first_loss, self.watch.unigram
        self.console.print(states.closing(self.state, first, found, unigram, self.folder))
        if problem is not None:
            raise problem
        return self.state

    def evaluate(self, sets: Mapping[str, StoredRows] | None = None, prefix: str = "eval") -> dict[str, float]:
        """Evaluate the held-out sets, or ``sets``; the result is also logged and told to the callbacks.

        It is ``eval_loss`` (nats a token), ``eval_perplexity``, ``eval_accuracy`` and what compute_metrics gives; of a
        set that has a name, ``eval_NAME_loss``, …. With an objective on pairs its loss, and rewards by trl's names.

        Raises:
            UserError: the objective compares with the starting weights or a teacher, which did not see ``sets``.
        """
        check_sets(self.args, sets)
        self._refer(kept=False)
        return self.evaluator(sets, prefix)

    # ---- the loop ----

    def _refer(self, *, kept: bool = True) -> None:
        """Evaluate all rows with the starting weights, if the objective needs it; ``kept``: saved in the folder too."""
        if self.reference is None:
            return
        if not self.reference.known:
            batch, stopped = (self.job.evaluation_rows, *self._share), lambda: self.stop.any
            with self.watch.clock.on("evaluation"):
                self.reference.compute(self.placed, batch, stopped, self.console)
        if kept and self.reference.known:
            self.reference.save(self.folder)

    def _event(self, name: str, state: TrainerState | None = None, **more: Any) -> None:
        """Tell the callbacks of an event, and take the control they return. The watchdog counts it as progress."""
        hosts().watchdog.moved(self.state.global_step)
        self.control = getattr(self.callbacks, name)(self.args, state or self.state, self.control, **more)

    def _loop(self) -> None:
        if self.resume is not None:
            host_state.set_random_state(self.resume.host["random"])
        self._event("on_train_begin")
        self.log.begin()
        try:
            self._evaluate_first()
            self.watch.clock.turn_to("steps")
            while not self._ends():
                self._run_epoch()
            if self._untold and self.callbacks.hear_saves(observers=True):
                self._wait_for_save()
            self.log.summary()
        finally:
            self.watch.clock.turn_to("save")
            self._event("on_train_end")
        if self.stop.any:
            say(self.console, messages.farewell(self.stop.interrupted, self.state.global_step))

    def _ends(self) -> bool:
        return self.state.global_step >= self.args.max_steps or self.control.should_training_stop or self.stop.any

    def _evaluate_first(self) -> None:
        # A resumed run evaluates only where a signal cut short the evaluation that was due before the save. So it has
        # the losses and the best weights of a run that was never stopped.
        if self.resume is None:
            if self.args.eval_on_start:
                self._evaluate_and_log()
        elif states.lacks_evaluation(self.state, self.args, self.evaluator.last_loss):
            self._evaluate_for_best()
            self._note_if_best(self.resume.folder)

    def _note_if_best(self, checkpoint: Folder) -> None:
        """Note the ``checkpoint`` of this step as the best, if the step's weights are."""
        if self.state.best_global_step == self.state.global_step:
            self.state.best_model_checkpoint = lineage.noted(checkpoint, self.folder)

    def _run_epoch(self) -> None:
        """Step until the data's epoch ends, or a callback or a signal ends it or the run."""
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
        """One optimizer step; the events inside its computation come right before and after it."""
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
        self.log.stepped(batch["input_ids"].shape[1])
        self._event("on_step_end")
        self.stop.after_step(step)

    def _log_evaluate_save(self) -> None:
        """Do as the control says. A stop by signal saves before it logs: its state is that of a run that went on."""
        control = self.control
        if control.should_log or control.should_evaluate or control.should_training_stop:
            self.log.steps(self._last_rate)
        if self.control.should_evaluate:
            self._evaluate_for_best()
        if self.control.should_epoch_stop and int(self.batches.epoch) == self._epoch:
            self.batches.skip_epoch()  # before a save, whose cursor says which batch comes next
        wanted = self.stop.preempted or (self.stop.interrupted and self.args.save_strategy != "no")
        if (self.control.should_save or wanted) and self._saved < self.state.global_step:
            self._save_checkpoint()
            self._saved = self.state.global_step
        else:
            self._tell_saved(self.checkpoints.finished())
        if self.stop.interrupted:
            self.log.steps(self._last_rate)

    # ---- evaluation and logs ----

    def _evaluate_and_log(self) -> dict[str, float] | None:
        """Evaluate the held-out sets, log and tell each; None if a signal cut it short."""
        started = time.perf_counter()
        with self.watch.clock.on("evaluation"):
            found = self.evaluator(stoppable=True)
            if self.watch.samples is not None and not self.stop.any:
                self.watch.samples.take(self.state.global_step, self.placed)
        self.log.leave_out(time.perf_counter() - started)
        self.control.should_evaluate = False
        self.watch.update()
        return None if self.stop.any else found

    def _tell_evaluated(self, found: dict[str, float]) -> None:
        self.control.should_evaluate = False
        self.log.note(found)
        self._event("on_evaluate", metrics={**found, "epoch": self.state.epoch})

    def _evaluate_for_best(self) -> None:
        if states.note_if_best(self.state, self._evaluate_and_log(), self.args):
            self.control.should_save |= self.args.save_strategy == "best"

    # ---- what it saves and leaves ----

    def _save_checkpoint(self) -> None:
        metrics = self.train_step.read_metrics(and_begin_anew=False)
        messages.check_good(metrics, self.state, self.args)  # a state after a bad step must not pass for a good one
        state, step = self.state, self.state.global_step
        self._note_if_best(lineage.folder_of(self.folder, step))
        data, read = self.batches.state_dict(), self.train_step.metrics_read
        host = host_state.host_state(step, self.rate, data, read, self.job.plan.mesh, self.args.asked_batch)
        host |= self.trained.base_noted
        state.stateful_callbacks = self.callbacks.states()  # type: ignore[assignment]  # a dict, once it is saved
        saved = self.trained.saved(self.train_step.state)
        with self.watch.clock.on("save"):
            pause, before = self.checkpoints.save(saved, host, state, urgent=self.stop.preempted)
        self._tell_saved(before)
        self.log.write({"save_pause": pause})
        self._untold[step] = copy.copy(state)
        if self.callbacks.hear_saves(observers=False):  # they may act on it, on each host at the same step
            self._wait_for_save()

    def _wait_for_save(self) -> None:
        with self.watch.clock.on("save"):
            ended = self.checkpoints.wait(must_arrive=False)
        self._tell_saved(ended)

    def _tell_saved(self, ended: write.SaveResult | None) -> None:
        """Log a write that has ended, and tell of each save whose checkpoint is whole in the output folder by now."""
        self.log.saved(ended)
        for step in [step for step in self._untold if self.checkpoints.has_arrived(step)]:
            self._event("on_save", self._untold.pop(step))

    def _best(self) -> Folder | None:
        """The checkpoint of the weights to end with, its write ended; None: they are those on the devices."""
        best = self.state.best_model_checkpoint if self.args.load_best_model_at_end else None
        last = lineage.noted(lineage.folder_of(self.folder, self.state.global_step), self.folder)
        if self.stop.any or best is None or best == last:
            return None
        self.log.saved(self.checkpoints.wait())
        return lineage.noted_folder(best, self.folder)

    def _write_out_with(self, best: Folder | None) -> UserError | None:
        """Write out the weights in ``best``, then place them; or the last step's, and the error of unreadable ones."""
        if best is None:
            self._write_out()
            return None
        try:
            source = self.trained.in_checkpoint(best)
            self._write_out(source)
        except UserError as error:
            self._write_out()
            return messages.best_unread(error, self.state, self.folder)
        self.trained.place(source)
        say(self.console, f"the best weights are those of {best}")
        return None

    def _write_out(self, source: Source | None = None) -> None:
        """Write the state and, unless preempted or stopped before anything was learned, the model; then the page."""
        self.lock.check_held()
        self._write_texts()  # once more: the folder may have been emptied under way
        if not (self.stop.preempted or (self.stop.any and not self.state.global_step)):
            self.trained.write(self.folder / "model", source)
        self.log.saved(self.checkpoints.wait(must_arrive=not self.stop.preempted))
        self.watch.finish()

    def _write_texts(self) -> None:
        for name, content in self.job.as_texts().items():
            self.folder.write(name, as_json(content))
        self.folder.write(RUN_FILE, run_file(self.args).encode())
        self._write_state()  # at the start in place of what an earlier life left, which may be of another line

    def _write_state(self) -> None:
        self.folder.write("trainer_state.json", as_json(asdict(self.state)))
