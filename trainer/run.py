"""From arguments to a finished run: what `scripts/train.py` calls. What can be refused is refused first."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch_xla.runtime as xr
from rich.console import Console
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from trainer.arguments import TrainingArguments
from trainer.checkpoint.read import RunCheckpoint, find_checkpoint, whole_steps
from trainer.data.corpus import load_corpus
from trainer.data.row_stream import RowStream
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

    def accept(found: RunCheckpoint) -> None:
        found.check_model(plan)
        _check_steps_left(found, args)

    resume = find_checkpoint(args.resume_from_checkpoint, folder, console, accept)
    if resume is not None:
        _say_where_it_goes_on(resume, folder, args, console)
    given = args.model if args.model and _has_weights(args.model) and resume is None else None
    source = hub_read.open_hub_weights(given, model) if given else None
    with console.status("reading and tokenising the data …"):
        corpus = load_corpus(
            args.dataset,
            tokenizer=_tokenizer(args),
            sequence_length=args.sequence_length,
            vocab_size=config.get_text_config().vocab_size,
            isolate_documents=args.isolate_documents,
            text_column=args.text_column,
            seed=args.seed,
            streaming=args.streaming,
            shuffle_rows=args.shuffle_rows,
        )
    train = corpus.train
    tokens = "a stream" if isinstance(train, RowStream) else f"{len(train) * args.sequence_length:,} tokens"
    console.print(
        f"data:    {tokens} to train on, {len(corpus.heldout) * args.sequence_length:,} held out", highlight=False
    )
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


def _check_steps_left(resume: RunCheckpoint, args: TrainingArguments) -> None:
    """Raises UserError if the checkpoint lies beyond the run's last step."""
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
    if name is None:
        return None
    try:
        return AutoTokenizer.from_pretrained(name)
    except Exception as error:  # of many kinds; each means that this name gave no tokenizer
        raise UserError(
            asked=f"the tokenizer of {name}",
            found=f"{type(error).__name__}: {error}",
            why="text must be turned into the model's tokens",
            instead="--tokenizer with a hub id or a folder that holds tokenizer.json",
        ) from error
