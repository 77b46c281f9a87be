"""From arguments to a finished run: what `scripts/train.py` calls. What can be refused is refused first."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch_xla.runtime as xr
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from trainer.arguments import TrainingArguments
from trainer.checkpoint.read import RunCheckpoint, find_checkpoint, whole_steps
from trainer.data.corpus import DataOptions, load_corpus
from trainer.data.tokenizer import open_tokenizer
from trainer.errors import UserError
from trainer.job import effective_recipe
from trainer.layout.plan import check_global_batch, make_plan
from trainer.model import load_config, meta_model
from trainer.storage import Folder
from trainer.trainer import Trainer
from trainer.weights import hub_read
from trainer.xla.runtime import init_runtime


def run(args: TrainingArguments, console: Console | None = None) -> Trainer:
    """Train as ``args`` say; the returned trainer's ``stop`` says whether Ctrl-C or SIGTERM ended the run.

    Raises:
        UserError: anything in the arguments, the recipe, the model or the data that can't be.
    """
    console = console or Console()
    recipe = effective_recipe(args)
    config = load_config(args.model, recipe)
    model = meta_model(config)
    console.print(f"devices: {init_runtime()}")
    plan = make_plan(recipe, model, xr.global_runtime_device_count())
    check_global_batch(plan, args.per_device_train_batch_size * plan.batch_shards)
    console.print(f"mesh:    {' × '.join(f'{axis}={size}' for axis, size in plan.mesh.items())}", highlight=False)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    console.print(f"model:   {type(model).__name__}, {parameters:,} parameters", highlight=False)
    folder = args.claim_output_dir(recipe.name)
    resume = find_checkpoint(args.resume_from_checkpoint, folder, console)
    if resume is not None:
        resume.check_model(plan)
        _say_where_it_goes_on(resume, folder, args, console)
    given = args.model if args.model and _has_weights(args.model) and resume is None else None
    source = hub_read.open_checkpoint(given, model) if given else None
    options = DataOptions(
        dataset=args.dataset,
        sequence_length=args.sequence_length,
        text_column=args.text_column,
        isolate_documents=args.isolate_documents,
        streaming=args.streaming,
        shuffle_rows=args.shuffle_rows,
    )
    with console.status("reading and tokenising the data …"):
        corpus = load_corpus(options, _tokenizer(args), config.get_text_config().vocab_size)
    tokens = "a stream" if corpus.train.tokens is None else f"{corpus.train.tokens:,} tokens"
    console.print(f"data:    {tokens} to train on, {corpus.heldout.tokens:,} held out", highlight=False)
    with hub_read.reading(source, console) if source else contextlib.nullcontext():
        trainer = Trainer(recipe, args, config, corpus, source=source, resume=resume, console=console)
    console.print(f"output:  {folder}", highlight=False)
    trainer.train()
    return trainer


def _say_where_it_goes_on(resume: RunCheckpoint, folder: Folder, args: TrainingArguments, console: Console) -> None:
    console.print(f"resume:  {resume.folder}", highlight=False, soft_wrap=True)
    for other in resume.other_options(args.as_dict()):
        console.print(f"         other than in the checkpoint: {other}", highlight=False, soft_wrap=True)
    if newer := [step for step in whole_steps(folder) if step > resume.step]:
        console.print(
            f"         {folder} has newer checkpoints, of steps {', '.join(map(str, newer))}: each is replaced when "
            "this run comes to its step, and until then is what `latest` finds",
            highlight=False,
            soft_wrap=True,
        )
    if resume.step > args.max_steps:
        raise UserError(
            asked=f"--max_steps {args.max_steps} from {resume.folder}",
            found=f"it is of step {resume.step}",
            why="there is nothing left to do",
            instead=f"--max_steps above {resume.step}, or an older checkpoint",
        )


def _has_weights(model: str) -> bool:
    """A hub id always has; a local folder has if weight files lie in it; a config file has not."""
    path = Path(model)
    if not path.exists():
        return True
    return path.is_dir() and any(file.suffix in {".safetensors", ".bin"} for file in path.iterdir())


def _tokenizer(args: TrainingArguments) -> PreTrainedTokenizerBase | None:
    """The tokenizer asked for, else the one that lies with the weights; None: one is trained on the data."""
    name = args.tokenizer
    if name is None and args.model is not None:
        local = Path(args.model)
        if not local.exists() or (local.is_dir() and any(local.glob("tokenizer*"))):
            name = args.model
    return None if name is None else open_tokenizer(name)
