"""Rows of tokens to train on: the protocol of stored and streamed ones, and the stored ones.

Shape legend: S tokens in a row.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import datasets
import numpy as np
from datasets import Dataset, Features, List, Value

from shardwright.data.records.document_stream import DocumentStream
from shardwright.data.rows.packing import CHARACTERS_AT_ONCE, DOCUMENTS_AT_ONCE, AnyPacker, Columns
from shardwright.errors import UserError
from shardwright.files.cache import digest
from shardwright.files.scratch import scratch_folder
from shardwright.models.ops.labels import IGNORE

FINGERPRINT_ROWS = 64  # stored rows in a fingerprint; reading them takes milliseconds
ROWS_AT_ONCE = 1024  # rows whose tokens are counted together
TRIED, BYTES_A_TOKEN = 2, 4  # documents that say how many tokens all have


class Rows(Protocol):
    """Rows to train on, stored or streamed."""

    @property
    def fingerprint(self) -> str:
        """A name for the rows and their order, all but the seed; the same on every machine."""

    @property
    def tokens(self) -> int | None:
        """Tokens of an epoch; None: unknown."""

    def order(self, seed: int, batch_size: int, cursor: Mapping[str, Any]) -> Order:
        """The training order of the rows from ``cursor`` on; ``{"epoch": 0, "row": 0}`` is the start.

        Raises:
            UserError: a stream of fewer than ``batch_size`` rows, at its end. Stored rows are repeated within a batch.
            KeyError, TypeError, ValueError: ``cursor`` does not come from an order of these rows.
        """

    def token_counts(self, vocab_size: int) -> np.ndarray:
        """The times that each token is scored: in all stored rows, or in a stream's first. [vocab_size]"""


class Order(Protocol):
    """Rows in their training order, epoch after epoch, from a cursor on."""

    @property
    def epoch(self) -> float:
        """Epochs done: with a fraction if an epoch's length is known, else whole ones."""

    def take(self, count: int) -> Sequence[Any]:
        """Marks of the next rows, for :meth:`read`: between 1 and ``count`` of them, all of one epoch."""

    def read(self, taken: Sequence[Any]) -> Columns:
        """The values of rows that :meth:`take` gave. [rows, S]"""

    def cursor(self) -> dict[str, Any]:
        """The place of the next row, JSON-able. The caller must not change it."""


def few_rows(rows: int, batch_size: int) -> str:
    """The line of a run whose ``rows`` fill no batch."""
    least, more = divmod(batch_size, rows)
    times = f"{least} to {least + 1} times" if more else f"{least} times"
    return f"{rows} {'row' if rows == 1 else 'rows'} for a batch of {batch_size}: each comes {times} in it"


def scored_counts(columns: Columns, vocab_size: int) -> np.ndarray:
    """The times that each token is scored in rows. [vocab_size]"""
    tokens = columns.get("labels", columns["input_ids"])
    return np.bincount(tokens[tokens != IGNORE], minlength=vocab_size)


def count_in(cursor: Mapping[str, Any], name: str) -> int:
    """A number of a cursor, perhaps from a file; raises ValueError if it is no count, KeyError if there is none."""
    value = cursor[name]
    if type(value) is not int or not 0 <= value < 1 << 53:
        raise ValueError(f"{name} {str(value)[:80]}")
    return value


class StoredRows:
    """Rows stored in a dataset. An epoch takes all of them, in an order drawn by seed and epoch.

    Args:
        dataset: columns of lists of S integers: ``input_ids``, and perhaps ``labels``, ``segment_ids`` and
            ``position_ids``; others of S * width numbers are read as [S, width].
        tally: counts from their making.
    """

    def __init__(self, dataset: Dataset, tally: Mapping[str, int] | None = None) -> None:
        self.dataset, self.tally = dataset, dict(tally or {})
        self._arrays = dataset.with_format("numpy")

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def fingerprint(self) -> str:
        """The number of rows, and a hash of it and of up to 64 rows spread evenly over all."""
        sample = np.linspace(0, len(self) - 1, min(FINGERPRINT_ROWS, len(self))).astype(np.int64)
        content = hashlib.blake2b(str(len(self)).encode(), digest_size=8)
        for name, values in sorted(self.read(sample).items()):
            content.update(name.encode() + values.astype("<f4" if values.dtype.kind == "f" else "<i8").tobytes())
        return f"{len(self)} rows, {content.hexdigest()}"

    @property
    def tokens(self) -> int:
        return len(self) * len(self.dataset[0]["input_ids"])

    def spread(self, most: int) -> StoredRows:
        """At most ``most`` of the rows, in order and spread evenly over all; 0: every row."""
        if not 0 < most < len(self):
            return self
        return StoredRows(self.dataset.select(np.arange(most) * len(self) // most))

    def order(self, seed: int, batch_size: int, cursor: Mapping[str, Any]) -> StoredOrder:
        return StoredOrder(self, seed, cursor)

    def groups(self) -> Iterator[Columns]:
        """All rows in order, as many together as are held at once. [rows, S]"""
        return self._arrays.iter(ROWS_AT_ONCE)

    def token_counts(self, vocab_size: int) -> np.ndarray:
        return sum((scored_counts(columns, vocab_size) for columns in self.groups()), np.zeros(vocab_size, dtype=int))

    def read(self, numbers: np.ndarray) -> Columns:
        """The rows with these numbers. [rows, S], or [rows, S, width]"""
        found = self._arrays[numbers]
        length = found["input_ids"].shape[1]
        return {n: v if v.shape[1] == length else v.reshape(len(v), length, -1) for n, v in found.items()}


class StoredOrder:
    """All rows of a dataset, permuted anew each epoch; marks are their numbers."""

    def __init__(self, rows: StoredRows, seed: int, cursor: Mapping[str, Any]) -> None:
        self._rows, self._seed = rows, seed
        self._epoch, self._row = count_in(cursor, "epoch"), count_in(cursor, "row")
        if self._row >= len(rows):
            raise ValueError(f"row {self._row} of {len(rows)} in epoch {self._epoch}")
        self._permutation = self._draw()

    @property
    def epoch(self) -> float:
        return self._epoch + self._row / len(self._rows)

    def take(self, count: int) -> list[int]:
        taken = self._permutation[self._row : self._row + count].tolist()
        self._row += len(taken)
        if self._row == len(self._rows):
            self._epoch, self._row = self._epoch + 1, 0
            self._permutation = self._draw()
        return taken

    def read(self, taken: Sequence[int]) -> Columns:
        return self._rows.read(np.asarray(taken))

    def cursor(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "row": self._row}

    def _draw(self) -> np.ndarray:
        return np.random.default_rng([self._seed, self._epoch]).permutation(len(self._rows))


def write_rows(
    splits: Mapping[str, Dataset],
    folder: Path,
    new_packer: Callable[[], AnyPacker],
    documents: DocumentStream,
) -> None:
    """Write the rows of each split of ``documents`` to ``folder``, and last their tallies.

    Raises UserError if a split doesn't fill one row.
    """
    tallies = {}
    for name, split in splits.items():
        packer, mean = new_packer(), max(1, split.data.nbytes // max(1, split.data.num_rows))
        if packer.groups > 1 and split.data.nbytes > CHARACTERS_AT_ONCE:
            mean = max(mean, _size_of_samples(split, new_packer()))
        packed = split.map(
            packer,
            batched=True,
            batch_size=max(1, min(DOCUMENTS_AT_ONCE, CHARACTERS_AT_ONCE // mean) * packer.groups),
            features=Features({column: _feature(packer, column) for column in packer.columns}),
            cache_file_name=str(folder / f"{name}.arrow"),
            new_fingerprint=digest([folder.name, name]),
        )
        tallies[name] = dict(packer.tally)
        if not len(packed):
            scored = not packer.tally.get("without target")
            raise UserError(
                asked=f"{documents.asked} in rows of {packer.length} tokens",
                found=f"{len(split)} {name} documents of {len(packer.rest)} tokens in all"
                + "".join(f", {count} {what}" for what, count in packer.tally.items() if count),
                why="they don't fill one row" if scored else "what a row holds of them has nothing to train on",
                instead="a larger dataset, or a shorter --sequence_length"
                if scored
                else f"--sequence_length {2 * packer.length} or more, which holds an answer; or records with one",
            )
    first = next(iter(tallies.values()))
    first |= documents.unread_tally
    (folder / "rows.json").write_text(json.dumps(tallies))


def _size_of_samples(split: Dataset, packer: AnyPacker) -> int:
    """Bytes of text that as many tokens have as a document's samples; 0: no more than its own.

    A chat of which each turn is a sample of its own, with all before it, has many times its own tokens.
    """
    numbers = np.linspace(0, len(split) - 1, min(TRIED, len(split))).astype(np.int64)
    texts = [text for text in split[numbers]["text"] if text]
    packer.rows(texts)
    tokens = packer.tally["tokens"]
    return tokens * BYTES_A_TOKEN // len(texts) if tokens > sum(len(text.encode()) for text in texts) else 0


def _feature(packer: AnyPacker, column: str) -> List:
    kind = "float32" if column in packer.widths else "int32"
    return List(Value(kind), length=packer.length * packer.widths.get(column, 1))


def load_rows(folder: Path) -> dict[str, StoredRows]:
    """Split → rows, as `write_rows` wrote them."""
    tallies = json.loads((folder / "rows.json").read_text())
    return {name: StoredRows(Dataset.from_file(str(folder / f"{name}.arrow")), tallies[name]) for name in tallies}


@contextmanager
def quiet_scratch(root: Path) -> Iterator[Path]:
    """A folder in ``root`` for a while, in which the bars of `datasets` are switched off.

    They flash by for small data and break the console's own live line.
    """
    # semi-private, one switch for the whole process: datasets/utils/tqdm.py, datasets 5.2
    shown = not datasets.are_progress_bars_disabled()
    if shown:
        datasets.disable_progress_bars()
    try:
        with scratch_folder(root, "scratch-") as scratch:
            yield scratch
    finally:
        if shown:
            datasets.enable_progress_bars()
