"""Stored documents: found, and read whole when needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import datasets
import pyarrow as pa
from datasets import Dataset, Features, Value

from shardwright.data.records import record_sources as sources
from shardwright.data.records.document_stream import DocumentStream, check_same, stream_of_files
from shardwright.data.records.fields import unread_features
from shardwright.data.records.record_sources import AnyDataset, Files, HeldRecords, HubDataset
from shardwright.data.records.shapes import recognise_splits
from shardwright.data.records.unreadable import Unread
from shardwright.errors import UserError
from shardwright.files.cache import digest
from shardwright.objectives.objective import RecordShape
from shardwright.objectives.sft import SHAPES

TRAIN, HELDOUT = "train", "heldout"  # names of splits
RECORDS_AT_ONCE = 4096  # validated together


@dataclass(frozen=True)
class Documents:
    """Documents that are not read yet.

    ``read`` takes a scratch folder, which must outlive the result. It returns the documents to train on as ``train``,
    and those held out, if that is known, as ``heldout``, or of named sets as ``heldout-name``. Columns: ``text``, and
    ``name`` if the documents are files.
    """

    asked: str  # the user's words for the dataset, for errors
    fingerprint: str  # changes when the documents do
    shape: RecordShape
    read: Callable[[Path], Mapping[str, Dataset]]
    unread: tuple[Unread, ...]  # the rows that were left out as unreadable

    def first(self, most: int) -> Documents:
        """The documents with only the first ``most`` to train on."""

        def read(scratch: Path) -> Mapping[str, Dataset]:
            splits = self.read(scratch)
            return {**splits, TRAIN: splits[TRAIN].take(most)}

        return replace(self, fingerprint=digest([self.fingerprint, most]), read=read)

    def evaluated_on(self, others: Mapping[str, Documents]) -> Documents:
        """The documents with the training split of each of ``others`` held out, by the names of their sets.

        An unnamed set's name is empty. Raises UserError if they are of another shape.
        """
        for other in others.values():
            check_same(self.shape, other.shape, other.asked)
        sets = {TRAIN: self, **{f"{HELDOUT}-{name}" if name else HELDOUT: each for name, each in others.items()}}

        def read(scratch: Path) -> Mapping[str, Dataset]:
            return {name: each.read(scratch / name)[TRAIN] for name, each in sets.items()}

        key = [self.fingerprint, *((name, each.fingerprint) for name, each in others.items()), "eval"]
        unread = tuple(unread for each in sets.values() for unread in each.unread)
        return replace(self, fingerprint=digest(key), read=read, unread=unread)


def find_documents(dataset: AnyDataset, reads: Sequence[RecordShape] = SHAPES, on_bad_row: str = "error") -> Documents:
    """The documents that ``--dataset`` names; None is the standard library. A hub dataset is downloaded here.

    Raises UserError if nothing is there, or nothing to read; ``read`` does for faults of the content.
    """
    where = sources.locate(dataset)
    if isinstance(where, Files):
        return _documents_of_files(where, stream_of_files(where, reads, on_bad_row))
    return _documents_of_records(where, reads)


def _documents_of_files(where: Files, stream: DocumentStream) -> Documents:
    stats = ((name, path, path.stat()) for name, path in where.files.items())
    stamps = [[name, str(path.resolve()), stat.st_size, stat.st_mtime_ns] for name, path, stat in stats]
    is_text = where.kind == "text"

    def read(scratch: Path) -> Mapping[str, Dataset]:
        splits = {TRAIN: stream, HELDOUT: stream.heldout}
        return {name: _written(split, is_text, scratch / name) for name, split in splits.items() if split is not None}

    key = [stamps, *(() if is_text else stream.shape.required), stream.unread.policy]
    key += [where.split] if where.split else []
    return Documents(where.asked, digest(key), stream.shape, read, (stream.unread,))


def _written(stream: DocumentStream, named: bool, scratch: Path) -> Dataset:
    """The documents, and their keys as names if ``named``, in the folder ``scratch``. A UserError passes through."""

    def rows() -> Iterator[dict[str, str | None]]:
        # a row without text stays, as None
        return ({"text": text, "name": key} if named else {"text": text} for key, text in stream.documents())

    features = Features(text=Value("large_string"), **({"name": Value("string")} if named else {}))
    try:
        return Dataset.from_generator(rows, features=features, cache_dir=str(scratch), fingerprint=scratch.name)
    except datasets.exceptions.DatasetGenerationError as error:
        raise (error.__cause__ if isinstance(error.__cause__, UserError | OSError) else error) from None


def _documents_of_records(where: HubDataset | HeldRecords, reads: Sequence[RecordShape]) -> Documents:
    loaded = _loaded(where)
    chosen = [loaded[name] for name in sources.pick_splits(loaded.keys(), where.asked, where.split)]
    shape = recognise_splits((split.features for split in chosen), where.asked, reads)
    columns, unread = {*shape.columns}, Unread(where.asked, "error")
    for split in chosen:
        full = {n: f for n, f in split.features.items() if split.data.column(n).null_count < split.data.num_rows}
        unread.columns.update(dict.fromkeys(unread_features(full, shape), len(split)))
    splits = {
        name: split.select_columns([column for column in split.column_names if column in columns])
        for name, split in zip((TRAIN, HELDOUT), chosen, strict=False)
    }
    # semi-private: datasets/arrow_dataset.py, datasets 5.2; equal in every process that loads the same cached files
    key = [split._fingerprint for split in splits.values()]
    if isinstance(where, HeldRecords):
        key = [where.identity, *shape.required]

    def read(scratch: Path) -> Mapping[str, Dataset]:
        # Arrow and Parquet files may hold any bytes as text
        for split in splits.values():
            for table in split.with_format("arrow").iter(RECORDS_AT_ONCE):
                try:
                    table.validate(full=True)
                except pa.ArrowInvalid as error:
                    raise sources.not_utf8(where, error) from error
        return {name: _texts(split, shape, scratch / f"{name}.arrow") for name, split in splits.items()}

    return Documents(where.asked, digest(key), shape, read, (unread,))


def _loaded(where: HubDataset | HeldRecords) -> Mapping[str, Dataset]:
    if isinstance(where, HubDataset):
        try:
            return datasets.load_dataset(where.name, where.configuration, revision=where.revision)
        except Exception as error:  # of many types: offline, not found, gated, a configuration must be chosen
            raise sources.unreadable(where, error) from error
    if not isinstance(where.records, Dataset):
        raise UserError(
            asked=f"rows of {where.asked} that are stored",
            found="a stream, whose length shows where it ends",
            why="all of it would have to be read first",
            instead="streaming=True, or a Dataset",
        )
    return {"train": where.records}


def _texts(split: Dataset, shape: RecordShape, cache: Path) -> Dataset:
    if shape.is_text:
        return split.rename_columns({shape.required[0]: "text"})
    return split.map(
        lambda record: {"text": shape.document(record)},
        remove_columns=split.column_names,
        features=Features(text=Value("large_string")),
        cache_file_name=str(cache),
        new_fingerprint=digest([split._fingerprint, shape.name]),
    )
