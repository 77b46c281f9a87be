"""The starting weights' values of every row: computed once, before the first step, and kept beside the rows.

A resumed run has trained weights, so it reads the values that its first life wrote.
"""

import copy
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from rich.console import Console
from safetensors import SafetensorError
from safetensors.numpy import load, save

from shardwright.arguments.training import TrainingArguments
from shardwright.checkpoint.manifest import stream_checksum
from shardwright.data.corpus import Corpus
from shardwright.data.rows.batches import heldout_batches
from shardwright.data.rows.rows import StoredRows
from shardwright.errors import UserError
from shardwright.evaluation.column_rows import ColumnRows, with_column
from shardwright.files.folder import Folder, StorageError
from shardwright.hosts.hosts import hosts
from shardwright.models.ops.partial_gradients import Tensors
from shardwright.objectives.objective import Objective
from shardwright.report.bars import tracked
from shardwright.step.compile_guard import CompileGuard
from shardwright.step.placed_model import PlacedModel
from shardwright.xla import sharding
from shardwright.xla.batch import batch_spec, place_batch

FILE = "reference.safetensors"
CHECKSUM = "xxh3"  # an entry of the file's header
REFERENCE_PASS = "reference pass"


class _Referring(Objective):
    """An objective without a loss, which records the reference values of ``objective``."""

    title, parts = "the reference pass", ("nothing",)

    def __init__(self, objective: Objective, column: str, words: int | None) -> None:
        super().__init__({}, objective.length)
        self.objective, self.column, self.vocabulary = objective, column, words

    def loss(self, logits: torch.Tensor, batch: Mapping[str, torch.Tensor], counts: torch.Tensor) -> Tensors:
        """Zero, and the values by the name of their column; ``counts`` is not read."""
        values = self.objective.refer(logits[..., : self.vocabulary], batch)
        return {"nothing": values.sum() * 0, self.column: values}


class ReferenceStep:
    """Computes the reference column, or another that the objective refers to, with the current weights.

    ``words``: how many of the logits the objective is given; None: all.
    """

    def __init__(
        self, placed: PlacedModel, column: str | None = None, words: int | None = None, name: str = REFERENCE_PASS
    ) -> None:
        self.placed, self.loss = placed, copy.copy(placed.loss)
        self.column = column or str(placed.loss.objective.reference)
        self.loss.objective = _Referring(placed.loss.objective, self.column, words)
        self.guard = CompileGuard(name, expected=1)

    def __call__(self, batches: Iterable[Tensors]) -> Iterator[np.ndarray]:
        """Yields each batch's column values, float32 [rows, ...]; ``batches`` are host tensors of [rows, S]."""
        for batch in batches:
            found = self.guard.run(batch, lambda batch: {"values": self.trace(batch)})
            yield sharding.fetch(found["values"]).numpy()

    def over(
        self, rows: ColumnRows, batch: tuple[int, int, int], first: int, what: str, console: Console
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Yields (the number of the first row, the values) of each batch of ``rows`` from batch number ``first`` on.

        ``batch`` is its rows and this process's share of it, as `heldout_batches` takes them.
        """
        size, batches = batch[0], itertools.islice(heldout_batches(rows.plain, *batch), first, None)
        shown = tracked(console, what, batches, -(-len(rows) // size) - first)
        for number, values in enumerate(self(shown), start=first):
            hosts().watchdog.progressed()
            yield number * size, values[: len(rows) - number * size]

    def trace(self, batch: Tensors) -> torch.Tensor:
        mesh = self.placed.mesh
        inputs = place_batch(batch, mesh, self.placed.batch_axes)
        with torch.no_grad():
            one = torch.ones((), device=inputs["labels"].device)
            _, recorded = self.loss(self.placed.parameters, inputs, one, training=False)
            values = recorded[self.column]
            return sharding.constrain(values, mesh, batch_spec(values.dim(), self.placed.batch_axes))


class Reference:
    """The starting weights' values of a run's rows, each of ``shape``: the column of the rows of each split."""

    def __init__(self, splits: Mapping[str, ColumnRows], shape: tuple[int, ...]) -> None:
        self.splits, self.shape = splits, shape

    @property
    def known(self) -> bool:
        return all(rows.values is not None and not np.isnan(rows.values).any() for rows in self.splits.values())

    def compute(
        self, placed: PlacedModel, batch: tuple[int, int, int], stopped: Callable[[], bool], console: Console
    ) -> None:
        """Compute the values of all rows with the ``placed`` weights; once ``stopped``, the rest stays NaN.

        ``batch`` is as :meth:`ReferenceStep.over` takes it.
        """
        step = ReferenceStep(placed)
        found = {name: np.full((len(rows), *self.shape), np.nan, np.float32) for name, rows in self.splits.items()}
        for name, rows in self.splits.items():
            rows.values = found[name]
        for name, rows in self.splits.items():
            for start, values in step.over(rows, batch, 0, f"reference, {name} rows", console):
                found[name][start : start + len(values)] = values
                if stopped():
                    return

    def save(self, folder: Folder) -> None:
        """Write the values to ``folder``, whole or not at all, with a checksum and which rows they are of."""
        values = {name: rows.values for name, rows in self.splits.items() if rows.values is not None}
        names = {name: rows.fingerprint for name, rows in self.splits.items()}
        folder.write(FILE, save(values, metadata={**names, CHECKSUM: _checksum(values)}))

    def load(self, folder: Folder) -> None:
        """Read what :meth:`save` wrote there; raises UserError if it is not there, damaged, or of other rows."""
        found = "no such file"
        try:
            if folder.exists(FILE):
                data = folder.read(FILE)
                values = load(data)
                found = self._differs(values, json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]))
        except (SafetensorError, StorageError, ValueError, KeyError) as error:
            found = f"{type(error).__name__}: {error}"
        if found:
            raise UserError(
                asked=f"to go on with what the starting weights said, {folder / FILE}",
                found=found,
                why="the weights are trained by now, and can't say it again",
                instead="the folder of the run with all its files, and the data and --max_eval_rows that it began "
                "with; or a run from the start",
            )
        for name, rows in self.splits.items():
            rows.values = values[name]

    def _differs(self, values: dict[str, np.ndarray], header: dict[str, Any]) -> str:
        """Say how the ``values`` of a file with this ``header`` don't fit the rows; empty if they do."""
        said = header.get("__metadata__", {})  # of files of before it had them, no checksum
        if said.get(CHECKSUM) not in (None, _checksum(values)):
            return "values that were changed since they were written: their checksum is another"
        for name, rows in self.splits.items():
            wanted = (len(rows), *self.shape)
            if values[name].shape != wanted or values[name].dtype != np.float32:
                return f"{name} rows of another number or length: {values[name].shape}, where {wanted} are needed"
            if np.isnan(values[name]).any():
                return f"{name} rows that are not computed"
            if said.get(name) not in (None, rows.fingerprint):
                return f"{name} rows of other data: {said[name]}, where {rows.fingerprint} are needed"
        return ""


def _checksum(values: Mapping[str, np.ndarray]) -> str:
    return str(stream_checksum(values[name].tobytes() for name in sorted(values))["xxh3"])


def referred(corpus: Corpus, args: TrainingArguments) -> tuple[Corpus, Reference | None]:
    """``corpus`` with the reference column that the objective needs; raises as :func:`with_column`."""
    if (column := args.goal.reference) is None:
        return corpus, None
    made, splits = with_column(corpus, args, lambda rows: ColumnRows(rows, column))
    return made, Reference(splits, args.goal.columns[column])


def check_sets(args: TrainingArguments, sets: Mapping[str, StoredRows] | None) -> None:
    """Refuse other ``sets`` than the run's own where the loss compares with the starting weights or with a teacher."""
    beside = "a teacher" if args.teacher else "the starting weights"
    if sets is not None and (args.entry.reference or args.teacher):
        raise UserError(
            asked="to evaluate other rows than those of the run",
            found=f"an objective that compares with {beside}",
            why="what they say of each row is computed before the first step, of the run's own rows",
            instead="evaluate() of the run's own sets, which eval_dataset names from the start",
        )
