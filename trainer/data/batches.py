"""Rows → batches of one fixed shape, and the cursor that says which comes next. Pure CPU.

The order of the rows is drawn by the seed and the epoch alone. A cursor counts the rows taken of it, so that it holds
for any batch size and any number of processes.

Shape legend: B rows in a batch, S tokens in a row.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from datasets import Dataset

from trainer.data.row_stream import RowStream, StreamOrder
from trainer.data.rows import Order, StoredOrder, fingerprint
from trainer.errors import UserError

IGNORE = -100  # a label that torch's cross entropy, and so every transformers model, leaves out
Batch = dict[str, torch.Tensor]


class TrainingBatches:
    """Batches without end, epoch after epoch: ``input_ids``, ``labels`` and the rows' other columns, int64 [B, S].

    Every row comes once an epoch; rows that fill no batch at an epoch's end begin the next epoch's first. Labels are
    the inputs (transformers shifts them by one inside the loss); -100 where a target would be another document's first.

    A consumer that reads ahead keeps ``state_dict()``, called right after each ``next()``, beside the batch: it is the
    cursor to store once that batch was trained on.

    Args:
        rows: stored rows, or a stream of them.
        batch_size: rows of the global batch.
        seed: draws the order of the rows.
        process_index: which share of each global batch this process yields: rows
            ``[process_index, process_index + 1) * batch_size / process_count``.

    Raises:
        UserError: the rows don't fill one batch (a stream says so where it ends), or it can't be shared out.
    """

    def __init__(
        self,
        rows: Dataset | RowStream,
        batch_size: int,
        *,
        seed: int,
        process_index: int = 0,
        process_count: int = 1,
    ) -> None:
        if batch_size % process_count:
            raise UserError(
                asked=f"batches of {batch_size} rows",
                found=f"{process_count} processes that share them",
                why="each takes as many rows as the next",
                instead=f"a global batch that {process_count} divides (--per_device_train_batch_size)",
            )
        self._rows, self._batch_size, self._seed = rows, batch_size, seed
        self._data = rows.fingerprint if isinstance(rows, RowStream) else fingerprint(rows)
        share = batch_size // process_count
        self._share = slice(process_index * share, (process_index + 1) * share)
        self._start({"epoch": 0, "row": 0})

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        taken: list[Any] = []
        while len(taken) < self._batch_size:
            taken += self._order.take(self._batch_size - len(taken))
        batch = as_batch(self._order.read(taken[self._share]))
        # only now: a stream that breaks off in the middle of a batch leaves the cursor at the batch's first row
        self._cursor = self._order.cursor()
        return batch

    @property
    def epoch(self) -> float:
        """Epochs done; of a stream, whose length is not known, whole ones."""
        return self._order.epoch

    def state_dict(self) -> dict[str, Any]:
        """The cursor of the batch that comes next: JSON-able, and the same in every process."""
        return {"seed": self._seed, "data": self._data, **copy.deepcopy(self._cursor)}

    def load_state_dict(self, cursor: Mapping[str, Any]) -> None:
        """Go on where ``cursor`` was taken, whatever batch size and number of processes it was taken with.

        Raises:
            UserError: it is a cursor of other data or of another seed, or none.
        """
        if cursor.get("data") != self._data:
            raise UserError(
                asked=f"to go on at a cursor of the data {cursor.get('data')}",
                found=f"the data are {self._data}",
                why="a place in one is none in the other: rows would be seen twice or never",
                instead="the --dataset, --tokenizer, --sequence_length, --isolate_documents, --streaming and "
                "--shuffle_rows of the run that wrote it",
            )
        if cursor.get("seed") != self._seed:
            raise UserError(
                asked=f"to go on at a cursor with the order of seed {cursor.get('seed')}",
                found=f"the seed is {self._seed}",
                why="another seed draws another order: rows would be seen twice or never",
                instead=f"--seed {cursor.get('seed')}",
            )
        try:
            self._start(copy.deepcopy({name: cursor[name] for name in cursor if name not in ("seed", "data")}))
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                asked="to go on at a cursor of the data",
                found=f"{dict(cursor)} ({type(error).__name__}: {error})",
                why="it is not what state_dict() gives",
                instead="another checkpoint",
            ) from error

    def _start(self, cursor: dict[str, Any]) -> None:
        self._order: Order
        if isinstance(self._rows, RowStream):
            self._order = StreamOrder(self._rows, self._seed, self._batch_size, cursor)
        else:
            self._order = StoredOrder(self._rows, self._seed, self._batch_size, cursor)
        self._cursor = cursor


def heldout_batches(
    dataset: Dataset, batch_size: int, process_index: int = 0, process_count: int = 1
) -> Iterator[Batch]:
    """Every row once and in order; rows that fill up the last batch have labels of -100 alone.

    Shared between processes as `TrainingBatches` are.
    """
    rows, share = dataset.with_format("numpy"), batch_size // process_count
    for start in range(process_index * share, len(dataset) + process_index * share, batch_size):
        wanted = np.arange(start, start + share)
        # filled up with the last row, not with zeros: inputs that any model takes
        batch = as_batch(rows[np.minimum(wanted, len(dataset) - 1)])
        batch["labels"][torch.from_numpy(wanted >= len(dataset))] = IGNORE
        yield batch


def as_batch(columns: Mapping[str, np.ndarray]) -> Batch:
    """Columns of rows and their labels, int64 [B, S]."""
    batch = {name: torch.from_numpy(values.astype(np.int64)) for name, values in columns.items()}
    labels_BS = batch["input_ids"].clone()
    if "segment_ids" in batch:
        segments_BS = batch["segment_ids"]
        labels_BS[:, 1:][segments_BS[:, 1:] != segments_BS[:, :-1]] = IGNORE
    return {**batch, "labels": labels_BS}
