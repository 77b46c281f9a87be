"""Rows → batches of one fixed shape, or of a few, and the cursor that says which batch comes next. Pure CPU.

Seed and epoch alone draw the order of the rows. A cursor counts the rows that were taken in that order, so that it
holds for any batch size and any number of processes.

Shape legend: B rows in a batch, S tokens in a row.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from shardwright.data.rows.by_length import OrderByLength, RowsByLength
from shardwright.data.rows.rows import Order, Rows, StoredRows
from shardwright.errors import UserError
from shardwright.models.ops.labels import IGNORE

Batch = dict[str, torch.Tensor]


class TrainingBatches:
    """Batches without end, epoch after epoch: ``input_ids``, ``labels`` and the rows' other columns, int64 [B, S].

    Every row comes once an epoch. Rows that fill no batch at an epoch's end begin the first batch of the next. Labels
    are those of the rows, else the inputs (transformers shifts them by one inside the loss); where documents are
    isolated, the first token of each further document in a row has -100.

    A consumer that reads ahead calls ``state_dict()`` right after each ``next()`` and keeps it beside the batch: it is
    the cursor to store once that batch was trained on.

    Args:
        rows: stored rows, or a stream of them.
        batch_size: rows of the global batch.
        seed: draws the order of the rows.
        process_index: says which rows of each global batch this process yields:
            ``[process_index, process_index + 1) * batch_size / process_count``.
        process_count: processes that share each global batch.
        lengths: tokens that the rows of a batch are cut to, the shortest that holds them, and the last is S; rows come
            in order by length then (`RowsByLength`). Empty, or S alone: none is cut.

    Raises:
        UserError: the rows don't fill one batch (of a stream, ``next()`` raises it where the stream ends), or
            ``process_count`` does not divide ``batch_size``.
    """

    def __init__(
        self,
        rows: Rows,
        batch_size: int,
        seed: int,
        process_index: int = 0,
        process_count: int = 1,
        lengths: Sequence[int] = (),
    ) -> None:
        if batch_size % process_count:
            raise UserError(
                asked=f"batches of {batch_size} rows",
                found=f"{process_count} processes that share them",
                why="each takes as many rows as the next",
                instead=f"a global batch that {process_count} divides (--per_device_train_batch_size)",
            )
        self._rows: Rows = RowsByLength(rows, lengths) if len(lengths) > 1 else rows
        self._batch_size, self._seed, self._data = batch_size, seed, self._rows.fingerprint
        share = batch_size // process_count
        self._share = slice(process_index * share, (process_index + 1) * share)
        self._cursor: dict[str, Any] = {"epoch": 0, "row": 0}
        self._order: Order = self._rows.order(seed, batch_size, self._cursor)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        taken: list[Any] = []
        while len(taken) < self._batch_size:
            taken += self._order.take(self._batch_size - len(taken))
        columns = self._order.read(taken[self._share])
        if isinstance(self._order, OrderByLength):
            columns = self._order.cut(columns, taken)  # to one length in every process
        batch = as_batch(columns)
        # only now: a stream that breaks off in the middle of a batch leaves the cursor at the batch's first row
        self._cursor = self._order.cursor()
        return batch

    @property
    def epoch(self) -> float:
        """Epochs done: a fraction, but of a stream, whose length is not known, whole epochs."""
        return self._order.epoch

    def skip_epoch(self) -> None:
        """Go to the beginning of the next epoch; the rows that are left of this one are never seen."""
        self._cursor = {"epoch": int(self.epoch) + 1, "row": 0}
        self._order = self._rows.order(self._seed, self._batch_size, self._cursor)

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
                instead="the --dataset, --tokenizer, --sequence_length, --isolate_documents, --packing, "
                "--streaming and --shuffle_rows, and what else says how samples are made, of the run that wrote it",
            )
        if cursor.get("seed") != self._seed:
            raise UserError(
                asked=f"to go on at a cursor with the order of seed {cursor.get('seed')}",
                found=f"the seed is {self._seed}",
                why="another seed draws another order: rows would be seen twice or never",
                instead=f"--seed {cursor.get('seed')}",
            )
        place = copy.deepcopy({name: cursor[name] for name in cursor if name not in ("seed", "data")})
        try:
            self._order = self._rows.order(self._seed, self._batch_size, place)
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                asked="to go on at a cursor of the data",
                found=f"{dict(cursor)} ({type(error).__name__}: {error})",
                why="it is not what state_dict() gives",
                instead="another checkpoint",
            ) from error
        self._cursor = place


def heldout_batches(
    rows: StoredRows, batch_size: int, process_index: int = 0, process_count: int = 1
) -> Iterator[Batch]:
    """Batches with every row once and in order. The last is filled up with rows all of whose labels are -100.

    Processes share each batch as they share those of `TrainingBatches`.
    """
    share = batch_size // process_count
    for start in range(process_index * share, len(rows) + process_index * share, batch_size):
        wanted = np.arange(start, start + share)
        # filled up with the last row, not with zeros: any model takes it as input
        batch = as_batch(rows.read(np.minimum(wanted, len(rows) - 1)))
        batch["labels"][torch.from_numpy(wanted >= len(rows))] = IGNORE
        yield batch


def as_batch(columns: Mapping[str, np.ndarray]) -> Batch:
    """A batch of these columns and their ``labels``, int64 [B, S]; of numbers that are no tokens, float32."""
    types = {name: np.float32 if values.dtype.kind == "f" else np.int64 for name, values in columns.items()}
    batch = {name: torch.from_numpy(values.astype(types[name])) for name, values in columns.items()}
    labels_BS = batch.get("labels", batch["input_ids"]).clone()
    if "segment_ids" in batch:
        segments_BS = batch["segment_ids"]
        labels_BS[:, 1:][segments_BS[:, 1:] != segments_BS[:, :-1]] = IGNORE
    return {**batch, "labels": labels_BS}
