"""Stored documents: found, and read whole when needed; and a document's hash, and whether it is blank."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
from datasets import Dataset, Features, IterableDataset, Value

from shardwright.data.records.files import Unreadable
from shardwright.data.records.record_sources import (
    Files,
    HeldRecords,
    HubDataset,
    locate,
    not_utf8,
    pick_splits,
    unreadable,
)
from shardwright.data.records.records import shape_of_files, texts_of_file
from shardwright.data.records.shapes import check_text, recognise
from shardwright.data.records.unreadable import Unread
from shardwright.errors import UserError
from shardwright.files.cache import digest
from shardwright.objectives.objective import RecordShape, text_shape
from shardwright.objectives.sft import SHAPES

# a lone text file is cut at line ends into about a hundred documents, so that some can be held out
DOCUMENTS_OF_ONE_FILE = 100
RECORDS_AT_ONCE = 4096  # validated together
DOCUMENT_BYTES = (4 << 10, 1 << 20)  # least and most bytes of such a document, not counting its last line


@dataclass(frozen=True)
class Documents:
    """Documents that are not read yet.

    Args:
        asked: the user's words for the dataset, for errors.
        fingerprint: changes when the documents do.
        read: takes a scratch folder, which must outlive the result. Returns the documents to train on as ``train``, and
            those that the dataset itself holds out, if any, under the name of their split. Columns: ``text``, and
            ``name`` if the documents are files.
        unread: the rows that were left out as unreadable.
    """

    asked: str
    fingerprint: str
    shape: RecordShape
    read: Callable[[Path], Mapping[str, Dataset]]
    unread: Unread


def find_documents(
    dataset: str | Dataset | IterableDataset | None,
    reads: Sequence[RecordShape] = SHAPES,
    on_bad_row: str = "error",
) -> Documents:
    """The documents that ``--dataset`` names; None is the standard library. A hub dataset is downloaded here.

    Raises:
        UserError: nothing is there, or nothing to read. ``read`` raises it for faults of the content.
    """
    where = locate(dataset)
    unread = Unread(where.asked, on_bad_row)
    if isinstance(where, HeldRecords):
        return _given_documents(where, unread, reads)
    if isinstance(where, HubDataset):
        return _hub_documents(where, unread, reads)
    if where.kind == "text":
        check_text(where.asked, reads)
        return _text_file_documents(where, unread)
    return _record_documents(where, shape_of_files(where, reads), unread)


def key_hash(key: str) -> int:
    """The hash, 0 to 2**63 - 1, of a document's key; Python's hash() would differ in each process."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest()) >> 1


def has_text(text: str | None) -> bool:
    """Whether a document holds anything but white space."""
    return bool(text) and not str(text).isspace()


def _stamps(files: Mapping[str, Path]) -> list[Any]:
    """[name, path, size in bytes, time of change in ns] of each file."""
    stamps: list[Any] = []
    for name, path in files.items():
        stat = path.stat()
        stamps.append([name, str(path.resolve()), stat.st_size, stat.st_mtime_ns])
    return stamps


def text_documents(where: Files, name: str, unread: Unread) -> Iterator[tuple[str, str]]:
    """(name, text) of the documents of the text file ``name``: the whole file, or groups of lines of a lone file.

    Raises:
        UserError: it can't be read, and such files are not skipped.
    """
    path = where.files[name]
    try:
        if len(where.files) == 1:
            yield from ((f"{name}:{i}", text) for i, text in enumerate(_line_groups(path, unread)))
        else:
            yield name, path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        if not where.skip_undecodable:
            if unread.policy == "error":
                raise not_utf8(replace(where, files={name: path}), error) from error
            unread(name, None, Unreadable(f"UnicodeDecodeError: {error}", rest=True))
    except OSError as error:
        if not where.skip_undecodable:
            unread(name, None, Unreadable(f"{type(error).__name__}: {error}", rest=True))


def _text_file_documents(where: Files, unread: Unread) -> Documents:
    fingerprint = digest([_stamps(where.files), unread.policy])

    def documents() -> Iterator[dict[str, str]]:
        for file in where.files:
            yield from ({"text": text, "name": name} for name, text in text_documents(where, file, unread))

    def read(scratch: Path) -> Mapping[str, Dataset]:
        return {"train": _written(documents, Features(text=Value("large_string"), name=Value("string")), scratch)}

    return Documents(where.asked, fingerprint, text_shape(), read, unread)


def _written(rows: Callable[[], Iterator[dict[str, Any]]], features: Features, scratch: Path) -> Dataset:
    """``rows`` as a dataset in the folder ``scratch``; a UserError of theirs passes through."""
    try:
        return Dataset.from_generator(rows, features=features, cache_dir=str(scratch), fingerprint=scratch.name)
    except datasets.exceptions.DatasetGenerationError as error:
        raise (error.__cause__ if isinstance(error.__cause__, UserError) else error) from None


def _line_groups(path: Path, unread: Unread) -> Iterator[str]:
    """The text of a file, cut at line ends into about a hundred pieces, perhaps without lines that are no UTF-8."""
    least, most = DOCUMENT_BYTES
    size = min(most, max(least, path.stat().st_size // DOCUMENTS_OF_ONE_FILE))
    number = 0

    def decoded(line: bytes) -> str:
        nonlocal number
        number += 1
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            return text.replace("\r\n", "\n").replace("\r", "\n")
        except UnicodeDecodeError as error:
            if unread.policy == "error":
                raise
            unread(path.name, number, Unreadable(f"UnicodeDecodeError: {error}"))
            return ""

    with path.open("rb") as file:
        while lines := file.readlines(size):
            yield "".join(map(decoded, lines))


def _record_documents(where: Files, shape: RecordShape, unread: Unread) -> Documents:
    def read(scratch: Path) -> Mapping[str, Dataset]:
        splits = where.by_split()
        train, heldout = pick_splits(splits, where.asked)

        def rows_of(names: list[str]) -> Callable[[], Iterator[dict[str, Any]]]:
            # a row without text stays, as None
            return lambda: ({"text": text} for n in names for text in texts_of_file(where, n, shape, unread))

        features = Features(text=Value("large_string"))
        return {
            name: _written(rows_of(splits[split]), features, scratch / name)
            for name, split in [("train", train), *((each, each) for each in heldout)]
        }

    return Documents(where.asked, digest([_stamps(where.files), *shape.required, unread.policy]), shape, read, unread)


def _hub_documents(where: HubDataset, unread: Unread, reads: Sequence[RecordShape]) -> Documents:
    try:
        loaded = datasets.load_dataset(where.name, where.configuration, revision=where.revision)
    except Exception as error:  # of many types: offline, not found, gated, a configuration must be chosen
        raise unreadable(where, error) from error
    train, _ = pick_splits(loaded.keys(), where.asked)
    shape = recognise(loaded[train].features, where.asked, reads)
    splits = _picked(loaded, shape, reads, where.asked)
    # semi-private: datasets/arrow_dataset.py, datasets 5.2; equal in every process that loads the same cached files
    fingerprint = digest([split._fingerprint for split in splits.values()])

    def read(scratch: Path) -> Mapping[str, Dataset]:
        return _texts(_checked(splits, where), shape, scratch)

    return Documents(where.asked, fingerprint, shape, read, unread)


def _given_documents(where: HeldRecords, unread: Unread, reads: Sequence[RecordShape]) -> Documents:
    if not isinstance(where.records, Dataset):
        raise UserError(
            asked=f"rows of {where.asked} that are stored",
            found="a stream, whose length shows where it ends",
            why="all of it would have to be read first",
            instead="streaming=True, or a Dataset",
        )
    shape = recognise(where.records.features, where.asked, reads)
    splits = _picked({"train": where.records}, shape, reads, where.asked)
    identity = digest([where.identity, *shape.required])

    def read(scratch: Path) -> Mapping[str, Dataset]:
        return _texts(_checked(splits, where), shape, scratch)

    return Documents(where.asked, identity, shape, read, unread)


def _picked(
    splits: Mapping[str, Dataset], shape: RecordShape, reads: Sequence[RecordShape], asked: str
) -> dict[str, Dataset]:
    """The split to train on and the one to hold out, if there is one, reduced to the columns that are read."""
    train, heldout = pick_splits(splits.keys(), asked)
    for name in [train, *heldout]:
        recognise(splits[name].features, asked, (shape,) if shape.is_text else reads)
    picked = {"train": splits[train], **{name: splits[name] for name in heldout}}
    read = (*shape.required, *shape.optional)
    return {
        name: split.select_columns([column for column in split.column_names if column in read])
        for name, split in picked.items()
    }


def _texts(splits: Mapping[str, Dataset], shape: RecordShape, scratch: Path) -> dict[str, Dataset]:
    if shape.is_text:
        return {name: split.rename_columns({shape.required[0]: "text"}) for name, split in splits.items()}
    return {
        name: split.map(
            lambda record: {"text": shape.document(record)},
            remove_columns=split.column_names,
            features=Features(text=Value("large_string")),
            cache_file_name=str(scratch / f"{name}.arrow"),
            new_fingerprint=digest([split._fingerprint, shape.name]),
        )
        for name, split in splits.items()
    }


def _checked(splits: dict[str, Dataset], where: HubDataset | HeldRecords) -> dict[str, Dataset]:
    """``splits``, once their texts are checked to be UTF-8: Arrow and Parquet files may hold any bytes as text."""
    for split in splits.values():
        for table in split.with_format("arrow").iter(RECORDS_AT_ONCE):
            try:
                table.validate(full=True)
            except pa.ArrowInvalid as error:
                raise not_utf8(where, error) from error
    return splits
