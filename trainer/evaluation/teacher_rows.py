"""A teacher's word on every row: computed before the student is placed, and kept beside the rows on disk.

The values depend on the teacher and the rows alone, so a later run of both reads them, and a pass that was stopped goes
on where it was. Only the positions of scored targets have any.

Shape legend: S tokens in a row, W numbers at a position.
"""

import functools
import gc
import hashlib
import os
import shutil
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import transformers
from rich.console import Console

from shardwright.data.corpus import Corpus
from shardwright.data.rows.batches import as_batch
from shardwright.data.rows.packing import Columns
from shardwright.data.rows.rows import StoredRows
from shardwright.errors import UserError
from shardwright.evaluation.column_rows import ColumnRows, with_column
from shardwright.evaluation.reference_rows import ReferenceStep
from shardwright.evaluation.teacher import VALUES_FORMAT, identity_of, vocabulary_of
from shardwright.files.cache import cache_root, digest, is_whole, publish, written_to_cache
from shardwright.files.folder import Folder
from shardwright.hosts.hosts import hosts
from shardwright.job import Job
from shardwright.models.ops.labels import IGNORE, targets
from shardwright.report.lines import say, waiting
from shardwright.report.units import size
from shardwright.step.build import place_model
from shardwright.step.train_step import free
from shardwright.weights.adapter_weights import weights_of
from shardwright.weights.hub_read import open_hub_weights, reading
from shardwright.xla.batch import batch_share
from shardwright.xla.device_mesh import build_mesh

TEACHER_PASS = "teacher pass"
_VALUES, _DONE = "values.f32", "done.json"
_SAVED_EVERY = 20.0  # seconds between places from which a stopped pass goes on


class TaughtRows(ColumnRows):
    """Rows whose ``column`` [rows, S, W] has the teacher's values.

    Attributes:
        starts: the number of scored targets before each row, and of all, int64 [rows + 1].
        content: a digest of all rows.
        values: of each scored target, float32 [targets, W]; None until they are known.
    """

    def __init__(self, rows: StoredRows, column: str, wide: int) -> None:
        super().__init__(rows, column)
        self.wide = wide
        counts, content = [np.zeros(1, dtype=np.int64)], hashlib.blake2b(digest_size=16)
        for columns in rows.groups():
            counts.append(_scored(columns).sum(-1))
            for name, values in sorted(columns.items()):
                content.update(f"{name} {values.shape}".encode() + np.ascontiguousarray(values, "<i4").tobytes())
        self.starts, self.content = np.concatenate(counts).cumsum(), content.hexdigest()

    @property
    def targets(self) -> int:
        """Scored targets of all rows."""
        return int(self.starts[-1])

    @property
    def bytes(self) -> int:
        return 4 * self.targets * self.wide

    def _column(self, values: np.ndarray, numbers: np.ndarray, columns: Columns) -> np.ndarray:
        scored = _scored(columns)
        made = np.zeros((*scored.shape, self.wide), dtype=np.float32)
        for row, number in enumerate(numbers):
            made[row, scored[row]] = values[self.starts[number] : self.starts[number + 1]]
        return made


def _scored(columns: Columns) -> np.ndarray:
    """The positions that predict a scored target, bool [rows, S]."""
    return (targets(as_batch(columns)["labels"]) != IGNORE).numpy()


class TaughtCorpus:
    """The rows of a run, to train on and of evaluated sets, with the values of the ``teacher``'s job.

    Raises as :func:`with_column`.
    """

    def __init__(self, corpus: Corpus, student: Job, teacher: Job) -> None:
        args, column = student.args, str(student.args.goal.teacher)
        make = functools.partial(TaughtRows, column=column, wide=args.goal.columns[column][-1])
        self.teacher, self.column, self.words = teacher, column, vocabulary_of(student, teacher)
        self.corpus, self.splits = with_column(corpus, args, make)
        self.train, self.root = self.splits["train"], cache_root() / "teachers"

    def folder(self, rows: TaughtRows) -> Path:
        """The folder of the values of ``rows``, under a name of all that they depend on."""
        numbers, compute = self.teacher.args.goal.numbers, self.teacher.recipe.compute
        key = [VALUES_FORMAT, rows.content, identity_of(str(self.teacher.args.model)), self.words]
        key += [numbers["teacher_top_k"], numbers["temperature"], compute.dtype, compute.experts]
        return self.root / digest([*key, self.teacher.args.weight_dtype, transformers.__version__])

    def learn(self, console: Console) -> None:
        """Read the values of all rows, computed first where they are not kept; the teacher's memory is free after it.

        Raises UserError if there is no room for them on the disk, or the teacher's weights are refused.
        """
        # of equal rows, as where the only text there is is evaluated too, one
        splits = {self.folder(rows): (name, rows) for name, rows in self.splits.items()}
        missing = {name: rows for name, rows in splits.values() if not self._kept(rows)}
        targets, total = (sum(getattr(rows, count) for _, rows in splits.values()) for count in ("targets", "bytes"))
        args, done = self.teacher.args, "" if missing else "read from "
        top = f"its {args.goal.numbers['teacher_top_k']:.0f} likeliest of {self.words:,} tokens"
        say(console, f"teacher: {args.model}, {top} at {targets:,} scored targets")
        say(console, f"         {size(total)} on disk, {done}{self.root}")
        if missing:
            hosts().together(lambda: self._reserve(missing.values()))
            self._compute(missing, console)
        for rows in self.splits.values():
            rows.values = _mapped(self.folder(rows) / _VALUES, rows, "r")

    def _kept(self, rows: TaughtRows) -> bool:
        return all(hosts().gather(is_whole(self.folder(rows))))

    def _reserve(self, missing: Iterable[TaughtRows]) -> None:
        """Take the room on the disk for the values, so that it can't be short in the middle of the pass."""
        for rows in missing:
            part = self._part(rows)
            try:
                part.mkdir(parents=True, exist_ok=True)
                with open(part / _VALUES, "ab") as file:
                    os.posix_fallocate(file.fileno(), 0, max(rows.bytes, 1))
            except OSError as error:
                shutil.rmtree(part, ignore_errors=True)
                raise UserError(
                    asked=f"{size(rows.bytes)} for what {self.teacher.args.model} says",
                    found=f"{size(shutil.disk_usage(self.root.parent).free)} free in {self.root}: {error.strerror}",
                    why=f"at each scored target {rows.wide} numbers of 4 bytes are kept",
                    instead="a smaller --teacher_top_k, SHARDWRIGHT_CACHE=/a/larger/disk, or less data",
                ) from error

    def _part(self, rows: TaughtRows) -> Path:
        """The folder of values that are being computed; each host has its own, as they may share a cache."""
        folder = self.folder(rows)
        return folder.with_name(f"{folder.name}.part-{hosts().index}")

    def _compute(self, missing: Mapping[str, TaughtRows], console: Console) -> None:
        job = self.teacher
        source = open_hub_weights(
            str(job.args.model), job.facts.whole, console, rows=job.rows_needed, packed=job.packed_as_published
        )
        mesh = build_mesh(job.recipe.mesh)
        with waiting(console, "placing the teacher on the devices …"), reading(source, console):
            placed = place_model(job, mesh, weights_of(job, source, None))
        step = ReferenceStep(placed, self.column, self.words, TEACHER_PASS)
        share = batch_share(mesh, job.recipe.batch)
        for name, rows in missing.items():
            self._pass(step, name, rows, share, console)
        placed.parameters.clear()  # the student needs the room
        free(placed.model)
        del placed, step
        gc.collect()

    def _pass(self, step: ReferenceStep, name: str, rows: TaughtRows, share: tuple[int, int], console: Console) -> None:
        """Compute the values of ``rows`` from where an earlier pass was stopped, and publish them."""
        part, count = self._part(rows), self.teacher.evaluation_rows
        first = min(hosts().gather(_done(part))) // count
        values = _mapped(part / _VALUES, rows, "r+")
        saved = time.monotonic()
        for start, found in step.over(rows, (count, *share), first, f"teacher, {name} rows", console):
            end = start + len(found)
            scored = _scored(rows.plain.read(np.arange(start, end)))
            values[rows.starts[start] : rows.starts[end]] = found[scored]
            if time.monotonic() - saved > _SAVED_EVERY:
                values.flush()
                Folder(part).write(_DONE, str(end).encode())
                saved = time.monotonic()
        values.flush()
        with written_to_cache(folder := self.folder(rows)):
            publish(part, folder)
        shutil.rmtree(part, ignore_errors=True)  # where another host published its own first


def _mapped(file: Path, rows: TaughtRows, mode: Literal["r", "r+"]) -> np.memmap:
    return np.memmap(file, "<f4", mode, shape=(rows.targets, rows.wide))


def _done(part: Path) -> int:
    """The rows whose values are in ``part`` for sure."""
    try:
        return int((part / _DONE).read_text())
    except (OSError, ValueError):
        return 0


def taught(corpus: Corpus, job: Job, teacher: Job | None, console: Console) -> Corpus:
    """``corpus`` with what ``teacher`` says of its rows; None: the rows hold it already, or nobody asks for it.

    Raises UserError as :class:`TaughtCorpus`.
    """
    if teacher is None:
        return corpus
    found = TaughtCorpus(corpus, job, teacher)
    found.learn(console)
    return found.corpus
