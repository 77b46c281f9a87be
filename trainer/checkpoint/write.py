"""Checkpoints out: written while training goes on, whole or not there at all."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    PretrainedConfig,
    PreTrainedTokenizerBase,
    TrainerState,
)

from trainer.checkpoint import manifest, tensors
from trainer.checkpoint.read import NAME, folder_of, whole_steps
from trainer.errors import UserError
from trainer.storage import Folder, StorageError
from trainer.xla import sharding


def expired(steps: Sequence[int], limit: int | None, best: int | None) -> list[int]:
    """Which of the whole checkpoints (oldest first) to remove, to keep ``limit``: never the newest, nor the best."""
    if limit is None:
        return []
    kept = {*steps[-1:], best}
    surplus = [step for step in steps if step not in kept]
    return surplus[: max(len(steps) - limit, 0)]


@dataclass(frozen=True)
class Saved:
    """A save that ended: its step, bytes, and the seconds that writing took."""

    step: int
    bytes: int
    seconds: float


class CheckpointWriter:
    """Writes the checkpoints of one run into ``output``, one at a time, in a thread of its own.

    Args:
        texts: name -> content, of the files that are the same in every checkpoint.
        limit: how many to keep; None: all.
    """

    def __init__(
        self,
        output: Folder,
        texts: Mapping[str, bytes],
        limit: int | None = None,
    ) -> None:
        self.output, self.texts, self.limit = output, texts, limit
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[Saved] | None = None

    def remove_half_written(self) -> None:
        """Remove what killed saves left in the output folder: nobody else writes there."""
        for name in self.output.names():
            folder = self.output / name
            if NAME.fullmatch(name) and not manifest.is_whole(folder) and manifest.ours(folder.names()):
                manifest.remove(folder)

    def save(
        self,
        state: Mapping[str, torch.Tensor],
        host: Mapping[str, Any],
        trainer_state: TrainerState,
    ) -> tuple[float, Saved | None]:
        """Copy ``state`` to the host and let the thread write it; waits for the write before, if one is under way.

        Returns:
            the seconds that the copy took (training stood still meanwhile), and the write that was waited for.

        Raises:
            StorageError: the write before failed.
        """
        before = self.wait()
        started = time.perf_counter()
        snapshot = {name: sharding.shards(tensor) for name, tensor in state.items()}
        shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
        pause = time.perf_counter() - started
        texts = {**self.texts, "host.json": as_json(host), "trainer_state.json": as_json(asdict(trainer_state))}
        best = trainer_state.best_global_step
        self._writing = self._thread.submit(self._write, host["step"], snapshot, shapes, texts, best)
        return pause, before

    def finished(self) -> Saved | None:
        """The write that has ended since the last call, if one has.

        Raises:
            StorageError: it failed.
        """
        return self.wait() if self._writing is not None and self._writing.done() else None

    def wait(self) -> Saved | None:
        """The write under way, once it has ended; None if there is none.

        Raises:
            StorageError: it failed.
        """
        writing, self._writing = self._writing, None
        try:
            return None if writing is None else writing.result()
        except UserError as error:
            steps = whole_steps(self.output)
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
        started = time.perf_counter()
        folder = folder_of(self.output, step)
        if manifest.ours(folder.names()):
            manifest.remove(folder)  # of a run that went on from an older one
        try:
            files = tensors.write_tensors(folder, snapshot, shapes)
            for name, data in texts.items():
                parent, _, base = name.rpartition("/")
                (folder / parent if parent else folder).write(base, data)
                files[name] = manifest.checksum(data)
            manifest.write_manifest(folder, files)
        except BaseException:
            _remove_quietly(folder)
            raise
        for old in expired(whole_steps(self.output), self.limit, best):
            manifest.remove(folder_of(self.output, old))
        size = sum(int(entry["bytes"]) for entry in files.values())
        return Saved(step, size, time.perf_counter() - started)


def _remove_quietly(folder: Folder) -> None:
    """Give back the room of a save that failed, if the disk lets us; why it failed is what the user hears."""
    try:
        manifest.remove(folder)
    except UserError:
        return


def run_texts(
    texts: Mapping[str, Any], config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase | None
) -> dict[str, bytes]:
    """The files that are the same in every checkpoint of a run.

    Args:
        texts: name -> JSON-able content.
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
    return (json.dumps(value, indent=2, default=str) + "\n").encode()
