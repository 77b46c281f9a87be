"""Streamed rows: documents are read, tokenised and packed on demand, and their rows shuffled in windows.

An epoch reads the stream's parts (files) in an order drawn by seed and epoch, and packs their documents in sequence.
Each window of ``shuffle_rows`` rows is permuted by seed, epoch and its number; rows never leave their window.

Shape legend: S tokens in a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from shardwright.data.records.document_stream import DocumentStream, has_text, key_hash
from shardwright.data.records.prefetch import ahead, stop_if_the_program_ends
from shardwright.data.rows.packing import CHARACTERS_AT_ONCE, DOCUMENTS_AT_ONCE, AnyPacker, Columns
from shardwright.data.rows.rows import ROWS_AT_ONCE, count_in, scored_counts
from shardwright.errors import UserError
from shardwright.hosts.hosts import hosts


@dataclass(frozen=True)
class StreamPosition:
    """A row's place in an epoch, from which reading can start without anything before it."""

    part: int = 0  # position in the epoch's order of the stream's parts
    document: int = 0  # its number in that part
    skip: int = 0  # rows that the documents from there on give before this one
    rest: list[int] = field(default_factory=list)  # tokens of earlier documents that no row holds yet


@dataclass(frozen=True)
class Window:
    """Rows in the order of training."""

    epoch: int
    number: int
    start: StreamPosition  # of the first row before they were permuted
    columns: Columns

    def __len__(self) -> int:
        return _count(self.columns)


@dataclass(frozen=True)
class StreamedRows:
    """Rows of S tokens, made from a stream of documents and never stored."""

    documents: DocumentStream
    new_packer: Callable[[], AnyPacker]
    left_out: frozenset[int]  # hashes of the documents that are held out
    shuffle_rows: int  # rows of a window; they take ``shuffle_rows`` x S x 4 bytes a column, twice while being permuted
    fingerprint: str
    tokens: None = None  # an epoch's are not known

    def order(self, seed: int, batch_size: int, cursor: Mapping[str, Any]) -> StreamedOrder:
        return StreamedOrder(self, seed, batch_size, cursor)

    def token_counts(self, vocab_size: int) -> np.ndarray:
        return scored_counts(self.first(ROWS_AT_ONCE), vocab_size)

    def first(self, count: int) -> Columns:
        """The first ``count`` rows at most, not shuffled. [rows, S]"""
        return _EpochReader(self, range(self.documents.parts), StreamPosition()).take(count)

    def windows(self, seed: int, epoch: int, number: int, start: StreamPosition, at_least: int) -> Iterator[Window]:
        """Endless windows from window ``number`` of ``epoch`` on, which begins at ``start``.

        Tokens that fill no row at an epoch's end begin the next epoch. Raises UserError if an epoch has fewer rows than
        ``at_least``, or the stream broke off.
        """
        while True:
            parts = np.random.default_rng([seed, epoch]).permutation(self.documents.parts).tolist()
            reader = _EpochReader(self, parts, start)
            rows = number * self.shuffle_rows
            while count := _count(columns := reader.take(self.shuffle_rows)):
                order = np.random.default_rng([seed, epoch, number]).permutation(count)
                yield Window(epoch, number, start, {name: values[order] for name, values in columns.items()})
                rows, number, start = rows + count, number + 1, reader.place
            if rows < at_least:
                raise UserError(
                    asked=f"a global batch of {at_least} rows",
                    found=f"{self.documents.asked} ended after {rows} rows",
                    why="they don't fill one batch",
                    instead="no --streaming: stored rows come several times in a batch; or more data, a shorter "
                    "--sequence_length, or a smaller --per_device_train_batch_size",
                )
            epoch, number, start = epoch + 1, 0, StreamPosition(rest=reader.place.rest)


class _EpochReader:
    """The rows of one epoch, in the order of its documents, from ``start`` on."""

    def __init__(self, rows: StreamedRows, parts: Sequence[int], start: StreamPosition) -> None:
        self._rows, self._packer = rows, rows.new_packer()
        self._packer.rest = np.array(start.rest, dtype=np.int32)
        self._documents = _documents(rows.documents, parts, start.part, start.document)
        self._group, self._read = start, (start.part, start.document)
        self._columns, self._skip = self._packer.rows([]), 0
        if start.skip:
            self._next_group()
            self._skip = start.skip

    @property
    def place(self) -> StreamPosition:
        return replace(self._group, skip=self._skip)

    def take(self, count: int) -> Columns:
        """The next ``count`` rows; fewer at the epoch's end. [rows, S]"""
        pieces: list[Columns] = []
        while True:
            pieces.append({name: values[self._skip : self._skip + count] for name, values in self._columns.items()})
            taken = _count(pieces[-1])
            self._skip, count = self._skip + taken, count - taken
            if not count or not (taken or self._next_group()):
                return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}

    def _next_group(self) -> bool:
        """Pack the next group of documents; False: there are none."""
        self._group, self._skip = StreamPosition(*self._read, rest=self._packer.rest.tolist()), 0
        texts: list[str] = []
        characters = 0
        for read, key, text in self._documents:
            self._read = read
            if text and has_text(text) and not (self._rows.left_out and key_hash(key) in self._rows.left_out):
                texts.append(text)
                characters += len(text)
            if len(texts) == DOCUMENTS_AT_ONCE * self._packer.groups or characters >= CHARACTERS_AT_ONCE:
                break
        stop_if_the_program_ends()
        self._columns = self._packer.rows(texts)
        return bool(texts)


def _count(columns: Columns) -> int:
    return len(columns["input_ids"])


def _documents(
    stream: DocumentStream, parts: Sequence[int], part: int, document: int
) -> Iterator[tuple[tuple[int, int], str, str | None]]:
    """((part, document) of the next one, key, text) of the documents of ``parts``, in this order, from one on."""
    for position in range(part, len(parts)):
        for number, (key, text) in enumerate(stream.read(parts[position], document), start=document):
            yield (position, number + 1), key, text
        document = 0


def _place(values: Mapping[str, Any]) -> StreamPosition:
    """The place in a cursor; raises ValueError or TypeError if it holds none."""
    place = StreamPosition(**values)
    for name in ("part", "document", "skip"):
        count_in(vars(place), name)
    if not isinstance(place.rest, list) or not all(type(token) is int and 0 <= token < 1 << 31 for token in place.rest):
        raise ValueError("tokens of earlier documents that are none")
    return place


class StreamedOrder:
    """The rows of a stream, window by window. While one window is used, the next is made on a thread."""

    def __init__(self, rows: StreamedRows, seed: int, batch_size: int, cursor: Mapping[str, Any]) -> None:
        self._asked, self._size = rows.documents.asked, rows.shuffle_rows
        self._epoch, self._number = count_in(cursor, "epoch"), count_in({"window": 0, **cursor}, "window")
        self._start = _place(cursor.get("start", {}))
        self._taken = count_in(cursor, "row") - self._number * self._size
        if not 0 <= self._taken <= self._size or self._start.part > rows.documents.parts:
            raise ValueError(f"row {cursor['row']} in window {self._number} of {self._size} rows, epoch {self._epoch}")
        self._windows = rows.windows(seed, self._epoch, self._number, self._start, batch_size)
        self._window: Window | None = None
        self._ahead: Future[Window] | None = None

    @property
    def epoch(self) -> float:
        return float(self._epoch)

    def take(self, count: int) -> list[tuple[Columns, int]]:
        while self._window is None or self._taken == len(self._window):
            self._window = self._next_window()
        first, self._taken = self._taken, min(self._taken + count, len(self._window))
        return [(self._window.columns, row) for row in range(first, self._taken)]

    def read(self, taken: Sequence[tuple[Columns, int]]) -> Columns:
        return {name: np.stack([columns[name][row] for columns, row in taken]) for name in taken[0][0]}

    def cursor(self) -> dict[str, Any]:
        row = self._number * self._size + self._taken
        return {"epoch": self._epoch, "row": row, "window": self._number, "start": vars(self._start)}

    def _next_window(self) -> Window:
        epoch, number, start, columns = hosts().once(self._made_ahead)  # the first host reads the stream for all
        window = Window(epoch, number, StreamPosition(**start), columns)
        if self._window is not None:
            self._epoch, self._number, self._start, self._taken = window.epoch, window.number, window.start, 0
        elif (window.epoch, window.number) != (self._epoch, self._number) or self._taken > len(window):
            raise UserError(
                asked=f"to go on in {self._asked} after row {self._number * self._size + self._taken} of an epoch",
                found="the stream ends before it",
                why="it is not the stream that was read then",
                instead="the data as they were, or a run from the start",
            )
        return window

    def _made_ahead(self) -> tuple[int, int, dict[str, Any], Columns]:
        window = (self._ahead or ahead(self._windows)).result()
        self._ahead = ahead(self._windows)
        return window.epoch, window.number, vars(window.start), window.columns
