"""Finds a run's checkpoint, refuses it early if the run can't go on from it, checks it, and reads it.

The checkpoints of a run are the folders `checkpoint-N` of its output directory, N being the step. One is opened in two
parts: its small files (names, shapes and all that is not tensors) are checked and read at once, and its tensor files,
nearly all of its bytes, are checked only after the caller has accepted what the small files say.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase, TrainerState

from trainer.arrays import Array
from trainer.checkpoint import manifest, tensors
from trainer.errors import UserError
from trainer.layout.plan import ShardingPlan
from trainer.report.bars import byte_bar
from trainer.storage import Folder

NAME = re.compile(r"checkpoint-(\d+)")
METRICS = "metrics"  # the only tensor of the state that belongs to no parameter


class RunCheckpoint:
    """A run's checkpoint, on disk or in a store: all that it keeps of the host, and a source of its tensors.

    Needs no device. Constructing one checks and reads its small files; :meth:`check_tensors` checks the others.

    Raises:
        UserError: there is no whole checkpoint in ``folder``, or one of its small files is damaged.
    """

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self._files = manifest.read_manifest(folder)
        manifest.check(folder, [name for name in self._files if not manifest.is_tensors(name)])
        self.host: dict[str, Any] = self._json("host.json")
        self.arguments: dict[str, Any] = self._json("training_args.json")
        self.recipe: dict[str, Any] = self._json("recipe.json")
        self.step: int = self.host["step"]
        self._tensors = tensors.StoredTensors(folder)

    def __call__(self, name: str) -> Array:
        """Returns a parameter or one of its moments as an array; KeyError if there is none of that name.

        Args:
            name: the model's own name, stacked or not; for a moment, followed by ``first moment`` or ``second moment``.
        """
        return self._tensors(name)

    def check_tensors(self, console: Console) -> None:
        """Reads every tensor file and compares its size and checksum with those that it was written with.

        Raises:
            UserError: names the file that is missing or damaged.
        """
        names = [name for name in self._files if manifest.is_tensors(name)]
        total = sum(int(self._files[name]["bytes"]) for name in names)
        with byte_bar(console, f"checking {self.folder}", total) as advance:
            manifest.check(self.folder, names, advance)

    @property
    def trainer_state(self) -> TrainerState:
        return TrainerState(**self._json("trainer_state.json"))

    @property
    def config(self) -> PretrainedConfig:
        return AutoConfig.for_model(**self._json("config.json"))

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        with tempfile.TemporaryDirectory() as local:
            stored = self.folder / manifest.TOKENIZER
            for name in stored.names():
                Path(local, name).write_bytes(stored.read(name))
            return AutoTokenizer.from_pretrained(local)

    def check_model(self, plan: ShardingPlan) -> None:
        """Raises UserError unless the weights have the names and shapes of ``plan``'s model."""
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
        """Returns a line for each of ``arguments`` that differs from the saved run's: allowed, but worth saying."""
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


def open_checked(folder: Folder, console: Console) -> RunCheckpoint:
    """Returns the checkpoint in ``folder``, once all of its files are found to be as they were written.

    Raises:
        UserError: there is no whole checkpoint, or names the file that is missing or damaged.
    """
    found = RunCheckpoint(folder)
    found.check_tensors(console)
    return found


def find_checkpoint(
    asked: str | None, output: Folder, console: Console, accept: Callable[[RunCheckpoint], None]
) -> RunCheckpoint | None:
    """Returns what ``--resume_from_checkpoint`` asks for: a path's checkpoint, or the newest whole one of ``output``.

    ``latest`` passes over damaged ones, and says so. None if nothing was asked for, or nothing was saved yet.

    Args:
        accept: raises UserError if the run can't go on from a checkpoint. It is called before the tensor files are
            read, and what it raises ends the search.

    Raises:
        UserError: the checkpoint at the path is damaged or not there; all of ``output`` are damaged; or ``accept``'s.
    """
    if asked is None:
        return None
    if asked != "latest":
        found = RunCheckpoint(Folder(asked))
        accept(found)
        found.check_tensors(console)
        return found
    problems = []
    for step in reversed(whole_steps(output)):
        try:
            found = RunCheckpoint(folder_of(output, step))
        except UserError as error:
            problems.append(_passed_over(step, error, console))
            continue
        accept(found)
        try:
            found.check_tensors(console)
        except UserError as error:
            problems.append(_passed_over(step, error, console))
            continue
        return found
    if problems:
        raise UserError(
            asked="--resume_from_checkpoint latest",
            found=f"{len(problems)} checkpoints in {output}, none of them undamaged: {problems[0]}",
            why="starting anew would throw away what they stand for, unasked",
            instead="another --output_dir to start anew",
        )
    console.print(f"no checkpoint in {output} yet: training starts anew", highlight=False, soft_wrap=True)
    return None


def _passed_over(step: int, error: UserError, console: Console) -> str:
    """Says on the console that a checkpoint is damaged; returns what was found."""
    console.print(f"checkpoint-{step} is passed over: {error.found}", highlight=False, soft_wrap=True)
    return error.found


def folder_of(output: Folder, step: int) -> Folder:
    """The folder of the checkpoint of ``step``."""
    return output / f"checkpoint-{step}"


def whole_steps(output: Folder) -> list[int]:
    """Returns the steps of the checkpoints in ``output`` whose save ended, oldest first."""
    steps = sorted(int(match[1]) for name in output.names() if (match := NAME.fullmatch(name)))
    return [step for step in steps if manifest.is_whole(folder_of(output, step))]
