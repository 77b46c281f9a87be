"""transformers' and trl's constructor arguments as those of a run: what they mean here, or a refusal."""

import functools
import inspect
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pyarrow.compute as pc
import torch
from datasets import Dataset, IterableDataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from shardwright.arguments.training import TrainingArguments
from shardwright.errors import a_type
from shardwright.upstream.absent_names import KEYWORDS
from shardwright.upstream.caller_optimizers import optimizer_options, refused


def translated(args: TrainingArguments, asked: Mapping[str, Any]) -> tuple[TrainingArguments, dict[str, Any]]:
    """``args`` and the arguments ``asked`` with theirs resolved into ours, which `shardwright.inputs.resolve` takes.

    Raises UserError for what has no meaning here.
    """
    given = {name: value for name, value in asked.items() if value is not None}
    options: dict[str, Any] = {}
    late: dict[str, Any] = {}  # what needs an adapter, which makes options of its own
    if given.pop("preprocess_logits_for_metrics", None) is not None:
        why = "no logits leave the devices"
        raise refused("preprocess_logits_for_metrics", "a function", why, KEYWORDS["preprocess_logits_for_metrics"])
    _alias(given, "tokenizer", "processing_class")
    if (make := given.pop("model_init", None)) is not None:
        if "model" in given:
            raise refused("model_init", "model= too", "a run starts from one model", "one of the two")
        given["model"] = _called(make, args.seed)
    if (quantization := given.pop("quantization_config", None)) is not None:
        late["base_dtype"] = _base_dtype(quantization)
    if (format_one := given.pop("formatting_func", None)) is not None:
        tokenizer = given.get("processing_class")
        end = tokenizer.eos_token if isinstance(tokenizer, PreTrainedTokenizerBase) else None
        for name in ("train_dataset", "eval_dataset"):
            if name in given:
                given[name] = formatted(name, given[name], format_one, end)
        if args.split_special_tokens is None:  # the function writes a template's tokens by their names
            options["split_special_tokens"] = False
    pair, kind = given.pop("optimizers", None), given.pop("optimizer_cls_and_kwargs", None)
    held = given["model"] if isinstance(given.get("model"), PreTrainedModel) else None
    options |= optimizer_options(pair, kind, args, held)
    # the hub id or folder that the model was loaded from, whose tokenizer trl takes too
    named = held is not None and held.config.name_or_path
    if named and "processing_class" not in given and args.tokenizer is None:
        options["tokenizer"] = named
    return replace(args, **options) if options else args, {**given, "options": late}


def with_longest(args: TrainingArguments, train: Dataset | IterableDataset | None) -> TrainingArguments:
    """``args`` with a row for each record of tokens, as long as the longest, as transformers pads; up to eights.

    Raises UserError for a stream of tokens, whose longest record is not known.
    """
    if train is None or "input_ids" not in (train.column_names or ()):
        return args
    if isinstance(train, IterableDataset):
        raise refused(
            "args",
            "transformers' TrainingArguments with a stream of tokens",
            "rows have one length, which they do not say and a stream does not show",
            "shardwright.TrainingArguments(sequence_length=…)",
        )
    parts = train.with_format("arrow").iter(10_000)
    longest = max((pc.max(pc.list_value_length(part["input_ids"])).as_py() or 0 for part in parts), default=0)
    return replace(args, sequence_length=max(8, math.ceil(longest / 8) * 8), packing=False)


def check_unused(**given: Any) -> None:
    """Refuse arguments of transformers' methods that would have no effect."""
    for name, value in given.items():
        if value is not None:
            raise refused(
                name,
                f"{value!r:.80}",
                "a model's outputs are not gathered, and no search is made",
                f"no {name}; metric_key_prefix=, where that is meant" if name == "ignore_keys" else f"no {name}",
            )


def _alias(given: dict[str, Any], name: str, ours: str) -> None:
    if (value := given.pop(name, None)) is not None:
        if ours in given and given[ours] is not value:
            raise refused(name, f"{ours}= too", "they are two names of one thing", f"{ours}= alone")
        given[ours] = value


def _called(make: Any, seed: int) -> Any:
    """The model of ``model_init``, called as transformers calls it, with its random numbers from the run's seed."""
    if not callable(make) or isinstance(make, torch.nn.Module):  # a module's call is its forward
        instead = "a function that returns a model, or model="
        raise refused("model_init", a_type(make), "it is called for a model", instead)
    torch.manual_seed(seed)
    return make(None) if inspect.signature(make).parameters else make()


def _base_dtype(quantization: Any) -> str:
    """The --base_dtype of transformers' ``BitsAndBytesConfig``: NF4; its scales are kept whole, quantized or not."""
    if getattr(quantization, "load_in_4bit", False) and quantization.bnb_4bit_quant_type == "nf4":
        return "nf4"
    raise refused(
        "quantization_config",
        f"{a_type(quantization)} that asks for something else than NF4",
        "the frozen model under an adapter is packed while it is read",
        "TrainingArguments(base_dtype=…) with int8, fp8, fp8_rows, int4, int4_zeros, mxfp4, nf4 or nvfp4; "
        "BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4') is taken too",
    )


def formatted(name: str, records: Any, format_one: Any, end: str | None) -> Any:
    """``records``, one set or named ones, as the texts that ``format_one`` makes of each, without ``end`` behind them.

    Raises UserError, here or when a stream is read, if it makes no text of a record.
    """
    if isinstance(records, Mapping):
        return {key: formatted(name, each, format_one, end) for key, each in records.items()}
    if not isinstance(records, Dataset | IterableDataset):
        found, why = f"{name}={records}", "it is called with records that Python holds"
        raise refused("formatting_func", found, why, f"datasets.load_dataset(…) as {name}")
    make = functools.partial(_text, format_one, end)
    made = records.map(make, remove_columns=list(records.column_names or ()))
    return made.select_columns(["text"])


def _text(format_one: Any, end: str | None, record: Any) -> dict[str, str]:
    try:
        text = format_one(record)
    except Exception as error:  # a caller's function may raise anything
        found, why = f"{type(error).__name__}: {str(error)[:300]}", "it was called with one record"
        raise refused("formatting_func", found, why, "a function of one record that returns its text") from error
    if not isinstance(text, str):
        why = "it is called with one record at a time, as trl's is"
        found = f"it returned {a_type(text)}"
        raise refused("formatting_func", found, why, "a function of one record that returns its text, one string")
    return {"text": text if end is None else text.removesuffix(end)}  # each text ends with that token
