"""From arguments to a finished run, top to bottom: `scripts/train.py` calls it."""

import contextlib
import functools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from shardwright.arguments.run_file import RUN_FILE
from shardwright.arguments.training import TrainingArguments
from shardwright.checkpoint import elastic, output_folder, staging
from shardwright.checkpoint.lineage import live_steps
from shardwright.checkpoint.read import RunCheckpoint, find_checkpoint
from shardwright.checkpoint.rollback import Rollbacks
from shardwright.data.corpus import Corpus, DataOptions, load_corpus
from shardwright.data.from_arguments import asked_tokenizer, check_records, data_options
from shardwright.data.records.record_sources import locate
from shardwright.data.rows.mixture import shapes_of
from shardwright.data.rows.rows import StoredRows, few_rows
from shardwright.data.samples.prompts import read_prompts
from shardwright.data.tokenizer import today
from shardwright.errors import Spiked, TransientError, UserError
from shardwright.evaluation.completions import show_completions
from shardwright.evaluation.teacher import teacher_of
from shardwright.evaluation.teacher_rows import taught
from shardwright.files.folder import Folder
from shardwright.files.hub_names import split
from shardwright.files.lock import FolderLock
from shardwright.hosts.hosts import hosts
from shardwright.hosts.output_streams import lasting_output
from shardwright.hosts.restarts import Restarts, check_limit, note_passing
from shardwright.hosts.versions import other_versions
from shardwright.inputs import RunInputs, TrainerCallbacks
from shardwright.job import Job
from shardwright.layout.auto import AUTO, auto_recipe
from shardwright.layout.plan_warnings import plan_warnings
from shardwright.loop import TrainingLoop
from shardwright.model.lora_options import adapter_said, check_same, described, stored_said
from shardwright.model.meta_model import means_weights
from shardwright.monitoring.callbacks import SupervisorNotes, open_trackers
from shardwright.monitoring.messages import check_steps_left
from shardwright.monitoring.next_commands import MODEL, next_commands, tune_command
from shardwright.monitoring.run_page import LIVES, PAGE
from shardwright.prove import certificate
from shardwright.report.lines import Terminal, say, waiting
from shardwright.report.units import mesh_text
from shardwright.step import auto_remat, compile_guard, train_step
from shardwright.weights import mtp
from shardwright.weights.adapter_weights import check_adapter
from shardwright.weights.hub_read import HubWeights, open_hub_weights, reading, reopen_hub_weights
from shardwright.weights.names import first_names
from shardwright.weights.weight_sources import Source
from shardwright.xla import device_mesh, runtime
from shardwright.xla.stop_requests import unwinding


@dataclass(frozen=True)
class Start:
    """A run checked for all but its data; nothing is written and no device opened."""

    job: Job
    given: RunInputs
    lock: FolderLock
    tokenizer: PreTrainedTokenizerBase | None
    source: Source | None  # the starting weights; None: a random init, or the checkpoint `resume` holds them all
    resume: RunCheckpoint | None
    callbacks: TrainerCallbacks
    console: Console
    restarts: Restarts | None
    date: str  # of the run's first start
    rollbacks: Rollbacks = field(default_factory=Rollbacks)
    teacher: Job | None = None

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """Hold the output folder inside the ``with``: of several hosts the first does, for all."""
        first = {*self.job.as_texts(), RUN_FILE, PAGE, LIVES}
        with runtime.one_thread(), hosts().answerable(), output_folder.claimed_by_all(self.lock, first):
            yield

    def weights_said(self, resume: RunCheckpoint | None) -> str:
        """The weights that the run starts from, in words."""
        args, found = self.job.args, []
        if not _needs_base(self.job, resume):
            pass
        elif self.source is None:
            config = "the recipe's own model" if self.given.config is None else "the config given"
            why = "--from_scratch" if args.from_scratch else args.model or config
            found.append(f"random, of seed {args.seed} ({why})")
        else:
            found.append(f"those of {args.model or f'the {type(self.given.model).__name__} given'}")
        if resume is not None:
            found.append("those of the checkpoint")
        elif args.adapter is not None:
            found.append(adapter_said(args))
        return "; ".join(found)

    @property
    def data(self) -> DataOptions:
        given = self.given
        return data_options(self.job.args, self.job.config, given.train, given.evaluated, given.model, self.date)

    def goes_on_after(self, error: Exception) -> bool:
        """Whether the run, which had begun, goes on after ``error``: its model need not be written out then."""
        if isinstance(error, Spiked) and self.job.args.on_spike == "rollback":
            own, accept = hosts().once(lambda: live_steps(self.lock.folder)), functools.partial(_check_resume, self.job)
            newest = find_checkpoint("latest", self.lock.folder, self.console, accept) if own else self.resume
            return self.rollbacks.prepare(error, newest)
        return self.restarts is not None and self.restarts.follows(error, begun=True)

    def attempts(self, loop: TrainingLoop) -> Iterator[TrainingLoop]:
        """Yield and train ``loop``; then, after each spike that sent the run back to a checkpoint, one that goes on."""
        while True:
            yield loop
            before = self.rollbacks.back
            try:
                loop.train()
                return
            except Spiked:
                if self.rollbacks.back is before:
                    raise
                say(self.console, f"spike:   {self.rollbacks.why}")
                train_step.let_go(loop.trained.model, loop.train_step)
            loop = self.open()

    def open(self) -> TrainingLoop:
        """Open devices, data and weights, and the loop on them."""
        started, console, back = time.perf_counter(), self.console, self.rollbacks.back
        resume = self.rollbacks.resume or self.resume
        if back is None:
            compile_guard.begin_run()
        _say_what_runs(self.job, resume, console)
        say(console, f"weights: {self.weights_said(resume)}")
        hub = self.source if isinstance(self.source, HubWeights) else None
        if hub is not None and hub.said:
            say(console, f"         {hub.said}")
        if hub is not None and resume is not None and (text := hub.changed(resume.host)):
            say(console, f"warning: {text}")
        if hub is not None and (names := hub.untrained):
            say(console, f"         not trained, and carried into an export as it is: {first_names(names)}")
            if stale := mtp.stale(names, self.job.config, adapter=self.job.lora is not None):
                say(console, f"warning: {stale}")
        corpus = hosts().together(lambda: _load_data(self, console))
        corpus = taught(corpus, self.job, self.teacher, console)  # before the student needs the devices' memory
        reading_took = time.perf_counter() - started
        with contextlib.nullcontext() if hub is None else reading(hub, console):
            loop = TrainingLoop(
                self.job,
                corpus,
                source=self.source,
                resume=resume,
                callbacks=self.callbacks,
                console=console,
                lock=self.lock,
                compute_loss=self.given.compute_loss,
                compute_metrics=self.given.compute_metrics,
                goes_on_after=self.goes_on_after,
                after=self.rollbacks.why or (self.restarts.before.why if self.restarts else ""),
            )
        for _ in range(0 if back is None else back.batches):
            next(loop.batches)
        loop.watch.began(earlier=reading_took)
        say(console, f"output:  {self.lock.folder}")
        if line := tune_command(self.job, self.lock.folder, runtime.chip()):
            say(console, f"tune:    {line}")
        return loop


@lasting_output()
def train(
    args: TrainingArguments,
    console: Console | None = None,
    callbacks: TrainerCallbacks = (),
    restarts: Restarts | None = None,
) -> TrainingLoop:
    """Train as ``args`` say. The returned loop's ``stop`` says whether Ctrl-C or SIGTERM ended the run.

    ``restarts`` is what this process's supervisor told it; without one it can't begin anew.

    Raises:
        UserError: anything in the arguments, the recipe, the model or the data that can't be.
    """
    loop, console = None, console or Terminal()
    try:
        noted = [SupervisorNotes()] if restarts is not None else []
        with unwinding():
            start = prepare(args, RunInputs(), [*callbacks, *noted], console, restarts=restarts)
        with start.claimed():
            with unwinding():
                loop = start.open()
            for attempt in start.attempts(loop):
                loop = attempt
            _close(loop, console)
    except TransientError as error:
        if loop is None or not loop.stop.any:
            note_passing(f"{error.asked}: {error.found}")
        raise
    return loop


def _close(loop: TrainingLoop, console: Console) -> None:
    """Show what the model writes, to a person at a terminal, and say what can be done with it."""
    if loop.stop.any:
        return
    args, tokenizer = loop.args, loop.corpus.tokenizer
    writes = not args.entry.scores_texts and args.sample_prompts is None and tokenizer is not None
    if writes and hosts().once(lambda: console.is_terminal):  # compiles two more graphs: on all hosts or none
        show_completions(loop.placed, tokenizer, loop.evaluator.first, console)
    steps = hosts().once(lambda: live_steps(loop.folder))
    commands = next_commands(loop.job, loop.folder, loop.state.global_step, max(steps, default=None), {MODEL})
    for what, line in commands.items():
        say(console, f"{what + ':':<10}{line}")


@runtime.one_thread()
def prepare(
    args: TrainingArguments,
    given: RunInputs,
    callbacks: TrainerCallbacks,
    console: Console,
    *,
    writes: bool = True,
    restarts: Restarts | None = None,
) -> Start:
    """Refuse what can be, cheapest first.

    It opens no device, and writes nothing but checkpoints that an earlier run staged and did not yet copy to the output
    folder. If the run ``writes``, its output folder must be free. Raises UserError.
    """
    args.check_beside(compute_loss_func=given.compute_loss, compute_metrics=given.compute_metrics)
    check_limit(args.max_restarts, restarts)
    trackers = open_trackers(args.report_to, console)
    job = Job.resolve(args, runtime.device_count, recipe=given.recipe, config=given.config)
    console.quiet = console.quiet or not hosts().first
    if hosts().first:
        callbacks = [*callbacks, *trackers]
    with hosts().answerable():
        if hosts().several:
            hosts().check_same(job.fingerprint())
        chip = known.name if (known := runtime.chip()) else ""
        if line := hosts().once(lambda: auto_remat.untaken(job, chip)):
            say(console, f"remat:   {line}")
        if auto_remat.is_auto(job):
            policy, why, kept = hosts().once(lambda: auto_remat.answer(job, chip))
            say(console, f"remat:   {policy} ({why})")
            for value in kept:
                say(console, f"         kept: {value} a chip")
            job = auto_remat.with_remat(job, policy)
        asked = args.model
        return hosts().together(lambda: _prepared(job, given, callbacks, console, writes, restarts, asked))


def _prepared(
    job: Job,
    given: RunInputs,
    callbacks: TrainerCallbacks,
    console: Console,
    writes: bool,
    restarts: Restarts | None,
    asked: str | None,
) -> Start:
    """The checks once the number of devices is known; every host of the job makes them. ``asked``: --model."""
    device_mesh.check_mesh(job.recipe.mesh)
    job = _for_samples(job, given)
    check_adapter(job)
    if job.args.sample_prompts is not None:
        read_prompts(job.args.sample_prompts)
    output = hosts().once(lambda: str(output_folder.find_output(job.args, job.recipe.name, writes=writes)))
    job = replace(job, args=replace(job.args, output_dir=output))
    args = job.args
    tokenizer = asked_tokenizer(args, job.config, given.tokenizer)
    teacher = teacher_of(job, tokenizer)
    lock = FolderLock(output_folder.output_folder(args), console)
    if writes:
        hosts().once(lock.check_free)
        if args.staging_dir is not None:  # what an earlier run left staged on its hosts
            staged = staging.open_staging(args.staging_dir, Folder(output))
            staged.check(hosts())
            if output_folder.resumes_in(args.resume_from_checkpoint, Folder(output)):
                staging.recover(staged, Folder(output), functools.partial(output_folder.claimed_by_all, lock), console)
    accept = functools.partial(_check_resume, job)
    resume = find_checkpoint(args.resume_from_checkpoint, lock.folder, console, accept)
    if resume is not None:
        job = elastic.with_kept_batch(job, resume)
        kept = _at_its_commit(job, resume, asked)
        if kept is not job:
            say(console, f"model:   {kept.args.model}, as the checkpoint's run; {asked} is {job.args.model} by now")
            job, args = kept, kept.args
            tokenizer = asked_tokenizer(args, job.config, given.tokenizer)
    source = given.weights(job.facts.whole) if _needs_base(job, resume) else None
    given.check_code(job.facts.whole)
    if _needs_base(job, resume) and means_weights(args.model, args.from_scratch):
        source = open_hub_weights(
            str(args.model), job.facts.whole, console, args.seed, job.rows_needed, job.packed_as_published
        )
    elif args.model and resume is not None and (resume.host.get("untrained") or resume.host.get("says_how")):
        source = reopen_hub_weights(args.model, job.facts.whole, console, args.seed)
    date = date_of(resume)
    return Start(job, given, lock, tokenizer, source, resume, callbacks, console, restarts, date, teacher=teacher)


def date_of(resume: RunCheckpoint | None) -> str:
    """The day of the run's first start, the same on every host, in ISO's form."""
    kept = None if resume is None else resume.host["data"].get("date")
    return str(kept or hosts().once(today))


def _at_its_commit(job: Job, resume: RunCheckpoint, asked: str | None) -> Job:
    """``job`` at the commit of the hub's repository that ``resume`` was trained from, unless another was ``asked``."""
    saved = resume.arguments.get("model")
    if asked and saved and split(asked) == (split(saved)[0], None) and job.args.model not in (saved, asked):
        return replace(job, args=replace(job.args, model=saved)) if split(saved)[1] else job
    return job


def _needs_base(job: Job, resume: RunCheckpoint | None) -> bool:
    """Whether a run reads weights beside a checkpoint's: it has none, or only an adapter's or a part of the model's."""
    return resume is None or job.facts.is_part or job.lora is not None


def _for_samples(job: Job, given: RunInputs) -> Job:
    """``job``, with samples isolated where they share a row; UserError if the model can't. Only columns are read."""
    args = job.args
    for evaluated in (given.evaluated or args.eval_sets).values():
        locate(evaluated, "eval_dataset")
    dataset = args.dataset if given.train is None else given.train
    shapes = shapes_of(dataset, args.reads)
    check_records(args, shapes)
    return job.for_records(shapes)


def _check_resume(job: Job, found: RunCheckpoint) -> None:
    if (trained := found.arguments.get("train_mtp", False)) is not job.args.train_mtp:
        raise UserError(
            asked=f"to go on from {found.folder} with{'' if job.args.train_mtp else 'out'} --train_mtp",
            found=f"a checkpoint with{'' if trained else 'out'} MTP layers",
            why="the run's model, its optimizer and its loss would be others than those that were saved",
            instead=f"the run's own option: --train_mtp {str(trained).lower()}",
        )
    found.check_model(job.adapted, job.config)
    found.check_optimizer(job.args.optim)
    if job.lora is not None:
        check_same(found.folder, job.lora, job.model)
    check_steps_left(job.args, found)
    elastic.kept_batch(job, found)


def _load_data(start: Start, console: Console) -> Corpus:
    args = start.job.args
    with waiting(console, "reading and tokenising the data …"):
        corpus = load_corpus(start.data, start.tokenizer, start.job.config.get_text_config().vocab_size)
    tokens = "a stream" if corpus.train.tokens is None else f"{corpus.train.tokens:,} tokens"
    sets = corpus.heldout_sets.values()
    held, evaluated = sum(map(len, sets)), sum(len(rows.spread(args.max_eval_rows)) for rows in sets)
    part = f"{evaluated:,} of them evaluated" if evaluated < held else "all evaluated"
    say(console, f"data:    {tokens} to train on; {held:,} rows held out, {part}")
    for line in corpus.notes:
        say(console, f"         {line}")
    if isinstance(corpus.train, StoredRows) and len(corpus.train) < start.job.rows:
        say(console, f"         {few_rows(len(corpus.train), start.job.rows)}")
    if len(lengths := start.job.row_lengths) > 1:
        say(console, f"         batches of rows of {', '.join(map(str, lengths))} tokens, each length compiled once")
    return corpus


def _say_what_runs(job: Job, resume: RunCheckpoint | None, console: Console) -> None:
    say(console, f"devices: {runtime.init_runtime()}")
    say(console, f"mesh:    {mesh_text(job.plan.mesh)}")
    for text in filter(None, (job.copies, *plan_warnings(job.plan))):
        say(console, f"         {text}")
    say(console, f"model:   {type(job.model).__name__}, {job.facts.parameters:,} parameters")
    if job.lora is not None:
        stored = stored_said(job.facts, job.plan, job.args)
        say(console, f"adapter: {described(job.lora, job.adapted)}; the model is frozen, {stored}")
    if code := getattr(job.config, "auto_map", None):
        own = code.get("AutoModelForCausalLM", code.get("AutoModel")) if isinstance(code, dict) else code
        say(console, f"         transformers' own class; the code that its repository brings ({own}) is not run")
    for text in job.notices:
        say(console, f"         {text}")
    if (proof := certificate.said_of(job)) is not None:
        say(console, f"proof:   {proof}")
    if job.args.recipe == AUTO:
        made = auto_recipe(job.model, job.facts.experts, job.args.mesh, job.devices)
        for pattern, text in made.undivided.items():
            say(console, f"recipe:  {pattern}: {text}")
    if resume is None:
        return
    say(console, f"resume:  {resume.folder}")
    left_out = ["max_steps"] if job.args.max_steps < 1 else []  # before the data are read
    if (kept := elastic.said(job, resume)) is not None:
        say(console, f"batch:   {kept}")
        left_out += elastic.OPTIONS
    options = {name: value for name, value in job.args.as_dict().items() if name not in left_out}
    for other in [*other_versions(resume.host.get("versions")), *resume.other_options(options)]:
        say(console, f"         other than in the checkpoint: {other}")
