"""Documents from files or the hub, streamed or stored, read part by part (file by file) from any document on."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
from datasets import Dataset, Features, IterableDataset, Value
from datasets.features.features import require_decoding  # semi-private: datasets 5.2

from shardwright.data.records import record_sources as sources
from shardwright.data.records.fields import unread_columns, unread_features
from shardwright.data.records.files import Unreadable
from shardwright.data.records.record_sources import AnyDataset, Files, HeldRecords, HubDataset
from shardwright.data.records.records import columns_of, load_records, open_records, shape_of_files, texts_of_file
from shardwright.data.records.shapes import recognise_splits
from shardwright.data.records.unreadable import Unread
from shardwright.errors import UserError
from shardwright.files.cache import digest
from shardwright.objectives.objective import RecordShape, text_shape
from shardwright.objectives.sft import SHAPES

# a lone text file is cut at line ends into about a hundred documents, so that some can be held out
DOCUMENTS_OF_ONE_FILE = 100
DOCUMENT_BYTES = (4 << 10, 1 << 20)  # least and most bytes of such a document, not counting its last line
RECORDS_AT_ONCE = 4096  # validated together
Keyed = tuple[str, str | None]  # a document's key (a text file's is its name, a record's is its text), and its text


@dataclass(frozen=True)
class DocumentStream:
    """Documents that are read on demand. A stream keeps none; those that are stored lie on this disk already."""

    asked: str  # the user's words for the dataset, for errors
    identity: str  # a readable name for the documents, the same on every machine
    parts: int  # how many files there are; in a folder of text files each is one document
    read: Callable[[int, int], Iterator[Keyed]]  # (part, document) → the documents from that one to the part's end
    shape: RecordShape = text_shape()  # noqa: RUF009  (it is frozen)
    names: Sequence[str] = ()  # of the parts, if they are files
    sizes: Sequence[int] = ()  # bytes of the parts, if they are files
    # the documents that are held out, if that is known, by the names of their sets; an only one's is empty
    heldout: Mapping[str, DocumentStream] = field(default_factory=dict)
    unread: Unread = Unread("a stream", "error")  # noqa: RUF009  (it counts nothing)
    has_names: bool = False  # keys are names of files, and not the texts
    table: Dataset | None = None  # stored texts as they lie on the disk, in a column `text`
    fingerprint: str = ""  # of documents on this disk: changes when they do

    def documents(self) -> Iterator[Keyed]:
        return itertools.chain.from_iterable(self.read(part, 0) for part in range(self.parts))

    def place_of(self, document: str) -> str | None:
        """The file and row (from 1) of a document's first occurrence; None: nowhere. Reads everything again."""
        for part in range(self.parts):
            for row, (_, text) in enumerate(self.read(part, 0), start=1):
                if text == document:
                    return f"{self.name_of(part)}, row {row}"
        return next(filter(None, (each.place_of(document) for each in self.heldout.values())), None)

    def name_of(self, part: int) -> str:
        """A part's name for people."""
        return self.names[part] if self.names else f"part {part + 1} of {self.parts}"

    def first(self, most: int) -> DocumentStream:
        """The first ``most`` documents, file after file, as one part."""

        def read(part: int, document: int) -> Iterator[Keyed]:
            return itertools.islice(self.documents(), document, most)

        return replace(
            self,
            identity=f"{self.identity}, the first {most}",
            fingerprint=digest([self.fingerprint, most]),
            table=None if self.table is None else self.table.take(min(most, len(self.table))),
            parts=1,
            read=read,
            names=(),
            sizes=(),
        )

    def evaluated_on(self, others: Mapping[str, DocumentStream]) -> DocumentStream:
        """The documents with those of ``others`` held out; raises UserError if one is of another shape."""
        for other in others.values():
            check_evaluated([self.shape], other)
        identity = "; ".join(f"{self.identity}, evaluated on {other.identity}" for other in others.values())
        key = [self.fingerprint, *((name, other.fingerprint) for name, other in others.items()), "eval"]
        return replace(self, identity=identity, fingerprint=digest(key), heldout=others)

    def stored(self, scratch: Path) -> Dataset:
        """All documents, in a column ``text``, and their names in ``name`` if they are files.

        They are written to the folder ``scratch``, which must outlive the result, unless they lie on the disk. Raises
        UserError for faults of their content.
        """
        if self.table is not None:
            _check_utf8(self.table, self.asked)
            return self.table

        def rows() -> Iterator[dict[str, str | None]]:
            # a row without text stays, as None
            names = self.has_names
            return ({"text": text, "name": key} if names else {"text": text} for key, text in self.documents())

        features = Features(text=Value("large_string"), **({"name": Value("string")} if self.has_names else {}))
        try:
            return Dataset.from_generator(rows, features=features, cache_dir=str(scratch), fingerprint=scratch.name)
        except datasets.exceptions.DatasetGenerationError as error:
            raise (error.__cause__ if isinstance(error.__cause__, UserError | OSError) else error) from None

    @property
    def unread_tally(self) -> Counter[str]:
        """The counts of what was not read, of held-out documents too."""
        each = dict.fromkeys([self.unread, *(other.unread for other in self.heldout.values())])
        return sum((unread.tally for unread in each), Counter())


def key_hash(key: str) -> int:
    """The hash, 0 to 2**63 - 1, of a document's key; Python's hash() would differ in each process."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest()) >> 1


def has_text(text: str | None) -> bool:
    """Whether a document holds anything but white space."""
    return bool(text) and not str(text).isspace()


def _check_utf8(table: Dataset, asked: str) -> None:
    """Refuse bytes that are no text, which Arrow and Parquet files may hold as text."""
    for batch in table.with_format("arrow").iter(RECORDS_AT_ONCE):
        try:
            batch.validate(full=True)
        except pa.ArrowInvalid as error:
            raise sources.not_utf8(asked, error) from error


def check_evaluated(shapes: Sequence[RecordShape], other: DocumentStream) -> None:
    """Refuse to evaluate on records of none of the ``shapes`` to train on, whatever their columns' names."""
    if other.shape.name not in {shape.name for shape in shapes}:
        kinds = dict.fromkeys(f"{shape.name} ({shape.read_as})" for shape in shapes)
        raise UserError(
            asked=f"to evaluate on {other.asked}",
            found=f"its records are {other.shape.name} ({other.shape.read_as}), and those to train on "
            f"{' or '.join(kinds)}",
            why="both are made into rows in one way",
            instead="an --eval_dataset whose columns are those of --dataset",
        )


def find_stream(
    dataset: AnyDataset,
    reads: Sequence[RecordShape] = SHAPES,
    on_bad_row: str = "error",
    stored: bool = False,
    option: str = "dataset",
) -> DocumentStream:
    """The documents that ``--dataset``, or another ``option``, names; None is the standard library.

    Only their columns are read. To be ``stored``, a hub dataset is downloaded here. Raises UserError if nothing is
    there, or nothing to read, or no column of text; ``read`` does if the stream breaks.
    """
    where = sources.locate(dataset, option)
    if isinstance(where, Files):
        return _stream_of_files(where, reads, on_bad_row)
    return _stream_of_records(where, reads, stored)


def _stream_of_files(where: Files, reads: Sequence[RecordShape], on_bad_row: str) -> DocumentStream:
    """The documents of the files at ``where``; a row without text, or unreadable, is None."""
    unread = Unread(where.asked, on_bad_row)
    shape, splits, is_text = shape_of_files(where, reads), where.by_split(), where.kind == "text"
    stats = {name: path.stat() for name, path in where.files.items()}
    sizes = {name: stat.st_size for name, stat in stats.items()}
    stamps = [[n, str(where.files[n].resolve()), stat.st_size, stat.st_mtime_ns] for n, stat in stats.items()]
    key = [stamps, *([] if is_text else shape.read_as.split(", ")), on_bad_row, *([where.split] if where.split else [])]
    key += [sorted(splits.items())] if len(splits) > 1 else []
    # of names and sizes alone, so that a copy on another machine counts as the same data
    identity = f"{len(sizes)} {where.kind} files of {sum(sizes.values()):,} bytes ({digest(list(sizes.items()))[:8]})"
    if not is_text:
        identity += f", {shape.read_as}" + (f", split {where.split}" if where.split else "")

    def stream(names: list[str]) -> DocumentStream:
        def read(part: int, document: int) -> Iterator[Keyed]:
            if is_text:
                return itertools.islice(_text_documents(where, names[part], unread), document, None)
            return ((text or "", text) for text in texts_of_file(where, names[part], shape, unread, document))

        known = [sizes[name] for name in names]
        return DocumentStream(
            *(where.asked, identity, len(names), read, shape, names, known),
            unread=unread,
            has_names=is_text,
            fingerprint=digest(key),
        )

    return _with_heldout(*(stream(splits[name]) for name in sources.pick_splits(splits, where.asked, where.split)))


def _with_heldout(train: DocumentStream, heldout: DocumentStream | None = None) -> DocumentStream:
    return train if heldout is None else replace(train, heldout={"": heldout})


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
            raise sources.not_utf8(where.asked, error, path) from error
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


def _stream_of_records(where: HubDataset | HeldRecords, reads: Sequence[RecordShape], stored: bool) -> DocumentStream:
    splits, identity = load_records(where) if stored else open_records(where)
    chosen = [splits[name] for name in sources.pick_splits(splits, where.asked, where.split)]
    features = [columns_of(where, split) for split in chosen]
    shape, unread = recognise_splits(features, where.asked, reads), Unread(where.asked, "error")
    name = f"{identity}, {shape.read_as}"
    # semi-private: datasets/arrow_dataset.py, datasets 5.2; equal in every process that loads the same cached files
    key = digest([name, *(split._fingerprint for split in chosen if isinstance(split, Dataset))])

    def stream(split: Dataset | IterableDataset, known: Mapping[str, Any], side: int) -> DocumentStream:
        hidden = {n: f for n, f in known.items() if n not in shape.columns and (shape.is_text or require_decoding(f))}
        shown: Any = split.select_columns([name for name in known if name not in hidden]) if hidden else split
        others, table = unread_features(hidden, shape), None
        if isinstance(split, Dataset) and shape.is_text:
            full = {n: f for n, f in hidden.items() if split.data.column(n).null_count < split.data.num_rows}
            unread.columns.update(dict.fromkeys(unread_features(full, shape), len(split)))
            others, table = [], shown.rename_columns({shape.name_of["text"]: "text"})
        columns = shown.to_iterable_dataset() if isinstance(split, Dataset) else shown

        def read(part: int, document: int) -> Iterator[Keyed]:
            # `skip` is exact in every kind of file, and drops whole Arrow tables without converting them
            records: Any = columns.shard(columns.num_shards, part).skip(document)
            try:
                for number, record in enumerate(records, start=document + 1):
                    text = shape.document(record, typed=split.features is not None)
                    unread.count(f"{side}/{part}", number, [*others, *unread_columns(record, shape)])
                    yield text or "", text
            except UnicodeDecodeError as error:
                raise sources.not_utf8(where.asked, error) from error
            except Exception as error:  # of many types: all failures of a network or a file
                raise UserError(
                    asked=f"{where.asked}: documents of its part {part + 1} of {columns.num_shards}",
                    found=sources.cause(error),
                    why="the stream broke off; what was trained on is in the last checkpoint",
                    instead="the same command with --resume_from_checkpoint latest, when the data can be read again",
                ) from error

        parts = columns.num_shards
        return DocumentStream(where.asked, name, parts, read, shape, unread=unread, table=table, fingerprint=key)

    return _with_heldout(*map(stream, chosen, features, itertools.count()))
