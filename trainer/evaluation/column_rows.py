"""Rows with one more column, of values that other weights than the trained ones give of them, kept beside the rows."""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import numpy as np

from shardwright.arguments.training import TrainingArguments
from shardwright.data.corpus import Corpus
from shardwright.data.from_arguments import not_one_dataset
from shardwright.data.rows.packing import Columns
from shardwright.data.rows.rows import StoredRows


class ColumnRows(StoredRows):
    """Stored rows with one more ``column``; their fingerprint leaves it out.

    Attributes:
        values: that column, float32 [rows, ...]; None until it is known, and till then rows are read without it.
    """

    def __init__(self, rows: StoredRows, column: str) -> None:
        super().__init__(rows.dataset, rows.tally)
        self.plain, self.column = rows, column
        self.values: np.ndarray | None = None

    @property
    def fingerprint(self) -> str:
        return self.plain.fingerprint

    def read(self, numbers: np.ndarray) -> Columns:
        columns = super().read(numbers)
        if self.values is None:  # of a run that goes on, rows are ordered by their lengths before it is known
            return columns
        return {**columns, self.column: self._column(self.values, numbers, columns)}

    def _column(self, values: np.ndarray, numbers: np.ndarray, columns: Columns) -> np.ndarray:
        return values[numbers]


AnyRows = TypeVar("AnyRows", bound=ColumnRows)


def with_column(
    corpus: Corpus, args: TrainingArguments, make: Callable[[StoredRows], AnyRows]
) -> tuple[Corpus, dict[str, AnyRows]]:
    """``corpus`` of the rows that ``make`` makes, its held-out sets cut to the evaluated ones; and the rows by split.

    Raises UserError if the rows to train on are not those of one stored dataset.
    """
    if not isinstance(corpus.train, StoredRows):
        raise not_one_dataset(args)
    train = make(corpus.train)
    sets = {name: make(rows.spread(args.max_eval_rows)) for name, rows in corpus.heldout_sets.items()}
    splits = {"train": train, **{f"heldout {name}".rstrip(): rows for name, rows in sets.items()}}
    return replace(corpus, train=train, heldout_sets=sets), splits
