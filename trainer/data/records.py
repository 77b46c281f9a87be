"""Records as they stream: opened, their columns seen, their shape recognised. No more is read than the first."""

from __future__ import annotations

import tempfile
from typing import Any

import datasets
from datasets import Features, IterableDataset

from trainer.cache import digest
from trainer.data.shapes import Shape, no_pairs, recognise, text_shape
from trainer.data.sources import Files, HubDataset, check_records, locate, pick_splits, unreadable
from trainer.data.tables import streamed_tables

LOOKED_AT = 64 << 20  # bytes of each file of a stream that are looked at before it begins


def find_shape(dataset: str | None, text_column: str | None, pairs: bool = False) -> Shape:
    """The shape of the documents that ``--dataset`` names; ``text_column`` says that it is text, ``pairs`` that it is
    pairs of answers.

    Raises:
        UserError: nothing is there, it can't be opened, or its records are of no known shape.
    """
    where = locate(dataset)
    if pairs and isinstance(where, Files) and where.kind == "text":
        raise no_pairs(where.asked, "plain text")
    if text_column is not None or (isinstance(where, Files) and where.kind == "text"):
        return text_shape(text_column or "text")
    splits, _ = open_records(where)
    train, _ = pick_splits(splits, where.asked)
    return recognise(columns_of(where, splits[train]), None, where.asked, pairs)


def open_records(where: Files | HubDataset) -> tuple[dict[str, IterableDataset], str]:
    """The splits by name, and a name for them that is the same on every machine.

    Raises:
        UserError: they can't be opened.
    """
    if isinstance(where, Files):
        check_records(where, LOOKED_AT)
    try:
        return _open(where)
    except Exception as error:  # of many types: offline, not found, malformed, …
        raise unreadable(where, error) from error


def identity_of(where: Files) -> str:
    """A name made of the files' names and sizes alone, so that a copy on another machine is the same data."""
    sizes = {name: path.stat().st_size for name, path in where.files.items()}
    return f"{len(sizes)} {where.kind} files of {sum(sizes.values()):,} bytes ({digest(list(sizes.items()))[:8]})"


def columns_of(where: Files | HubDataset, split: IterableDataset) -> dict[str, Any]:
    """Column name -> feature. Where they are not known before the files are read, they are those of the first record.

    Raises:
        UserError: it can't be read.
    """
    try:
        return split.features or _columns_of_first(split)
    except Exception as error:  # as above
        raise unreadable(where, error) from error


def _open(where: Files | HubDataset) -> tuple[dict[str, IterableDataset], str]:
    if isinstance(where, Files) and where.kind == "csv":
        return streamed_tables(where.by_split()), identity_of(where)
    if isinstance(where, Files):
        with tempfile.TemporaryDirectory() as cache:  # the builder makes it and leaves nothing in it
            builder = datasets.load_dataset_builder(where.kind, data_files=where.patterns(), cache_dir=cache)
            return builder.as_streaming_dataset(), identity_of(where)
    builder = datasets.load_dataset_builder(where.name, where.configuration, revision=where.revision)
    # semi-private: datasets/builder.py, datasets 5.2; `hash` is the commit of a dataset on the hub
    identity = f"{where.name}@{builder.hash}" + (f":{where.configuration}" if where.configuration else "")
    return builder.as_streaming_dataset(), identity


def _columns_of_first(split: IterableDataset) -> Features:
    first = next(iter(split), None)
    if first is None:
        raise ValueError("no records")
    return datasets.Dataset.from_list([first]).features
