"""A stream of documents, from files or the hub: read part by part (file by file), beginning at any document."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import datasets
from datasets import Features, IterableDataset

from trainer.cache import digest
from trainer.data.documents import text_documents
from trainer.data.sources import (
    Files,
    HubDataset,
    cause,
    check_records,
    check_text_column,
    locate,
    not_utf8,
    pick_splits,
    unreadable,
)
from trainer.data.tables import streamed_tables
from trainer.errors import UserError

LOOKED_AT = 64 << 20  # bytes of each file of a stream that are looked at before it begins


@dataclass(frozen=True)
class DocumentStream:
    """Documents that are read when they are asked for, and never kept.

    Args:
        asked: what the user asked for, as errors say it.
        identity: a name for the documents that a person can read, the same on every machine.
        parts: how many files there are; in a folder of text files each is one document.
        read: (part, document) -> (what a document is known by, its text), from that document to the part's end. A text
            file is known by its name, a record by its text.
        heldout: the documents that the dataset itself holds out.
    """

    asked: str
    identity: str
    parts: int
    read: Callable[[int, int], Iterator[tuple[str, str | None]]]
    heldout: DocumentStream | None = None

    def documents(self) -> Iterator[tuple[str, str | None]]:
        """All documents, part after part."""
        return itertools.chain.from_iterable(self.read(part, 0) for part in range(self.parts))


def find_stream(dataset: str | None, text_column: str) -> DocumentStream:
    """The stream that ``--dataset`` names; None is the standard library. No more is read than shows its columns.

    Raises:
        UserError: nothing is there, or nothing to read, or no column of text. ``read`` raises it where a stream breaks.
    """
    where = locate(dataset)
    if isinstance(where, Files) and where.kind == "text":
        names = list(where.files)
        return DocumentStream(
            where.asked,
            _identity(where),
            len(names),
            lambda part, document: itertools.islice(text_documents(where, names[part]), document, None),
        )
    if isinstance(where, Files):
        check_records(where, LOOKED_AT)
    try:
        splits, identity = _open(where)
    except Exception as error:  # of many types: offline, not found, malformed, …
        raise unreadable(where, error) from error
    train, heldout = pick_splits(splits, where.asked)
    streams = [_records(where, splits[name], text_column, identity) for name in [train, *heldout]]
    return streams[0] if len(streams) == 1 else replace(streams[0], heldout=streams[1])


def _identity(where: Files) -> str:
    """A name made of the files' names and sizes alone, so that a copy on another machine is the same data."""
    sizes = {name: path.stat().st_size for name, path in where.files.items()}
    return f"{len(sizes)} {where.kind} files of {sum(sizes.values()):,} bytes ({digest(list(sizes.items()))[:8]})"


def _open(where: Files | HubDataset) -> tuple[dict[str, IterableDataset], str]:
    """The splits by name, and their identity."""
    if isinstance(where, Files) and where.kind == "csv":
        return streamed_tables(where.by_split()), _identity(where)
    if isinstance(where, Files):
        with tempfile.TemporaryDirectory() as cache:  # the builder makes it and leaves nothing in it
            builder = datasets.load_dataset_builder(where.kind, data_files=where.patterns(), cache_dir=cache)
            return builder.as_streaming_dataset(), _identity(where)
    builder = datasets.load_dataset_builder(where.name, where.configuration, revision=where.revision)
    # semi-private: datasets/builder.py, datasets 5.2; `hash` is the commit of a dataset on the hub
    identity = f"{where.name}@{builder.hash}" + (f":{where.configuration}" if where.configuration else "")
    return builder.as_streaming_dataset(), identity


def _records(where: Files | HubDataset, split: IterableDataset, text_column: str, identity: str) -> DocumentStream:
    """The stream of one split of records."""
    try:
        columns = split.features or _columns_of(split)
    except Exception as error:
        raise unreadable(where, error) from error
    check_text_column(columns, text_column, where.asked)

    def read(part: int, document: int) -> Iterator[tuple[str, str | None]]:
        # `skip` is exact in every kind of file (a test counts), and drops whole Arrow tables without converting them
        records = split.select_columns(text_column).shard(split.num_shards, part).skip(document)
        try:
            for record in records:
                yield record[text_column] or "", record[text_column]
        except UnicodeDecodeError as error:
            raise not_utf8(where, error) from error
        except Exception as error:  # of many types: whatever a network or a file can do
            raise UserError(
                asked=f"{where.asked}: documents of its part {part + 1} of {split.num_shards}",
                found=cause(error),
                why="the stream broke off; what was trained on is in the last checkpoint",
                instead="the same command with --resume_from_checkpoint latest, when the data can be read again",
            ) from error

    return DocumentStream(where.asked, f"{identity}, {text_column}", split.num_shards, read)


def _columns_of(split: IterableDataset) -> Features:
    """The columns of the first record, for files whose columns `datasets` does not know before it reads them."""
    first = next(iter(split), None)
    if first is None:
        raise ValueError("no records")
    return datasets.Dataset.from_list([first]).features
