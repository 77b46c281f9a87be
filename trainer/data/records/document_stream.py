"""A stream of documents, from files or the hub, read part by part (file by file) from any document on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from datasets import Dataset, IterableDataset

from shardwright.data.records.documents import text_documents
from shardwright.data.records.record_sources import Files, HeldRecords, HubDataset, cause, locate, not_utf8, pick_splits
from shardwright.data.records.records import columns_of, identity_of, open_records, shape_of_files, texts_of_file
from shardwright.data.records.shapes import check_text, recognise
from shardwright.data.records.unreadable import Unread
from shardwright.errors import UserError
from shardwright.objectives.objective import RecordShape, text_shape
from shardwright.objectives.sft import SHAPES


@dataclass(frozen=True)
class DocumentStream:
    """Documents that are read on demand and never kept.

    Args:
        asked: the user's words for the dataset, for errors.
        identity: a readable name for the documents, the same on every machine.
        parts: how many files there are; in a folder of text files each is one document.
        read: (part, document) -> (key, text) of each document from that one to the part's end. A text file's key is its
            name, a record's is its text.
        sizes: name → bytes of its parts, if they are files.
        heldout: the documents that the dataset itself holds out.
        unread: the unreadable rows that were left out.
    """

    asked: str
    identity: str
    parts: int
    read: Callable[[int, int], Iterator[tuple[str, str | None]]]
    shape: RecordShape = text_shape()  # noqa: RUF009  (it is frozen)
    sizes: Mapping[str, int] = field(default_factory=dict)
    heldout: DocumentStream | None = None
    unread: Unread = Unread("a stream", "error")  # noqa: RUF009  (it counts nothing)

    @cached_property
    def _names(self) -> list[str]:
        return list(self.sizes)

    def documents(self) -> Iterator[tuple[str, str | None]]:
        return itertools.chain.from_iterable(self.read(part, 0) for part in range(self.parts))

    def place_of(self, document: str) -> str | None:
        """The file and row (from 1) of a document's first occurrence; None: nowhere. Reads everything again."""
        for part in range(self.parts):
            for row, (_, text) in enumerate(self.read(part, 0), start=1):
                if text == document:
                    return f"{self.name_of(part)}, row {row}"
        return self.heldout.place_of(document) if self.heldout else None

    def name_of(self, part: int) -> str:
        """A part's name for people."""
        return self._names[part] if self.sizes else f"part {part + 1} of {self.parts}"


def find_stream(
    dataset: str | Dataset | IterableDataset | None,
    reads: Sequence[RecordShape] = SHAPES,
    on_bad_row: str = "error",
) -> DocumentStream:
    """The stream that ``--dataset`` names; None is the standard library. Only its columns are read.

    Raises:
        UserError: nothing is there, or nothing to read, or no column of text. ``read`` raises it if the stream breaks.
    """
    where = locate(dataset)
    unread = Unread(where.asked, on_bad_row)
    if isinstance(where, HubDataset | HeldRecords):
        return _of_records(where, reads)
    identity, names = identity_of(where), list(where.files)
    if where.kind == "text":
        check_text(where.asked, reads)

        def read(part: int, document: int) -> Iterator[tuple[str, str | None]]:
            return itertools.islice(text_documents(where, names[part], unread), document, None)

        return DocumentStream(where.asked, identity, len(names), read, sizes=_sizes(where, names), unread=unread)
    shape, splits = shape_of_files(where, reads), where.by_split()
    train, heldout = pick_splits(splits, where.asked)
    identity = f"{identity}, {', '.join(shape.required)}"
    streams = [_of_files(where, splits[name], (shape, identity), unread) for name in [train, *heldout]]
    return streams[0] if len(streams) == 1 else replace(streams[0], heldout=streams[1])


def _of_files(where: Files, names: list[str], known: tuple[RecordShape, str], unread: Unread) -> DocumentStream:
    """The stream of one split's files; a row without text, or unreadable, is None."""
    shape, identity = known

    def read(part: int, document: int) -> Iterator[tuple[str, str | None]]:
        for text in texts_of_file(where, names[part], shape, unread, document):
            yield text or "", text

    return DocumentStream(where.asked, identity, len(names), read, shape, _sizes(where, names), unread=unread)


def _sizes(where: Files, names: list[str]) -> dict[str, int]:
    return {name: where.files[name].stat().st_size for name in names}


def _of_records(where: HubDataset | HeldRecords, reads: Sequence[RecordShape]) -> DocumentStream:
    splits, identity = open_records(where)
    train, heldout = pick_splits(splits, where.asked)
    shape = recognise(columns_of(where, splits[train]), where.asked, reads)
    streams = [_records(where, splits[name], (shape, identity), reads) for name in [train, *heldout]]
    return streams[0] if len(streams) == 1 else replace(streams[0], heldout=streams[1])


def _records(
    where: HubDataset | HeldRecords,
    split: IterableDataset,
    known: tuple[RecordShape, str],
    reads: Sequence[RecordShape],
) -> DocumentStream:
    shape, identity = known
    recognise(columns_of(where, split), where.asked, (shape,) if shape.is_text else reads)
    chosen = split.select_columns(shape.required[0]) if shape.is_text else split

    def read(part: int, document: int) -> Iterator[tuple[str, str | None]]:
        # `skip` is exact in every kind of file, and drops whole Arrow tables without converting them
        records: Any = chosen.shard(split.num_shards, part).skip(document)
        try:
            for record in records:
                text = shape.document(record)
                yield text or "", text
        except UnicodeDecodeError as error:
            raise not_utf8(where, error) from error
        except Exception as error:  # of many types: all failures of a network or a file
            raise UserError(
                asked=f"{where.asked}: documents of its part {part + 1} of {split.num_shards}",
                found=cause(error),
                why="the stream broke off; what was trained on is in the last checkpoint",
                instead="the same command with --resume_from_checkpoint latest, when the data can be read again",
            ) from error

    columns = ", ".join(shape.required)
    return DocumentStream(where.asked, f"{identity}, {columns}", split.num_shards, read, shape)
