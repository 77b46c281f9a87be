"""Checkpoints that lose nothing: `checkpoint-N` folders, written while training goes on, whole or not there at all.

A save is three things: the state's shards are copied to the host (the pause), a thread writes them, and the manifest
(`trainer.manifest`) is written last. A failed write stops the run. What is read back is checked first.
"""

from __future__ import annotations

import base64
import importlib.metadata
import json
import random
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    TrainerState,
)

from trainer import checkpoint_tensors, manifest, sharding
from trainer.errors import UserError
from trainer.plan import ShardingPlan
from trainer.storage import Folder, StorageError

NAME = re.compile(r"checkpoint-(\d+)")
METRICS = "metrics"  # the one tensor of the state that is no parameter's


# ---- in ----


class Checkpoint:
    """A checkpoint on disk or in a store, ready to be read: by slices, under any layout and any stacking of layers.

    Needs no device. Its files are believed to be whole: :func:`open_checked` makes sure.
    """

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        manifest.read_manifest(folder)
        self.host: dict[str, Any] = self._json("host.json")
        self.arguments: dict[str, Any] = self._json("training_args.json")
        self.recipe: dict[str, Any] = self._json("recipe.json")
        self.step: int = self.host["step"]
        self._tensors = checkpoint_tensors.Tensors(folder)

    def source(self, name: str) -> sharding.Array:
        """The values of a parameter or of one of its moments; KeyError if there are none of that name.

        Args:
            name: the model's own name, stacked or not; a moment's has ``first moment`` or ``second moment`` behind it.
        """
        return self._tensors(name)

    @property
    def trainer_state(self) -> TrainerState:
        return TrainerState(**self._json("trainer_state.json"))

    @property
    def config(self) -> PretrainedConfig:
        return AutoConfig.for_model(**self._json("config.json"))

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        with tempfile.TemporaryDirectory() as local:
            source = self.folder / manifest.TOKENIZER
            for name in source.names():
                Path(local, name).write_bytes(source.read(name))
            return AutoTokenizer.from_pretrained(local)

    def check_model(self, plan: ShardingPlan) -> None:
        """Raise UserError unless the weights are those of ``plan``'s model: the same names and shapes."""
        wanted = {p.name: tuple(p.shape) for p in plan.parameters}
        names = [name for name in self._tensors.names() if " " not in name and name != METRICS]
        found = {name: tuple(self._tensors(name).shape) for name in names}
        wrong = [f"{name} is not in it" for name in wanted if name not in found]
        wrong += [f"{name}, which the model has not" for name in found if name not in wanted]
        wrong += [
            f"{name} of shape {list(found[name])}, the model's is {list(shape)}"
            for name, shape in wanted.items()
            if found.get(name, shape) != shape
        ]
        if wrong:
            more = f"; and {len(wrong) - 4} more" if wrong[4:] else ""
            raise UserError(
                asked=f"to resume from {self.folder}",
                found="; ".join(wrong[:4]) + more,
                why="its weights are another model's",
                instead=f"the model that it was saved with (--model; its config is {self.folder}/config.json)",
            )

    def other_options(self, arguments: Mapping[str, Any]) -> list[str]:
        """What of ``arguments`` differs from the saved run's, a line each: allowed, but worth saying."""
        unimportant = {"output_dir", "overwrite_output_dir", "resume_from_checkpoint"}
        return [
            f"--{name} {value} (it was {self.arguments[name]})"
            for name, value in arguments.items()
            if name not in unimportant and name in self.arguments and self.arguments[name] != value
        ]

    def _json(self, name: str) -> Any:
        try:
            return json.loads(self.folder.read(name))
        except ValueError as error:
            raise manifest.damaged(self.folder, f"{name} can't be read ({error})") from None


def open_source(path: str) -> tuple[Callable[[str], sharding.Array], Checkpoint]:
    """A checkpoint's weights, by the model's own names, and what else is in it; every file is checked first.

    Raises:
        UserError: there is no whole checkpoint at ``path``.
    """
    found = open_checked(Folder(path), Console(quiet=True))
    return found.source, found


def open_checked(folder: Folder, console: Console) -> Checkpoint:
    """The checkpoint in ``folder``, once every file's size and checksum are those that it was written with.

    Raises:
        UserError: names the file that is missing or damaged.
    """
    bar = (TextColumn(f"checking {folder}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*bar, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("check", total=None)
        manifest.check(folder, lambda done, total: progress.update(task, completed=done, total=total))
    return Checkpoint(folder)


def find(asked: str | None, output: Folder, console: Console) -> Checkpoint | None:
    """What ``--resume_from_checkpoint`` asks for: a path's checkpoint, or the newest whole one of ``output``.

    ``latest`` passes over damaged ones, and says so; None if nothing was asked or nothing was saved yet.

    Raises:
        UserError: the checkpoint at the path is damaged or not there, or all of ``output`` are damaged.
    """
    if asked is None:
        return None
    if asked != "latest":
        return open_checked(Folder(asked), console)
    steps = whole_steps(output)
    problems = []
    for step in reversed(steps):
        try:
            return open_checked(folder_of(output, step), console)
        except UserError as error:
            problems.append(error)
            console.print(f"checkpoint-{step} is passed over: {error.found}", highlight=False, soft_wrap=True)
    if problems:
        raise UserError(
            asked="--resume_from_checkpoint latest",
            found=f"{len(problems)} checkpoints in {output}, none of them undamaged: {problems[0].found}",
            why="starting anew would throw away what they stand for, unasked",
            instead="another --output_dir to start anew",
        )
    console.print(f"no checkpoint in {output} yet: training starts anew", highlight=False, soft_wrap=True)
    return None


def folder_of(output: Folder, step: int) -> Folder:
    return output / f"checkpoint-{step}"


def whole_steps(output: Folder) -> list[int]:
    """The steps of the checkpoints in ``output`` whose save ended, oldest first."""
    steps = sorted(int(match[1]) for name in output.names() if (match := NAME.fullmatch(name)))
    return [step for step in steps if manifest.is_whole(folder_of(output, step))]


def expired(steps: Sequence[int], limit: int | None, best: int | None) -> list[int]:
    """Which of the whole checkpoints (oldest first) to remove, to keep ``limit``: never the newest, nor the best."""
    if limit is None:
        return []
    kept = {*steps[-1:], best}
    surplus = [step for step in steps if step not in kept]
    return surplus[: max(len(steps) - limit, 0)]


# ---- out ----


@dataclass(frozen=True)
class Saved:
    """A save that ended: its step, bytes, and the seconds that writing took."""

    step: int
    bytes: int
    seconds: float


class Checkpoints:
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
        snapshot: checkpoint_tensors.Snapshot,
        shapes: Mapping[str, Sequence[int]],
        texts: Mapping[str, bytes],
        best: int | None,
    ) -> Saved:
        started = time.perf_counter()
        folder = folder_of(self.output, step)
        if manifest.ours(folder.names()):
            manifest.remove(folder)  # of a run that went on from an older one
        try:
            files = checkpoint_tensors.write_tensors(folder, snapshot, shapes)
            for name, data in texts.items():
                parent, _, base = name.rpartition("/")
                (folder / parent if parent else folder).write(base, data)
                files[name] = manifest.digest(data)
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


# ---- what the host holds ----


def random_state() -> dict[str, Any]:
    """The states of Python's, numpy's and torch's generators, JSON-able."""
    version, words, gauss = random.getstate()
    legacy: Any = np.random.get_state(legacy=False)
    return {
        "python": [version, _as_text(np.array(words, dtype=np.uint32)), gauss],
        "numpy": {**legacy, "state": {**legacy["state"], "key": _as_text(legacy["state"]["key"])}},
        "torch": _as_text(torch.get_rng_state().numpy()),
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Put the generators back as :func:`random_state` found them."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(_as_array(words, np.uint32).tolist()), gauss))
    legacy = state["numpy"]
    np.random.set_state({**legacy, "state": {**legacy["state"], "key": _as_array(legacy["state"]["key"], np.uint32)}})
    torch.set_rng_state(torch.from_numpy(_as_array(state["torch"], np.uint8)))


def _as_text(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _as_array(text: str, dtype: Any) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype=dtype).copy()


def versions() -> dict[str, str]:
    """Of the packages that a state depends on."""
    return {name: importlib.metadata.version(name) for name in ("shardwright", "torch", "torch_xla", "transformers")}
