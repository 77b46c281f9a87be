"""A run's options → its tokenizer, the tokens that end a generation, and :class:`DataOptions`."""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, IterableDataset
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from shardwright.arguments.training import TrainingArguments
from shardwright.data.chat_template import with_chat_template
from shardwright.data.corpus import DataOptions
from shardwright.data.samples.samples import SampleOptions
from shardwright.data.tokenizer import check_tokenizer, open_tokenizer
from shardwright.errors import UserError
from shardwright.files.hub_names import holds_tokenizer, split
from shardwright.model.meta_model import means_weights, model_path
from shardwright.objectives.distill import IDS, LOGPS
from shardwright.objectives.objective import RecordShape


def asked_tokenizer(
    args: TrainingArguments, config: PretrainedConfig, given: PreTrainedTokenizerBase | None = None
) -> PreTrainedTokenizerBase | None:
    """The tokenizer given or named, else the model's own; None: one is to be trained on the data.

    Weights know the tokens of their own tokenizer alone, so a run that starts from some has it. With
    ``args.chat_template`` it has that one.

    Raises UserError if there is none of that name, or a model of ``config`` can't be trained with it.
    """
    name = args.tokenizer
    if name is None and args.model is not None:
        own = means_weights(args.model, args.from_scratch) or holds_tokenizer(Path(model_path(args.model)))
        name = args.model if own else None
    tokenizer = open_tokenizer(name) if given is None and name is not None else given
    check_tokenizer(tokenizer, config.get_text_config().vocab_size)
    if tokenizer is None or args.chat_template is None:
        return tokenizer
    return with_chat_template(tokenizer, args.chat_template)


def stop_tokens(
    args: TrainingArguments, config: PretrainedConfig, model: PreTrainedModel | None = None
) -> frozenset[int]:
    """The tokens that end a generation, as the model's config and its generation config name them."""
    named: list[Any] = [config, config.get_text_config()]
    if model is not None:
        named.append(model.generation_config)
    if args.model is not None and Path(args.model).suffix != ".json":  # a config alone has no other files
        repository, revision = split(model_path(args.model))
        with contextlib.suppress(OSError):  # it need not have one
            named.append(GenerationConfig.from_pretrained(repository, revision=revision or "main"))
    ids = (getattr(each, "eos_token_id", None) for each in named)
    return frozenset(i for each in ids for i in (each if isinstance(each, list) else [each]) if isinstance(i, int))


def data_options(
    args: TrainingArguments,
    config: PretrainedConfig,
    train: Dataset | IterableDataset | None = None,
    evaluated: Mapping[str, str | Dataset | IterableDataset] | None = None,
    model: PreTrainedModel | None = None,
    date: str | None = None,
) -> DataOptions:
    """The data options of a run of ``args``.

    Args:
        train: replaces ``args.dataset``.
        evaluated: replaces ``args.eval_dataset``.
        model: its generation config may name stop tokens too.
        date: the day that chat templates take for today's.
    """
    stops = stop_tokens(args, config, model)
    return DataOptions(
        dataset=args.dataset if train is None else train,
        reads=args.reads,
        sequence_length=args.sequence_length,
        isolate_documents=args.isolate_documents,
        streaming=args.streaming,
        shuffle_rows=args.shuffle_rows,
        eval_dataset=evaluated or args.eval_sets,
        max_samples=args.max_samples,
        date=date,
        chat_template=args.chat_template,
        samples=SampleOptions(
            args.train_on_prompt,
            args.overflow,
            args.packing,
            on_bad_row=args.on_bad_row,
            stops=stops,
            split_special_tokens=args.split_special_tokens,
            groups=args.goal.groups,
            segments=args.goal.segments,
            taught=int(args.goal.numbers["teacher_top_k"]) if args.entry.teacher and args.teacher is None else None,
            vocabulary=config.get_text_config().vocab_size,
            train_on=args.train_on,
        ),
    )


def check_records(args: TrainingArguments, shapes: Sequence[RecordShape]) -> None:
    """Refuse records of ``shapes`` beside which the values that the objective needs can't be kept, or are kept already.

    Raises UserError.
    """
    if len(shapes) > 1 and (args.entry.reference or args.teacher is not None):
        raise not_one_dataset(args)
    wrong = [shape for shape in shapes if (IDS in shape.required) is (args.teacher is not None)]
    if args.entry.teacher is None or not wrong:
        return
    given = args.teacher is not None
    raise UserError(
        asked=f"--objective {args.objective}" + (f" --teacher {args.teacher}" if given else " without --teacher"),
        found=f"records with {', '.join(wrong[0].required)}",
        why="they hold what a teacher said already" if given else "they hold nothing that a teacher said",
        instead=f"no --teacher, or records without {IDS} and {LOGPS}"
        if given
        else f"--teacher with a hub id or a folder, or records with {IDS} and {LOGPS} too",
    )


def not_one_dataset(args: TrainingArguments) -> UserError:
    weights, other = "a teacher's", ""
    if not args.entry.teacher:
        weights, other = "the starting", "; or --objective orpo or simpo, which compare with nothing"
    return UserError(
        asked=f"--objective {args.objective}, which compares with {weights} weights",
        found="a mixture of datasets, or a stream",
        why="what they say of each row is computed before the first step, and kept beside the rows of one dataset",
        instead=f"a single dataset, without --streaming{other}",
    )
