"""Rows of one sample each, in batches as short as their samples allow, of a few fixed lengths.

Rows come in runs of about one length, each as long as a batch, and the order of the runs is drawn: a batch can be cut
short, and yet short and long samples alternate in training (transformers' ``group_by_length``).

Shape legend: S tokens in a row.
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shardwright.data.rows.packing import Columns
from shardwright.data.rows.rows import Order, Rows, count_in
from shardwright.models.ops.labels import IGNORE

RUNS_AT_ONCE = 32  # batches whose rows are ordered together


def used(columns: Columns) -> np.ndarray:
    """Used tokens of each row [rows]: up to the padding if ``segment_ids`` tell it, else to the last scored one."""
    counts = columns["segment_ids"] > 0 if "segment_ids" in columns else columns["labels"] != IGNORE
    reversed_ = counts[:, ::-1]
    return np.where(counts.any(axis=1), counts.shape[1] - reversed_.argmax(axis=1), 1)


class OrderByLength:
    """An order of rows by windows, each arranged in runs; marks are (mark of the inner order, length).

    Batches are cut to one of ``lengths``, shortest first; the last is S.

    A cursor is the inner order's at the window's begin, and ``runs``: the size of a run (it stays when a run is resumed
    with another batch size), the rows taken of the window, and the rows that earlier windows gave to its first run.
    """

    def __init__(
        self, rows: Rows, lengths: Sequence[int], seed: int, batch_size: int, cursor: Mapping[str, Any]
    ) -> None:
        place = {name: value for name, value in cursor.items() if name != "runs"}
        runs = cursor.get("runs", {"size": batch_size, "taken": 0, "begun": 0})
        self._run, taken, self._begun = (count_in(runs, name) for name in ("size", "taken", "begun"))
        if not 0 <= self._begun < self._run:
            raise ValueError(f"{self._begun} of a run of {self._run}")
        self._inner: Order = rows.order(seed, batch_size, place)
        self._lengths, self._seed, self._known = lengths, seed, rows.tokens is not None
        self._marks: list[tuple[Any, int]] = []
        self._taken, self._start, self._first = 0, self._inner.cursor(), self._inner.epoch
        if taken:
            self._next_window()
            if taken >= len(self._marks):
                raise ValueError(f"row {taken} of a window of {len(self._marks)}")
            self._taken = taken

    @property
    def epoch(self) -> float:
        last = self._inner.epoch
        if not self._known or self._taken == len(self._marks):
            return last
        return self._first + (last - self._first) * self._taken / len(self._marks)

    def take(self, count: int) -> list[tuple[Any, int]]:
        if self._taken == len(self._marks):
            self._next_window()
        taken = self._marks[self._taken : self._taken + count]
        self._taken += len(taken)
        return taken

    def read(self, taken: Sequence[tuple[Any, int]]) -> Columns:
        return self._inner.read([mark for mark, _ in taken])

    def cut(self, columns: Columns, taken: Sequence[tuple[Any, int]]) -> Columns:
        """``columns``, those of S tokens cut to the shortest length that holds all of ``taken``."""
        longest, full = max(length for _, length in taken), self._lengths[-1]
        size = next(length for length in self._lengths if length >= longest)
        return {name: values[:, :size] if values.shape[1] == full else values for name, values in columns.items()}

    def cursor(self) -> dict[str, Any]:
        taken, place, begun = self._taken, self._start, self._begun
        if taken == len(self._marks):
            taken, place, begun = 0, self._inner.cursor(), (begun + taken) % self._run
        return {**place, "runs": {"size": self._run, "taken": taken, "begun": begun}}

    def _next_window(self) -> None:
        self._begun = (self._begun + len(self._marks)) % self._run
        self._start, self._first = self._inner.cursor(), self._inner.epoch
        marks = self._inner.take(RUNS_AT_ONCE * self._run)
        pieces = [marks[n : n + self._run] for n in range(0, len(marks), self._run)]
        lengths = np.concatenate([used(self._inner.read(piece)) for piece in pieces])  # so less is held at once
        kinds = np.searchsorted(self._lengths, lengths)
        draw = np.random.default_rng([self._seed, zlib.crc32(json.dumps(self._start, sort_keys=True).encode())])
        order = in_runs(kinds, self._run, -self._begun % self._run, draw)
        self._marks, self._taken = [(marks[i], int(lengths[i])) for i in order.tolist()], 0


def in_runs(kinds: np.ndarray, size: int, head: int, draw: np.random.Generator) -> np.ndarray:
    """The rows' numbers in runs of ``size`` in drawn order, each of one kind except those made of leftovers.

    Args:
        kinds: the kind of each row, int [rows].
        head: rows missing from the run before; they come first.
    """
    full, rest = list[np.ndarray](), list[np.ndarray]()
    for kind in np.unique(kinds):
        rows = np.flatnonzero(kinds == kind)
        whole = len(rows) // size * size
        full += list(rows[:whole].reshape(-1, size))
        rest.append(rows[whole:])
    left = np.concatenate(rest)
    if len(left) < head and full:
        left = np.concatenate([left, full.pop()])
    first, left = left[:head], left[head:]
    full += [left[n : n + size] for n in range(0, len(left) // size * size, size)]
    draw.shuffle(full)  # type: ignore[arg-type]  # a list of arrays is a sequence
    return np.concatenate([first, *full, left[len(left) // size * size :]])
