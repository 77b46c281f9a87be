"""Opens records, finds their columns and recognises their shape; only the first rows of files are read."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import datasets
from datasets import Dataset, IterableDataset, List, Value

from shardwright.data.records.fields import unread_columns
from shardwright.data.records.files import Unreadable, rows_of
from shardwright.data.records.record_sources import (
    Files,
    HeldRecords,
    HubDataset,
    pick_splits,
    unreadable,
    without_rows,
)
from shardwright.data.records.shapes import check_text, recognise_splits
from shardwright.data.records.unreadable import Unread
from shardwright.errors import UserError, a_type
from shardwright.objectives.objective import RecordShape, text_shape

LOOKED_AT = 100  # first rows of a split's files, which determine its columns
_TYPES = {bool: "bool", int: "int64", float: "float64", str: "string", type(None): "null"}


def shape_of_files(where: Files, reads: Sequence[RecordShape]) -> RecordShape:
    """The shape of the documents in files, by the split to train on.

    Raises UserError if no record can be read, they are of no known shape, or the held-out split has another.
    """
    if where.kind == "text":
        check_text(where.asked, reads)
        return text_shape()
    splits = where.by_split()
    columns = (_columns_of_files(where, splits[name]) for name in pick_splits(splits, where.asked, where.split))
    return recognise_splits(columns, where.asked, reads)


def texts_of_file(where: Files, name: str, shape: RecordShape, unread: Unread, start: int = 0) -> Iterator[str | None]:
    """Each row of a file of records as one string, from number ``start`` (from 0) on.

    None stands for rows without text, and for unreadable ones that are skipped.
    """
    for number, row in enumerate(rows_of(where.files[name], where.kind, start), start=start + 1):
        try:
            if isinstance(row, Unreadable):
                raise row
            text = None if row is None else _text_of(row, shape, typed=where.kind in ("parquet", "arrow"))
            unread.count(name, number, unread_columns(row or {}, shape))
            yield text
        except Unreadable as why:
            unread(name, number, why)
            yield None


def _text_of(row: Any, shape: RecordShape, typed: bool) -> str | None:
    """The row as one string. Raises Unreadable: it is no string, or can't be encoded as UTF-8."""
    column = shape.name_of[shape.required[0]]
    if shape.is_text and column not in row:
        raise Unreadable(f"no column {column}")
    text = shape.document(row, typed)
    if not isinstance(text, str | None):
        raise Unreadable(f"column {column}: {a_type(text)}, not text")
    try:
        (text or "").encode()
    except UnicodeEncodeError as error:
        raise Unreadable(f"UnicodeEncodeError: {error}") from error
    return text


def open_records(where: HubDataset | HeldRecords) -> tuple[dict[str, IterableDataset], str]:
    """Name → split, and a name for all that is the same on every machine; raises UserError if they can't be opened."""
    if isinstance(where, HeldRecords):
        return {"train": where.stream()}, where.identity
    try:
        builder = datasets.load_dataset_builder(where.name, **where.words)
        # semi-private: datasets/builder.py, datasets 5.2; `hash` is the commit of a dataset on the hub
        identity = f"{where.name}@{builder.hash}" + (f":{where.configuration}" if where.configuration else "")
        identity += f"/{where.folder}" if where.folder else ""
        identity += f"#{where.split}" if where.split else ""
        return builder.as_streaming_dataset(), identity
    except Exception as error:  # of many types: offline, not found, malformed, …
        raise unreadable(where, error) from error


def load_records(where: HubDataset | HeldRecords) -> tuple[Mapping[str, Dataset], str]:
    """Name → split, stored on this machine, and a name for all; raises UserError if they can't be had."""
    if isinstance(where, HubDataset):
        try:
            return datasets.load_dataset(where.name, **where.words), where.name
        except Exception as error:  # of many types: offline, not found, gated, a configuration must be chosen
            raise unreadable(where, error) from error
    if not isinstance(where.records, Dataset):
        raise UserError(
            asked=f"rows of {where.asked} that are stored",
            found="a stream, whose length shows where it ends",
            why="all of it would have to be read first",
            instead="streaming=True, or a Dataset",
        )
    return {"train": where.records}, where.identity


def columns_of(where: HubDataset | HeldRecords, split: Dataset | IterableDataset) -> dict[str, Any]:
    """Column name -> feature, if need be by the first record; raises UserError if that can't be read."""
    try:
        if split.features:
            return split.features
        if (first := next(iter(split), None)) is not None:
            return Dataset.from_list([first]).features
    except Exception as error:  # as above
        raise unreadable(where, error) from error
    raise without_rows(where)


def _feature_of(value: Any) -> Value | List:
    """The type of a column with this value; of a list of objects with their keys, of other nested values with none."""
    if type(value) in _TYPES:
        return Value(_TYPES[type(value)])
    item = value[0] if isinstance(value, list) and value and isinstance(value[0], dict) else {}
    return List(dict.fromkeys(item, Value("null")) or Value("null"))


def _columns_of_files(where: Files, names: list[str]) -> dict[str, Any]:
    """Column name -> feature, by the first readable rows that have a value there."""
    numbered = ((name, row) for name in names for row in enumerate(rows_of(where.files[name], where.kind), start=1))
    columns: dict[str, Any] = {}
    bad: list[tuple[str, int, Unreadable]] = []
    for name, (number, row) in itertools.islice(numbered, LOOKED_AT):
        if isinstance(row, Unreadable):
            bad.append((name, number, row))
            continue
        for column, value in (row or {}).items():
            if columns.get(column, Value("null")) == Value("null"):
                columns[column] = _feature_of(value)
    if not columns and bad:
        Unread(where.asked, "error")(*bad[0])
    if not columns:
        raise without_rows(where)
    return columns
