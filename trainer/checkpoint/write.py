"""Writes a run's checkpoints while training goes on; each is whole or not there at all.

A save has three parts: the state's shards are copied to the host, for which training pauses; a thread writes them; and
the manifest (`trainer.checkpoint.manifest`) is written last. If a write fails, the run stops.
"""

from __future__ import annotations

import functools
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase, TrainerState

from trainer.checkpoint import manifest, tensors
from trainer.checkpoint.lineage import NAME, Lineage, folder_of, line_to, whole_steps, write_lineage
from trainer.checkpoint.read import RunCheckpoint
from trainer.errors import UserError
from trainer.hosts import LostHost, hosts
from trainer.storage import Folder, StorageError
from trainer.xla import sharding


def expired(steps: Sequence[int], limit: int | None, best: int | None) -> list[int]:
    """Returns which of a run's whole checkpoints, in the order of writing, to remove, so that ``limit`` are kept.

    The one written last and the one of step ``best`` are never removed.
    """
    if limit is None:
        return []
    kept = {*steps[-1:], best}
    surplus = [step for step in steps if step not in kept]
    return surplus[: max(len(steps) - limit, 0)]


@dataclass(frozen=True)
class Saved:
    """A save that has ended: its step, its bytes, and the seconds that writing took."""

    step: int
    bytes: int
    seconds: float


class CheckpointWriter:
    """Writes the checkpoints of one run into ``output``, one at a time, in a thread of its own.

    Several hosts write a checkpoint together: each its shards, the first all that there is one of, the manifest last.
    Where it is used in a ``with``, the write under way has ended when that ends, whatever ended it.

    Args:
        texts: name -> content of the files that are the same in every checkpoint.
        limit: how many of the run's own checkpoints to keep; None: all.
        check_held: raises StorageError once ``output`` is another run's.
    """

    def __init__(
        self,
        output: Folder,
        texts: Mapping[str, bytes],
        limit: int | None = None,
        check_held: Callable[[], None] = lambda: None,
    ) -> None:
        self.output, self.texts, self.limit, self.check_held = output, texts, limit, check_held
        self.lineage: Lineage = {}
        self._hosts = hosts().beside()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[Saved] | None = None

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writing is not None:
            wait([self._writing])

    def begin(self, resume: RunCheckpoint | None = None) -> list[int]:
        """Removes what killed saves left, and makes the line that ends in ``resume`` the folder's live one.

        A run that starts anew, or goes on from a checkpoint of another folder, begins a line of its own.

        Returns:
            the steps of the whole checkpoints that are set aside: no run removes them, but one is replaced when this
            run comes to its step.
        """
        self.lineage = self._hosts.once(lambda: self._begun(resume))
        return self._hosts.once(lambda: [step for step in whole_steps(self.output) if step not in self.lineage])

    def _begun(self, resume: RunCheckpoint | None) -> Lineage:
        self.check_held()
        for name in self.output.names():
            folder = self.output / name
            if NAME.fullmatch(name) and not manifest.is_whole(folder) and manifest.ours(folder.names()):
                manifest.remove(folder)
        line: Lineage = {}
        if resume is not None and resume.folder == folder_of(self.output, resume.step):
            line = line_to(self.output, resume.step, resume.ancestors)
        write_lineage(self.output, line)
        return line

    def save(
        self, state: Mapping[str, torch.Tensor], host: Mapping[str, Any], trainer_state: TrainerState
    ) -> tuple[float, Saved | None]:
        """Waits for the write before, if one is under way; then copies ``state`` to the host, for the thread to write.

        Returns:
            the seconds that the copy took, for which training stood still; and the write that was waited for.

        Raises:
            StorageError: the write before failed.
        """
        before = self.wait()
        started = time.perf_counter()
        snapshot = {name: sharding.shards(tensor) for name, tensor in state.items()}
        shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
        pause = time.perf_counter() - started
        host = {**host, "lineage": {str(step): mark for step, mark in self.lineage.items()}}
        texts = {**self.texts, "host.json": as_json(host), "trainer_state.json": as_json(asdict(trainer_state))}
        # one of another folder, which is a path, is not this run's to remove
        match = NAME.fullmatch(trainer_state.best_model_checkpoint or "")
        best = int(match[1]) if match else None
        self._writing = self._thread.submit(self._write, host["step"], snapshot, shapes, texts, best)
        return pause, before

    def finished(self) -> Saved | None:
        """Returns the write that has ended since the last call, if one has.

        Raises:
            StorageError: it failed.
        """
        return self.wait() if self._writing is not None and self._writing.done() else None

    def wait(self) -> Saved | None:
        """Waits for the write under way, and returns it; None if there is none.

        Raises:
            StorageError: it failed.
        """
        writing, self._writing = self._writing, None
        try:
            return None if writing is None else writing.result()
        except LostHost:
            raise
        except UserError as error:
            steps = [step for step in self.lineage if manifest.is_whole(folder_of(self.output, step))]
            kept = f"checkpoint-{steps[-1]} is whole" if steps else "no earlier one was saved"
            raise StorageError(
                asked=f"a checkpoint in {self.output}",
                found=f"{error.asked}: {error.found}",
                why=f"a run that can't be saved must not go on as if it were; {kept}",
                instead=error.instead,
            ) from error

    def _write(
        self,
        step: int,
        snapshot: tensors.Snapshot,
        shapes: Mapping[str, Sequence[int]],
        texts: Mapping[str, bytes],
        best: int | None,
    ) -> Saved:
        started, job = time.perf_counter(), self._hosts
        folder = folder_of(self.output, step)
        try:
            job.once(lambda: self._make_room(folder))
            part = job.together(lambda: tensors.write_part(folder, snapshot, job.index))
            parts = job.gather(part)
            files = job.once(lambda: self._write_rest(folder, step, parts, shapes, texts))
        except BaseException:
            if job.first and not manifest.is_whole(folder):  # it is, where another host died just after
                _remove_quietly(folder)
            raise
        # if that fails nothing is removed: it may be another run's by now
        job.once(lambda: manifest.check_written(folder, files))
        self.lineage.pop(step, None)
        self.lineage[step] = job.once(lambda: manifest.mark(folder))
        for old in expired(list(self.lineage), self.limit, best):
            job.once(functools.partial(manifest.remove, folder_of(self.output, old)))
            del self.lineage[old]
        size = sum(int(entry["bytes"]) for entry in files.values())
        return Saved(step, size, time.perf_counter() - started)

    def _make_room(self, folder: Folder) -> None:
        self.check_held()
        if manifest.ours(folder.names()):
            manifest.remove(folder)  # one that was set aside: this run comes to its step

    def _write_rest(
        self,
        folder: Folder,
        step: int,
        parts: Sequence[tensors.Part],
        shapes: Mapping[str, Sequence[int]],
        texts: Mapping[str, bytes],
    ) -> dict[str, manifest.Checksum]:
        """What there is one of, once every host has written its tensors; the manifest, last, makes it whole."""
        files = tensors.write_listing(folder, parts, shapes)
        for name, data in texts.items():
            parent, _, base = name.rpartition("/")
            (folder / parent if parent else folder).write(base, data)
            files[name] = manifest.checksum(data)
        # first, or a kill in between would leave a whole checkpoint that counts as set aside
        write_lineage(self.output, [*(other for other in self.lineage if other != step), step])
        manifest.write_manifest(folder, files)
        return files


def _remove_quietly(folder: Folder) -> None:
    """Removes what a failed save wrote; an error in that is dropped, for the user must hear why the save failed."""
    try:
        manifest.remove(folder)
    except UserError:
        return


def run_texts(
    texts: Mapping[str, Any], config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase | None
) -> dict[str, bytes]:
    """Returns name -> content of the files that are the same in every checkpoint of a run.

    Args:
        texts: name -> JSON-able content of those that are not the config's or the tokenizer's.
    """
    files = {name: as_json(value) for name, value in texts.items()}
    files["config.json"] = as_json(config.to_dict())
    if tokenizer is not None:
        with tempfile.TemporaryDirectory() as local:
            tokenizer.save_pretrained(local)
            for path in sorted(Path(local).iterdir()):
                files[f"{manifest.TOKENIZER}/{path.name}"] = path.read_bytes()
    return files


def as_json(value: Any) -> bytes:
    """Returns ``value`` as JSON; what JSON does not know is written as its ``str``."""
    return (json.dumps(value, indent=2, default=str) + "\n").encode()
