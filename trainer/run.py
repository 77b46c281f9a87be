"""From arguments to a finished run, top to bottom: what `scripts/train.py` calls."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import GenerationConfig, PreTrainedTokenizerBase, TrainerCallback

from trainer.arguments import TrainingArguments
from trainer.checkpoint.read import RunCheckpoint, find_checkpoint
from trainer.data.corpus import Corpus, DataOptions, load_corpus
from trainer.data.fitting import SampleOptions
from trainer.data.records import find_shape
from trainer.data.sources import locate
from trainer.data.tokenizer import check_tokenizer, open_tokenizer
from trainer.errors import UserError
from trainer.job import Job
from trainer.layout.auto import AUTO, auto_recipe
from trainer.lock import FolderLock
from trainer.loop import TrainingLoop
from trainer.lora import check_same, described
from trainer.model import experts_modules
from trainer.output import claim, find_output
from trainer.report.lines import say, waiting
from trainer.streams import lasting_output
from trainer.trackers import open_trackers
from trainer.weights.adapters import check_adapter
from trainer.weights.hub_read import HubWeights, open_hub_weights, reading
from trainer.weights.sources import has_weights
from trainer.xla.mesh import check_mesh
from trainer.xla.runtime import device_count, init_runtime


@lasting_output()
def train(
    args: TrainingArguments, console: Console | None = None, callbacks: Sequence[TrainerCallback] = ()
) -> TrainingLoop:
    """Train as ``args`` say. The returned loop's ``stop`` says whether Ctrl-C or SIGTERM ended the run.

    Raises:
        UserError: anything in the arguments, the recipe, the model or the data that can't be.
    """
    console = console or Console()

    # ---- what can be refused, cheapest first; until here nothing is written and no device is opened ----
    callbacks = [*callbacks, *open_trackers(args.report_to, console)]
    job = Job.resolve(args, device_count)
    check_mesh(job.recipe.mesh)
    job = _for_samples(job)
    check_adapter(job)
    output = find_output(args, job.recipe.name)
    tokenizer = _tokenizer(job)
    lock = FolderLock(output, console)
    lock.check_free()
    accept = functools.partial(_check_resume, job)
    resume = find_checkpoint(args.resume_from_checkpoint, output, console, accept)
    # a checkpoint of an adapter, or of a part, holds no more than that
    needed = resume is None or job.is_part or job.lora is not None
    given = args.model if args.model and has_weights(args.model) and needed else None
    source = open_hub_weights(given, job.whole) if given else None
    with claim(lock):
        return _run(job, lock, tokenizer, source, resume, callbacks, console)


def _run(
    job: Job,
    lock: FolderLock,
    tokenizer: PreTrainedTokenizerBase | None,
    source: HubWeights | None,
    resume: RunCheckpoint | None,
    callbacks: Sequence[TrainerCallback],
    console: Console,
) -> TrainingLoop:
    # ---- devices, data, weights ----
    started = time.perf_counter()
    _say_what_runs(job, console)
    if resume is not None:
        _say_where_it_goes_on(resume, job.args, console)
    corpus = _load_data(job, tokenizer, console)
    reading_took = time.perf_counter() - started
    with reading(source, console) if source else contextlib.nullcontext():
        loop = TrainingLoop(job, corpus, source=source, resume=resume, callbacks=callbacks, console=console, lock=lock)
    loop.watch.began(earlier=reading_took)
    say(console, f"output:  {lock.folder}")
    loop.train()
    return loop


def _for_samples(job: Job) -> Job:
    """``job``, whose rows keep samples apart if the dataset's records become samples: refused if the model can't.

    Of the dataset no more is read than shows its columns.
    """
    args = job.args
    if args.eval_dataset is not None:
        locate(args.eval_dataset)
    if find_shape(args.dataset, args.text_column, args.is_preference).is_text or args.isolate_documents:
        return job
    args.isolate_documents = True
    return replace(job, args=args)


def _stops(job: Job) -> frozenset[int]:
    """The tokens that end a generation, as the model's config and its generation config name them."""
    named: list[Any] = [job.config, job.config.get_text_config()]
    if job.args.model is not None:
        with contextlib.suppress(OSError):  # it need not have one
            named.append(GenerationConfig.from_pretrained(job.args.model))
    ids = (getattr(config, "eos_token_id", None) for config in named)
    return frozenset(i for each in ids for i in (each if isinstance(each, list) else [each]) if isinstance(i, int))


def _tokenizer(job: Job) -> PreTrainedTokenizerBase | None:
    """The tokenizer asked for, else the one that lies with the weights; None: one is trained on the data."""
    name, args, vocabulary = job.args.tokenizer, job.args, job.config.get_text_config().vocab_size
    if name is None and args.model is not None:
        local = Path(args.model)
        if not os.path.exists(local) or (local.is_dir() and any(local.glob("tokenizer*"))):
            name = args.model
    tokenizer = None if name is None else open_tokenizer(name)
    check_tokenizer(tokenizer, vocabulary)
    return tokenizer


def _check_resume(job: Job, found: RunCheckpoint) -> None:
    """Raise UserError unless the job can go on from ``found``."""
    found.check_model(job.adapted, job.config)
    if job.lora is not None:
        check_same(found.folder, job.lora, job.model)
    if found.step > job.args.max_steps:
        raise UserError(
            asked=f"--max_steps {job.args.max_steps} from {found.folder}",
            found=f"it is of step {found.step}",
            why="there is nothing left to do",
            instead=f"--max_steps above {found.step}, or an older checkpoint",
        )


def _load_data(job: Job, tokenizer: PreTrainedTokenizerBase | None, console: Console) -> Corpus:
    args = job.args
    options = DataOptions(
        dataset=args.dataset,
        text_column=args.text_column,
        sequence_length=args.sequence_length,
        isolate_documents=args.isolate_documents,
        streaming=args.streaming,
        shuffle_rows=args.shuffle_rows,
        eval_dataset=args.eval_dataset,
        max_samples=args.max_samples,
        samples=SampleOptions(
            args.train_on_prompt,
            args.overflow,
            on_bad_row=args.on_bad_row,
            stops=_stops(job),
            pairs=args.most_pairs(args.sequence_length),
        ),
    )
    with waiting(console, "reading and tokenising the data …"):
        corpus = load_corpus(options, tokenizer, job.config.get_text_config().vocab_size)
    tokens = "a stream" if corpus.train.tokens is None else f"{corpus.train.tokens:,} tokens"
    held, evaluated = len(corpus.heldout), len(corpus.heldout.spread(args.max_eval_rows))
    part = f"{evaluated:,} of them evaluated" if evaluated < held else "all evaluated"
    say(console, f"data:    {tokens} to train on; {held:,} rows held out, {part}")
    for line in corpus.notes:
        say(console, f"         {line}")
    return corpus


def _say_what_runs(job: Job, console: Console) -> None:
    say(console, f"devices: {init_runtime()}")
    say(console, f"mesh:    {' × '.join(f'{axis}={size}' for axis, size in job.plan.mesh.items())}")
    say(console, f"model:   {type(job.model).__name__}, {job.parameters:,} parameters")
    if job.lora is not None:
        say(console, f"adapter: {described(job.lora, job.adapted)}; the model is frozen, in {job.args.base_dtype}")
    if job.notice:
        say(console, f"         {job.notice}")
    if job.args.recipe == AUTO:
        made = auto_recipe(job.model, experts_modules(job.model), job.args.mesh, job.devices)
        for pattern, text in made.undivided.items():
            say(console, f"recipe:  {pattern}: {text}")


def _say_where_it_goes_on(resume: RunCheckpoint, args: TrainingArguments, console: Console) -> None:
    say(console, f"resume:  {resume.folder}")
    for other in resume.other_options(args.as_dict()):
        say(console, f"         other than in the checkpoint: {other}")
