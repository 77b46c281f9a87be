"""Mistakes in what a run reads: files and datasets, tokenizers, the order of rows."""

from __future__ import annotations

import functools
import gzip
import itertools
import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas
from datasets import Dataset, Image
from transformers import DataCollatorForLanguageModeling

from shardwright.arguments.training import TrainingArguments
from shardwright.data.corpus import Corpus, load_corpus
from shardwright.data.from_arguments import data_options
from shardwright.data.records.record_sources import pick_splits
from shardwright.data.rows.batches import TrainingBatches
from shardwright.data.rows.row_stream import StreamPosition
from shardwright.data.rows.rows import StoredRows
from shardwright.data.tokenizer import check_tokenizer, open_tokenizer
from tests.support.chats import CHAT, CHATML, byte_tokenizer
from tests.support.jobs import SIZES, job_of
from tests.support.mistakes.objects import Mistakes, padding, trainer


def options_of(**options: Any) -> TrainingArguments:
    return TrainingArguments(**{"recipe": "llama_fsdp", "model": "llama.json", **options})


def read(tokenizer: Any = True, more: Any = None, **options: Any) -> Corpus:
    """The data of a run with these options; ``more``: what else DataOptions say."""
    args = options_of(**{"sequence_length": 512, "max_steps": 4, "isolate_documents": True, **options})
    made = byte_tokenizer(CHATML) if tokenizer is True else tokenizer
    return load_corpus(replace(data_options(args, facts().config), **(more or {})), made, SIZES["vocab_size"])


@functools.cache
def facts() -> Any:
    return job_of("llama_fsdp", devices=8).facts


def packed() -> str:
    """A packed file, and the folder with it."""
    os.makedirs("packed", exist_ok=True)
    with gzip.open("packed/chats.jsonl.gz", "wb") as file:
        file.write(Path("few.jsonl").read_bytes())
    return "packed/chats.jsonl.gz"


def as_said(command: str, path: str) -> None:
    """Runs a command that a message gives, and reads what it leaves."""
    subprocess.run(command.split(), check=True, stdin=subprocess.DEVNULL)
    read(dataset=path)


def file(name: str, text: str) -> str:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(text)
    return name


def batches(rows: int = 2, processes: int = 1, seed: int = 1, count: int = 12) -> TrainingBatches:
    ids = np.arange(count * 8).reshape(count, 8).tolist()
    return TrainingBatches(StoredRows(Dataset.from_dict({"input_ids": ids})), rows, seed, 0, processes)


def as_csv(table: str) -> None:
    pandas.read_csv(table, sep="\t").to_csv("table.csv")
    read(dataset="table.csv")


def with_commas() -> None:
    pandas.read_csv("semicolons.csv", sep=";").to_csv("semicolons.csv", index=False)
    read(dataset="semicolons.csv")


def list_alone() -> None:
    records = json.loads(Path("under.json").read_text())["data"]
    read(dataset=file("alone.json", json.dumps(records)))


def pictures() -> Dataset:
    records = Dataset.from_dict({"messages": [CHAT] * 99, "image": ["a.png"] * 99})
    return records.cast_column("image", Image())


def collated(collator: Any) -> None:
    trainer(train_dataset=Dataset.from_list([{"input_ids": [1, 2, 3]}] * 9), data_collator=collator)


def for_language_models() -> Any:
    return DataCollatorForLanguageModeling(padding(), mlm=False)


def endless(end: str | None = None) -> Any:
    """A tokenizer whose end of a text is ``end``."""
    made = byte_tokenizer(CHATML)
    made.eos_token = end
    return made


def streamed(batch: int) -> None:
    """Some windows of a short stream, of which a batch is made."""
    rows: Any = read(dataset="few.jsonl", eval_dataset="few.jsonl", streaming=True).train
    _ = [*itertools.islice(rows.windows(0, 0, 0, StreamPosition(), batch), 3)]


MISTAKES: Mistakes = {
    "a corpus of other rows": (
        lambda: read(dataset="few.jsonl").check_fits(640, 304),
        "a corpus with rows of 512",
        {
            "sequence_length=512 in the job's arguments": lambda: read(dataset="few.jsonl").check_fits(512, 304),
            "DataOptions(sequence_length=640)": lambda: read(dataset="few.jsonl", sequence_length=640).check_fits(
                256, 304
            ),
        },
    ),
    "a stream that fills no batch": (
        lambda: streamed(10**6),
        "they don't fill one batch",
        {"a smaller --per_device_train_batch_size": lambda: streamed(8)},
    ),
    "a packed file": (
        lambda: read(dataset=packed()),
        "a packed file, chats.jsonl.gz",
        {"gzip -d packed/chats.jsonl.gz": lambda: as_said(f"gzip -d {packed()}", "packed/chats.jsonl")},
    ),
    "a table with tabs": (
        lambda: read(dataset=file("table.tsv", "text\tnumber\na\t1\n")),
        "a table with tabs",
        {
            "a .csv file of it (pandas.read_csv(path, sep='\\t'))": lambda: as_csv("table.tsv"),
            "a .txt file": lambda: read(dataset=file("table.txt", "text\tnumber\na\t1\n" * 99)),
        },
    ),
    "a table with semicolons": (
        lambda: read(dataset=file("semicolons.csv", "prompt;completion\n" + "a;b\n" * 99)),
        "the one column 'prompt;completion'",
        {"pandas.read_csv(path, sep=';').to_csv(path, index=False)": with_commas},
    ),
    "records under a name": (
        lambda: read(dataset=file("under.json", json.dumps({"data": [{"prompt": "a", "completion": "b"}] * 99}))),
        "a list under 'data' of objects with prompt, completion",
        {"json.dump(json.load(open(path))['data'], open(other, 'w'))": list_alone},
    ),
    "splits of other names": (
        lambda: pick_splits(["first", "second"], "--dataset a/hub-id"),
        "none of them is called train",
        {
            "--dataset a/hub-id#first": lambda: pick_splits(["first", "second"], "--dataset a/hub-id#first", "first"),
        },
    ),
    "a row that is no record": (
        lambda: read(dataset=file("bad.jsonl", Path("few.jsonl").read_text() + "{\n")),
        "no record can be read there",
        {"--on_bad_row skip": lambda: read(dataset="bad.jsonl", on_bad_row="skip")},
    ),
    "a Dataset with a transform": (
        lambda: read(more={"dataset": Dataset.from_list([{"text": "a"}] * 99).with_transform(dict)}),
        "called whenever a record is looked at",
        {
            "dataset.map(the function)": lambda: read(
                more={"dataset": Dataset.from_list([{"text": "a b"}] * 99).map(dict)}
            )
        },
    ),
    "a stream to be stored": (
        lambda: read(more={"dataset": Dataset.from_list([{"text": "a"}] * 99).to_iterable_dataset()}),
        "all of it would have to be read first",
        {
            "streaming=True": lambda: read(
                more={"dataset": Dataset.from_list([{"text": "a b"}] * 99).to_iterable_dataset(), "streaming": True}
            ),
            "a Dataset": lambda: read(more={"dataset": Dataset.from_list([{"text": "a b"}] * 99)}),
        },
    ),
    "a held-out stream of another kind": (
        lambda: read(dataset="few.jsonl", eval_dataset="templated.jsonl", streaming=True),
        "to evaluate on --eval_dataset templated.jsonl",
        {
            "an --eval_dataset whose columns are": lambda: read(
                dataset="chats.jsonl", eval_dataset="few.jsonl", streaming=True
            )
        },
    ),
    "tokens without their tokenizer": (
        lambda: read(None, dataset=file("tokens.jsonl", '{"input_ids": [1, 2, 3]}\n' * 99)),
        "tokens of another one",
        {"--tokenizer with a hub id or a folder": lambda: read(dataset="tokens.jsonl")},
    ),
    "a mixture without a tokenizer": (
        lambda: read(None, dataset="text:1,templated.jsonl:1"),
        "trained on a single dataset of text",
        {
            "--tokenizer with a hub id or a folder": lambda: read(
                dataset="text:1,templated.jsonl:1", split_special_tokens=True
            )
        },
    ),
    "samples that see one another": (
        lambda: read(dataset="few.jsonl", more={"isolate_documents": False}),
        "a sample would see the ones before it",
        {
            "isolate_documents=True": lambda: read(dataset="few.jsonl"),
            "SampleOptions(packing=False)": lambda: read(dataset="few.jsonl", packing=False),
        },
    ),
    "pictures": (
        lambda: read(more={"dataset": pictures()}),
        "a run trains on text alone",
        {"dataset.remove_columns('image')": lambda: read(more={"dataset": pictures().remove_columns("image")})},
    ),
    "a collator that makes several": (
        lambda: collated(lambda records: {"input_ids": np.zeros((2, 3)), "labels": np.zeros((2, 3))}),
        "of a list of one record it must make one sample",
        {"DataCollatorForLanguageModeling(tokenizer, mlm=False)": lambda: collated(for_language_models())},
    ),
    "batches that processes can't share": (
        lambda: batches(8, 3),
        "each takes as many rows as the next",
        {"a global batch that 3 divides": lambda: batches(9, 3)},
    ),
    "another seed": (
        lambda: batches(seed=2).load_state_dict(batches().state_dict()),
        "another seed draws another order",
        {"--seed 1": lambda: batches(seed=1).load_state_dict(batches().state_dict())},
    ),
    "a cursor of other data": (
        lambda: batches(count=9).load_state_dict(batches().state_dict()),
        "a place in one is none in the other",
        {
            "the --dataset": lambda: batches().load_state_dict(batches().state_dict()),
            "a new run": lambda: batches(count=9),
        },
    ),
    "a folder without a tokenizer": (
        lambda: open_tokenizer("text"),
        "no file of a tokenizer in a folder",
        {"--tokenizer with a hub id or a folder that holds tokenizer.json": lambda: open_tokenizer("chatml")},
    ),
    "a tokenizer of too few tokens": (
        lambda: check_tokenizer(None, 200),
        "before any is learnt",
        {
            "a model whose vocab_size is at least 257": lambda: check_tokenizer(None, 257),
            "its own tokenizer with --tokenizer": lambda: check_tokenizer(byte_tokenizer(CHATML), 304),
        },
    ),
    "a tokenizer without an end": (
        lambda: check_tokenizer(endless(), 304),
        "it has no end-of-text token",
        {
            "set eos_token": lambda: check_tokenizer(endless("<end>"), 304),
            "leave --tokenizer out": lambda: check_tokenizer(None, 304),
        },
    ),
    "a tokenizer of too many tokens": (
        lambda: check_tokenizer(byte_tokenizer(CHATML), 100),
        "has no embedding",
        {"a model with a larger vocab_size": lambda: check_tokenizer(byte_tokenizer(CHATML), 304)},
    ),
}
