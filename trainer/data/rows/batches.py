"""Rows → batches of one fixed shape, or of a few, and the cursor of the next batch. Pure CPU.

Seed and epoch alone draw the order of the rows. A cursor counts the rows taken in that order, so it is valid for any
batch size and any number of processes.

Shape legend: B rows in a batch, S tokens in a row.
"""

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from shardwright.data.rows.by_length import OrderByLength
from shardwright.data.rows.rows import Order, Rows, StoredRows
from shardwright.errors import UserError
from shardwright.models.ops.labels import IGNORE

Batch = dict[str, torch.Tensor]
_OF_ALL = ("seed", "data", "date")  # of a cursor: what is no place in the order


class TrainingBatches:
    """Endless batches, epoch after epoch: ``input_ids``, ``labels`` and the rows' other columns, int64 [B, S].

    Every row comes once an epoch. Rows that fill no batch at an epoch's end begin the first batch of the next; stored
    rows that fill no batch at all come several times in each. Labels are those of the rows, else the inputs
    (transformers shifts them by one inside the loss); if documents are isolated, the first token of each further
    document in a row has -100.

    A consumer that reads ahead calls ``state_dict()`` right after each ``next()`` and keeps it beside the batch: it is
    the cursor to store once that batch was trained on.

    Args:
        batch_size: rows of the global batch, of which this process yields
            ``[process_index, process_index + 1) * batch_size / process_count``.
        lengths: a batch is cut to the shortest of these that holds its rows; the last is S. Rows then come in order by
            length (`OrderByLength`). Empty, or S alone: none is cut.
        date: what a chat template wrote into the rows for today; cursors keep it.

    Raises UserError if ``process_count`` does not divide ``batch_size``, and, from ``next()``, at the end of a stream
    that doesn't fill one batch.
    """

    def __init__(
        self,
        rows: Rows,
        batch_size: int,
        seed: int,
        process_index: int = 0,
        process_count: int = 1,
        lengths: Sequence[int] = (),
        date: str | None = None,
    ) -> None:
        if batch_size % process_count:
            raise UserError(
                asked=f"batches of {batch_size} rows",
                found=f"{process_count} processes that share them",
                why="each takes as many rows as the next",
                instead=f"a global batch that {process_count} divides (--per_device_train_batch_size)",
            )
        self._batch_size, self._seed, self._data = batch_size, seed, rows.fingerprint
        self._order_from: Callable[[Mapping[str, Any]], Order] = functools.partial(rows.order, seed, batch_size)
        if len(lengths) > 1:
            self._data += f", by length ({', '.join(map(str, lengths))})"
            self._order_from = functools.partial(OrderByLength, rows, lengths, seed, batch_size)
        self._kept = {"date": date} if date else {}
        share = batch_size // process_count
        self._share = slice(process_index * share, (process_index + 1) * share)
        self._begin({"epoch": 0, "row": 0})

    def _begin(self, cursor: dict[str, Any]) -> None:
        self._order, self._cursor = self._order_from(cursor), cursor

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        taken: list[Any] = []
        while len(taken) < self._batch_size:
            taken += self._order.take(self._batch_size - len(taken))
        columns = self._order.read(taken[self._share])
        if isinstance(self._order, OrderByLength):
            columns = self._order.cut(columns, taken)  # to the same length in every process
        batch = as_batch(columns)
        # only now: a stream that breaks off in the middle of a batch leaves the cursor at the batch's first row
        self._cursor = self._order.cursor()
        return batch

    @property
    def epoch(self) -> float:
        """Epochs done, with a fraction; for a stream, whose length is unknown, whole epochs."""
        return self._order.epoch

    def skip_epoch(self) -> None:
        """Go to the beginning of the next epoch; the rest of this one is never seen."""
        self._begin({"epoch": int(self.epoch) + 1, "row": 0})

    def state_dict(self) -> dict[str, Any]:
        """The cursor of the next batch: JSON-able, and the same in every process."""
        return {"seed": self._seed, "data": self._data, **self._kept, **copy.deepcopy(self._cursor)}

    def load_state_dict(self, cursor: Mapping[str, Any]) -> None:
        """Continue at ``cursor``, whatever batch size and number of processes it was taken with.

        Raises UserError if it belongs to other data or another seed, or is no cursor.
        """
        if cursor.get("data") != self._data:
            raise UserError(
                asked=f"to go on at a cursor of the data {cursor.get('data')}",
                found=f"the data are {self._data}",
                why="a place in one is none in the other: rows would be seen twice or never",
                instead="the --dataset, --tokenizer, --sequence_length, --isolate_documents, --packing, "
                "--streaming and --shuffle_rows, and what else says how samples are made, of the run that wrote it; "
                "or, to train the model further on other data, a new run with its model/ as --model (an adapter's as "
                "--adapter)",
            )
        if cursor.get("seed") != self._seed:
            raise UserError(
                asked=f"to go on at a cursor with the order of seed {cursor.get('seed')}",
                found=f"the seed is {self._seed}",
                why="another seed draws another order: rows would be seen twice or never",
                instead=f"--seed {cursor.get('seed')}",
            )
        try:
            self._begin(copy.deepcopy({name: cursor[name] for name in cursor if name not in _OF_ALL}))
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                asked="to go on at a cursor of the data",
                found=f"{dict(cursor)} ({type(error).__name__}: {error})",
                why="it is not what state_dict() gives",
                instead="another checkpoint",
            ) from error


def heldout_batches(
    rows: StoredRows, batch_size: int, process_index: int = 0, process_count: int = 1
) -> Iterator[Batch]:
    """Batches of every row once, in order, shared by processes as in `TrainingBatches`.

    The last batch is filled up with rows whose labels are all -100.
    """
    share = batch_size // process_count
    for start in range(process_index * share, len(rows) + process_index * share, batch_size):
        wanted = np.arange(start, start + share)
        # the padding repeats the last row, which any model accepts as input, unlike zeros
        batch = as_batch(rows.read(np.minimum(wanted, len(rows) - 1)))
        batch["labels"][torch.from_numpy(wanted >= len(rows))] = IGNORE
        yield batch


def as_batch(columns: Mapping[str, np.ndarray]) -> Batch:
    """A batch of these columns and their ``labels``, int64 [B, S]; float columns become float32."""
    types = {name: np.float32 if values.dtype.kind == "f" else np.int64 for name, values in columns.items()}
    batch = {name: torch.from_numpy(values.astype(types[name])) for name, values in columns.items()}
    labels_BS = batch.get("labels", batch["input_ids"]).clone()
    if "segment_ids" in batch:
        segments_BS = batch["segment_ids"]
        labels_BS[:, 1:][segments_BS[:, 1:] != segments_BS[:, :-1]] = IGNORE
    return {**batch, "labels": labels_BS}
