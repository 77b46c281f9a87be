"""Checkpoints that lose nothing: `checkpoint-N` folders, written while training goes on, whole or not there at all.

A save is three things: the state's shards are copied to the host (the pause), a thread writes them, and the manifest
(`trainer.checkpoint.manifest`) is written last. A failed write stops the run. What is read back is checked first.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    TrainerState,
)

from trainer.arrays import Array
from trainer.checkpoint import manifest, tensors
from trainer.errors import UserError
from trainer.layout.plan import ShardingPlan
from trainer.storage import Folder

NAME = re.compile(r"checkpoint-(\d+)")
METRICS = "metrics"  # the one tensor of the state that is no parameter's


class RunCheckpoint:
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
        self._tensors = tensors.StoredTensors(folder)

    def source(self, name: str) -> Array:
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


def open_source(path: str) -> tuple[Callable[[str], Array], RunCheckpoint]:
    """A checkpoint's weights, by the model's own names, and what else is in it; every file is checked first.

    Raises:
        UserError: there is no whole checkpoint at ``path``.
    """
    found = open_checked(Folder(path), Console(quiet=True))
    return found.source, found


def open_checked(folder: Folder, console: Console) -> RunCheckpoint:
    """The checkpoint in ``folder``, once every file's size and checksum are those that it was written with.

    Raises:
        UserError: names the file that is missing or damaged.
    """
    bar = (TextColumn(f"checking {folder}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*bar, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("check", total=None)
        manifest.check(folder, lambda done, total: progress.update(task, completed=done, total=total))
    return RunCheckpoint(folder)


def find_checkpoint(asked: str | None, output: Folder, console: Console) -> RunCheckpoint | None:
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
