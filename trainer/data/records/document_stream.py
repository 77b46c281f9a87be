"""A stream of documents, from files or the hub, read part by part (file by file) from any document on."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from datasets import IterableDataset
from datasets.features.features import require_decoding  # semi-private: datasets 5.2

from shardwright.data.records import record_sources as sources
from shardwright.data.records.fields import unread_columns, unread_features
from shardwright.data.records.files import Unreadable
from shardwright.data.records.record_sources import AnyDataset, Files, HeldRecords, HubDataset
from shardwright.data.records.records import columns_of, open_records, shape_of_files, texts_of_file
from shardwright.data.records.shapes import recognise_splits
from shardwright.data.records.unreadable import Unread
from shardwright.errors import UserError
from shardwright.files.cache import digest
from shardwright.objectives.objective import RecordShape, text_shape
from shardwright.objectives.sft import SHAPES

# a lone text file is cut at line ends into about a hundred documents, so that some can be held out
DOCUMENTS_OF_ONE_FILE = 100
DOCUMENT_BYTES = (4 << 10, 1 << 20)  # least and most bytes of such a document, not counting its last line
Keyed = tuple[str, str | None]  # a document's key (a text file's is its name, a record's is its text), and its text


@dataclass(frozen=True)
class DocumentStream:
    """Documents that are read on demand and never kept."""

    asked: str  # the user's words for the dataset, for errors
    identity: str  # a readable name for the documents, the same on every machine
    parts: int  # how many files there are; in a folder of text files each is one document
    read: Callable[[int, int], Iterator[Keyed]]  # (part, document) → the documents from that one to the part's end
    shape: RecordShape = text_shape()  # noqa: RUF009  (it is frozen)
    names: Sequence[str] = ()  # of the parts, if they are files
    sizes: Sequence[int] = ()  # bytes of the parts, if they are files
    heldout: DocumentStream | None = None  # the documents that are held out, if that is known
    unread: Unread = Unread("a stream", "error")  # noqa: RUF009  (it counts nothing)

    def documents(self) -> Iterator[Keyed]:
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
        return self.names[part] if self.names else f"part {part + 1} of {self.parts}"

    def first(self, most: int) -> DocumentStream:
        """The first ``most`` documents, file after file, as one part."""

        def read(part: int, document: int) -> Iterator[Keyed]:
            return itertools.islice(self.documents(), document, most)

        return replace(self, identity=f"{self.identity}, the first {most}", parts=1, read=read, names=(), sizes=())

    def evaluated_on(self, others: DocumentStream) -> DocumentStream:
        """The stream with ``others`` held out. Raises UserError if they are of another shape."""
        check_same(self.shape, others.shape, others.asked)
        return replace(self, identity=f"{self.identity}, evaluated on {others.identity}", heldout=others)


def key_hash(key: str) -> int:
    """The hash, 0 to 2**63 - 1, of a document's key; Python's hash() would differ in each process."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest()) >> 1


def has_text(text: str | None) -> bool:
    """Whether a document holds anything but white space."""
    return bool(text) and not str(text).isspace()


def check_same(shape: RecordShape, other: RecordShape, asked: str) -> None:
    """Refuse records of shape ``other``, which ``asked`` names, to evaluate on."""
    if shape != other:
        raise UserError(
            asked=f"to evaluate on {asked}",
            found=f"its records are {other.name} ({', '.join(other.required)}), and those to train on {shape.name} "
            f"({', '.join(shape.required)})",
            why="both are made into rows in one way",
            instead="an --eval_dataset whose columns are those of --dataset",
        )


def find_stream(
    dataset: AnyDataset, reads: Sequence[RecordShape] = SHAPES, on_bad_row: str = "error"
) -> DocumentStream:
    """The stream that ``--dataset`` names; None is the standard library. Only its columns are read.

    Raises UserError if nothing is there, or nothing to read, or no column of text; ``read`` does if the stream breaks.
    """
    where = sources.locate(dataset)
    if isinstance(where, Files):
        return stream_of_files(where, reads, on_bad_row)
    return _stream_of_records(where, reads)


def stream_of_files(where: Files, reads: Sequence[RecordShape], on_bad_row: str) -> DocumentStream:
    """The documents of the files at ``where``; a row without text, or unreadable, is None. Raises as `find_stream`."""
    unread = Unread(where.asked, on_bad_row)
    shape, splits = shape_of_files(where, reads), where.by_split()
    sizes = {name: path.stat().st_size for name, path in where.files.items()}
    # of names and sizes alone, so that a copy on another machine counts as the same data
    identity = f"{len(sizes)} {where.kind} files of {sum(sizes.values()):,} bytes ({digest(list(sizes.items()))[:8]})"
    if where.kind != "text":
        identity += f", {', '.join(shape.required)}" + (f", split {where.split}" if where.split else "")

    def stream(names: list[str]) -> DocumentStream:
        def read(part: int, document: int) -> Iterator[Keyed]:
            if where.kind == "text":
                return itertools.islice(_text_documents(where, names[part], unread), document, None)
            return ((text or "", text) for text in texts_of_file(where, names[part], shape, unread, document))

        known = [sizes[name] for name in names]
        return DocumentStream(where.asked, identity, len(names), read, shape, names, known, unread=unread)

    train, *heldout = (stream(splits[name]) for name in sources.pick_splits(splits, where.asked, where.split))
    return replace(train, heldout=next(iter(heldout), None))


def _text_documents(where: Files, name: str, unread: Unread) -> Iterator[Keyed]:
    """The documents of the text file ``name``: the whole file, or groups of lines of a lone file."""
    path = where.files[name]
    try:
        if len(where.files) == 1:
            yield from ((f"{name}:{i}", text) for i, text in enumerate(_line_groups(path, unread)))
        else:
            yield name, path.read_text(encoding="utf-8-sig")
    except (UnicodeDecodeError, OSError) as error:
        if where.skip_undecodable:
            return
        if isinstance(error, UnicodeDecodeError) and unread.policy == "error":
            raise sources.not_utf8(replace(where, files={name: path}), error) from error
        unread(name, None, Unreadable(f"{type(error).__name__}: {error}", rest=True))


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


def _stream_of_records(where: HubDataset | HeldRecords, reads: Sequence[RecordShape]) -> DocumentStream:
    splits, identity = open_records(where)
    chosen = [splits[name] for name in sources.pick_splits(splits, where.asked, where.split)]
    features = [columns_of(where, split) for split in chosen]
    shape, unread = recognise_splits(features, where.asked, reads), Unread(where.asked, "error")

    def stream(split: IterableDataset, known: Mapping[str, Any], side: int) -> DocumentStream:
        hidden = {n: f for n, f in known.items() if n not in shape.columns and (shape.is_text or require_decoding(f))}
        columns = split.select_columns([name for name in known if name not in hidden]) if hidden else split
        others = unread_features(hidden, shape)

        def read(part: int, document: int) -> Iterator[Keyed]:
            # `skip` is exact in every kind of file, and drops whole Arrow tables without converting them
            records: Any = columns.shard(split.num_shards, part).skip(document)
            try:
                for number, record in enumerate(records, start=document + 1):
                    text = shape.document(record, typed=split.features is not None)
                    unread.count(f"{side}/{part}", number, [*others, *unread_columns(record, shape)])
                    yield text or "", text
            except UnicodeDecodeError as error:
                raise sources.not_utf8(where, error) from error
            except Exception as error:  # of many types: all failures of a network or a file
                raise UserError(
                    asked=f"{where.asked}: documents of its part {part + 1} of {split.num_shards}",
                    found=sources.cause(error),
                    why="the stream broke off; what was trained on is in the last checkpoint",
                    instead="the same command with --resume_from_checkpoint latest, when the data can be read again",
                ) from error

        name = f"{identity}, {', '.join(shape.required)}"
        return DocumentStream(where.asked, name, split.num_shards, read, shape, unread=unread)

    train, *heldout = map(stream, chosen, features, itertools.count())
    return replace(train, heldout=next(iter(heldout), None))
