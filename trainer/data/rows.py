"""Rows of tokens, stored or streamed, and the order in which training takes them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from datasets import Dataset, Features, List, Value

from trainer.cache import digest
from trainer.data.packing import Columns, Packer
from trainer.data.row_stream import DOCUMENTS_AT_ONCE, too_few_rows
from trainer.errors import UserError


def write_rows(splits: Mapping[str, Dataset], folder: Path, new_packer: Callable[[], Packer], asked: str) -> None:
    """Write the rows of each split to ``folder``, and last how many they are."""
    counts = {}
    for name, documents in splits.items():
        packer = new_packer()
        packed = documents.map(
            packer,
            batched=True,
            batch_size=DOCUMENTS_AT_ONCE,
            features=Features({column: List(Value("int32"), length=packer.length) for column in packer.columns}),
            cache_file_name=str(folder / f"{name}.arrow"),
            new_fingerprint=digest([folder.name, name]),
        )
        counts[name] = len(packed)
        if not counts[name]:
            raise UserError(
                asked=f"{asked} in rows of {packer.length} tokens",
                found=f"{len(documents)} {name} documents of {len(packer.rest)} tokens in all",
                why="they don't fill one row",
                instead="a larger dataset, or a shorter --sequence_length",
            )
    (folder / "rows.json").write_text(json.dumps(counts))


def load_rows(folder: Path) -> dict[str, Dataset]:
    counts = json.loads((folder / "rows.json").read_text())
    rows = {name: Dataset.from_file(str(folder / f"{name}.arrow")) for name in counts}
    if counts != {name: len(split) for name, split in rows.items()}:
        raise ValueError(f"rows are missing from {folder}")
    return rows


FINGERPRINT_ROWS = 64


class Order(Protocol):
    """Rows one after another, epoch after epoch, from a cursor on."""

    @property
    def epoch(self) -> float:
        """Epochs done; the part of one only where its length is known."""
        ...

    def take(self, count: int) -> Sequence[Any]:
        """Which rows are next: one at least and ``count`` at most, all of one epoch; nothing is read for it."""
        ...

    def read(self, taken: Sequence[Any]) -> Columns:
        """The values of rows that :meth:`take` gave. [rows, S]"""
        ...

    def cursor(self) -> dict[str, Any]:
        """Where the next row lies; not to be changed."""
        ...


class StoredOrder:
    """All rows of a dataset, permuted anew each epoch."""

    def __init__(self, rows: Dataset, seed: int, batch_size: int, cursor: Mapping[str, Any]) -> None:
        if len(rows) < batch_size:
            raise too_few_rows(batch_size, f"{len(rows)} rows to train on")
        self._rows, self._seed = rows.with_format("numpy"), seed
        self._epoch, self._row = int(cursor["epoch"]), int(cursor["row"])
        if self._epoch < 0 or not 0 <= self._row < len(rows):
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
        return self._rows[np.asarray(taken)]

    def cursor(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "row": self._row}

    def _draw(self) -> np.ndarray:
        return np.random.default_rng([self._seed, self._epoch]).permutation(len(self._rows))


def fingerprint(rows: Dataset) -> str:
    """Of how many rows there are and of 64 of them: equal on every machine, and told apart in milliseconds."""
    sample = np.linspace(0, len(rows) - 1, min(FINGERPRINT_ROWS, len(rows))).astype(np.int64)
    content = hashlib.blake2b(str(len(rows)).encode(), digest_size=8)
    for name, values in sorted(rows.with_format("numpy")[sample].items()):
        content.update(name.encode() + values.astype("<i8").tobytes())
    return f"{len(rows)} rows, {content.hexdigest()}"
