"""Rows that nothing holds: documents read, tokenised and packed as training asks for them, and shuffled in windows.

An epoch reads the stream's parts (files) in an order drawn by seed and epoch, packs their documents one after another,
and cuts the rows into windows of ``shuffle_rows``, each permuted by seed, epoch and its number. What a part's order
leaves together, a window does not mix with what is further away than itself.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from trainer.data.document_stream import Stream
from trainer.data.documents import has_text, key_hash
from trainer.data.packing import Columns, Packer
from trainer.errors import UserError

# documents tokenised in one go: so many, or so much text
DOCUMENTS_AT_ONCE, CHARACTERS_AT_ONCE = 256, 4 << 20


_NEXT_WINDOW, _ending, SECONDS_TO_END = "next window", threading.Event(), 10


@dataclass(frozen=True)
class Place:
    """Where a row begins in an epoch: what was read before it is not read again.

    Args:
        part: position in the epoch's order of the stream's parts.
        document: of that part.
        skip: rows that the documents from here on give before it.
        rest: tokens of earlier documents that no row holds yet.
    """

    part: int = 0
    document: int = 0
    skip: int = 0
    rest: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Window:
    """Rows in the order of training. ``start``: where the first of them began before they were permuted."""

    epoch: int
    number: int
    start: Place
    columns: Columns

    def __len__(self) -> int:
        return len(self.columns["input_ids"])


@dataclass(frozen=True)
class RowStream:
    """Rows of S tokens of a stream of documents.

    Args:
        documents: the stream.
        new_packer: makes what turns documents into rows.
        left_out: hashes of documents that are held out.
        shuffle_rows: rows of a window; they take ``shuffle_rows`` x S x 4 bytes a column, twice while one is permuted.
        fingerprint: names the rows and their order, but for the seed; the same on every machine.
    """

    documents: Stream
    new_packer: Callable[[], Packer]
    left_out: frozenset[int]
    shuffle_rows: int
    fingerprint: str

    def first(self, count: int) -> Columns:
        """The first ``count`` rows (fewer, if the stream has not so many), not shuffled."""
        return _Reader(self, range(self.documents.parts), Place()).take(count)

    def windows(self, seed: int, epoch: int, number: int, start: Place, at_least: int) -> Iterator[Window]:
        """Windows without end, from one on that began at ``start``; what fills no row begins the next epoch.

        Raises:
            UserError: an epoch has fewer rows than ``at_least``, or the stream broke off.
        """
        while True:
            parts = np.random.default_rng([seed, epoch]).permutation(self.documents.parts).tolist()
            reader = _Reader(self, parts, start)
            rows = number * self.shuffle_rows
            while len((columns := reader.take(self.shuffle_rows))["input_ids"]):
                order = np.random.default_rng([seed, epoch, number]).permutation(len(columns["input_ids"]))
                yield Window(epoch, number, start, {name: values[order] for name, values in columns.items()})
                rows, number, start = rows + len(order), number + 1, reader.place
            if rows < at_least:
                raise too_few_rows(at_least, f"{self.documents.asked} ended after {rows} rows")
            epoch, number, start = epoch + 1, 0, Place(rest=reader.place.rest)


class _Reader:
    """The rows of one epoch, in the order of its documents."""

    def __init__(self, rows: RowStream, parts: Sequence[int], start: Place) -> None:
        self._rows, self._packer = rows, rows.new_packer()
        self._packer.rest = np.array(start.rest, dtype=np.int32)
        self._documents = _documents(rows.documents, parts, start.part, start.document)
        self._group, self._read = start, (start.part, start.document)
        self._columns, self._skip = self._packer.rows([]), 0
        if start.skip:
            self._next_group()
            self._skip = start.skip

    @property
    def place(self) -> Place:
        """Where the next row begins."""
        return replace(self._group, skip=self._skip)

    def take(self, count: int) -> Columns:
        """The next ``count`` rows; fewer where the epoch ends."""
        pieces = [{name: values[:0] for name, values in self._columns.items()}]
        missing = count
        while missing:
            piece = {name: values[self._skip : self._skip + missing] for name, values in self._columns.items()}
            taken = len(piece["input_ids"])
            if taken:
                pieces.append(piece)
                self._skip, missing = self._skip + taken, missing - taken
            elif not self._next_group():
                break
        return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}

    def _next_group(self) -> bool:
        """Pack the next documents; False: there are none."""
        self._group, self._skip = Place(*self._read, rest=self._packer.rest.tolist()), 0
        texts: list[str] = []
        characters = 0
        for read, key, text in self._documents:
            self._read = read
            if text and has_text(text) and not (self._rows.left_out and key_hash(key) in self._rows.left_out):
                texts.append(text)
                characters += len(text)
            if len(texts) == DOCUMENTS_AT_ONCE or characters >= CHARACTERS_AT_ONCE:
                break
        if _ending.is_set():
            raise InterruptedError("the program ends")
        self._columns = self._packer.rows(texts)
        return bool(texts)


def _documents(
    stream: Stream, parts: Sequence[int], part: int, document: int
) -> Iterator[tuple[tuple[int, int], str, str | None]]:
    """(where the next document is, what this one is known by, its text) from document ``document`` of a part on."""
    for position in range(part, len(parts)):
        for number, (key, text) in enumerate(stream.read(parts[position], document), start=document):
            yield (position, number + 1), key, text
        document = 0


class StreamOrder:
    """The rows of a stream window by window, the next of which is made on a thread while one is used."""

    def __init__(self, rows: RowStream, seed: int, batch_size: int, cursor: Mapping[str, Any]) -> None:
        self._asked, self._size = rows.documents.asked, rows.shuffle_rows
        self._epoch, self._number = int(cursor["epoch"]), int(cursor.get("window", 0))
        self._start, self._taken = Place(**cursor.get("start", {})), int(cursor["row"]) - self._number * self._size
        if self._epoch < 0 or not 0 <= self._taken <= self._size:
            raise ValueError(f"row {cursor['row']} in window {self._number} of {self._size} rows, epoch {self._epoch}")
        self._windows = rows.windows(seed, self._epoch, self._number, self._start, batch_size)
        self._window: Window | None = None
        self._ahead: _Ahead | None = None

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
        if self._ahead is None:
            self._ahead = _Ahead(self._windows)
        window = self._ahead.result()
        if self._window is not None:
            self._epoch, self._number, self._start, self._taken = window.epoch, window.number, window.start, 0
        elif (window.epoch, window.number) != (self._epoch, self._number) or self._taken > len(window):
            raise UserError(
                asked=f"to go on in {self._asked} after row {self._number * self._size + self._taken} of an epoch",
                found="the stream ends before it",
                why="it is not the stream that was read then",
                instead="the data as they were, or a run from the start",
            )
        self._ahead = _Ahead(self._windows)
        return window


class _Ahead:
    """The next of ``items``, made on a thread; what goes wrong there is raised by :meth:`result`."""

    def __init__(self, items: Iterator[Window]) -> None:
        self._items = items
        # a daemon: a program that ends does not wait for a network that is silent
        self._thread = threading.Thread(target=self._run, name=_NEXT_WINDOW, daemon=True)
        self._thread.start()

    def result(self) -> Window:
        self._thread.join()
        if isinstance(self._made, BaseException):
            raise self._made
        return self._made

    def _run(self) -> None:
        self._made: Window | BaseException
        try:
            self._made = next(self._items)
        except BaseException as error:
            self._made = error


@atexit.register
def _end_threads() -> None:
    """Python must not end while one is inside the tokenizer: that can abort the process."""
    _ending.set()
    for thread in threading.enumerate():
        if thread.name == _NEXT_WINDOW:
            thread.join(SECONDS_TO_END)


def too_few_rows(batch_size: int, found: str) -> UserError:
    """The error of an epoch that does not fill one batch."""
    return UserError(
        asked=f"a global batch of {batch_size} rows",
        found=found,
        why="they don't fill one batch",
        instead="more data, a shorter --sequence_length, or a smaller --per_device_train_batch_size or "
        "--gradient_accumulation_steps",
    )
