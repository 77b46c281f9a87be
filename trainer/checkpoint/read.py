"""Finds a run's checkpoint, refuses it early if the run can't go on from it, checks it, and reads it.

A checkpoint is opened in two parts: its small files (names, shapes and all that is not tensors) are checked and read at
once, and its tensor files, nearly all of its bytes, only after the caller has accepted the small files.
"""

import contextlib
import copy
import functools
import json
import os
import tempfile
import weakref
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from torch import nn
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerState,
)

from shardwright.arguments.adapter_options import AdapterArguments
from shardwright.checkpoint import format_1, host_state, manifest, tensors
from shardwright.checkpoint.lineage import Lineage, folder_of, noted, noted_folder, saved_steps
from shardwright.checkpoint.same_model import differences
from shardwright.errors import UserError, a_type, command
from shardwright.files.arrays import Array
from shardwright.files.folder import Folder, StorageError
from shardwright.files.hub_names import ADAPTER_CONFIG
from shardwright.hosts.hosts import hosts
from shardwright.model.meta_model import config_of
from shardwright.models.adapters.lora import own_parameters
from shardwright.objectives import DEFAULT
from shardwright.report.bars import byte_bar
from shardwright.report.lines import say
from shardwright.weights.names import first_lines
from shardwright.weights.tokenizer_files import write_all

T = TypeVar("T")
METRICS = "metrics"  # the only tensor of the state that belongs to no parameter or buffer
BUFFER = " buffer"  # follows a buffer's name, as the names of optimizer state follow a parameter's


class RunCheckpoint:
    """A run's checkpoint, on disk or in a store: the host's state, and a source of its tensors; needs no device.

    Constructing one checks and reads its small files, and raises UserError if one is damaged or the checkpoint is not
    whole; :meth:`check_tensors` checks the others.
    """

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self._files = manifest.read_manifest(folder)
        self._parts = {name: entry for name, entry in self._files.items() if manifest.TENSORS.fullmatch(name)}
        manifest.check(folder, {name: entry for name, entry in self._files.items() if name not in self._parts})
        self.host = self._json("host.json", host_state.checked_host)
        self.arguments = self._json("training_args.json", host_state.checked_arguments)
        self.recipe: dict[str, Any] = self._json("recipe.json", dict)
        self._trainer_state = self._json("trainer_state.json", host_state.checked_trainer_state)
        sizes = {name: int(entry["bytes"]) for name, entry in self._parts.items()}
        if manifest.format_of(self._files) == 1:
            format_1.migrate(folder, self.host, self.arguments, self._trainer_state)
            self._tensors = format_1.open_tensors(folder, sizes)
        else:
            self._check_listed(manifest.INDEX)
            self._tensors = tensors.open_tensors(folder, sizes)
        self.step: int = self.host["step"]
        self.ancestors: Lineage = {int(step): mark for step, mark in self.host.get("lineage", {}).items()}

    def __call__(self, name: str) -> Array:
        """A parameter, buffer or (parameter's name, space, state tensor's) optimizer state; else KeyError."""
        try:
            return self._tensors(name)
        except KeyError:
            return self._tensors(name + BUFFER)

    def check_tensors(self, console: Console) -> None:
        """Raises UserError, which names the file, unless all tensor files are as written; several hosts share them."""
        mine = dict([*self._parts.items()][hosts().index :: hosts().count])
        total = sum(int(entry["bytes"]) for entry in mine.values())
        with byte_bar(console, f"checking {self.folder}", total) as advance:
            hosts().together(lambda: manifest.check(self.folder, mine, advance))

    @property
    def has_adapter(self) -> bool:
        """Whether it holds an adapter, without the weights beside it."""
        return ADAPTER_CONFIG in self._files

    @property
    def trainer_state(self) -> TrainerState:
        return TrainerState(**copy.deepcopy(self._trainer_state))

    @property
    def config(self) -> PretrainedConfig:
        return self._json("config.json", config_of)

    @property
    def generation(self) -> GenerationConfig | None:
        """The generation config that the run's base had; None: it had none, or an older version wrote it."""
        there = manifest.GENERATION in self._files
        return self._json(manifest.GENERATION, GenerationConfig.from_dict) if there else None

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        within = f"{manifest.TOKENIZER}/"
        inside = [name for name in self._files if name.startswith(within)]
        with contextlib.ExitStack() as undo:
            local = undo.enter_context(tempfile.TemporaryDirectory())
            write_all(Path(local), {name.removeprefix(within): self.folder.read(name) for name in inside})
            try:
                tokenizer = AutoTokenizer.from_pretrained(local, trust_remote_code=False, mistral_format=False)
                tokenizer("text")  # it reads some settings only now
            except Exception as error:  # of many types, as in _json
                raise self._unusable(manifest.TOKENIZER, error) from error
            weakref.finalize(tokenizer, undo.pop_all().close)  # its files can be copied as long as it lives
            return tokenizer

    def check_model(self, model: PreTrainedModel, config: PretrainedConfig | None = None) -> None:
        """Raises UserError unless the weights are those of ``model``, on meta and unstacked, or of its adapter.

        ``config`` is the job's, where ``model`` is the text part of a multimodal one.
        """
        wanted = {name: tuple(t.shape) for name, t in {**own_parameters(model), **saved_buffers(model)}.items()}
        names = (name for name in self._tensors.names() if " " not in name or name.endswith(BUFFER))
        found = {name: tuple(self._tensors(name).shape) for name in names if name != METRICS}
        saved: dict[str, Any] = self._json("config.json", dict)
        try:
            other = differences(saved, config or model.config)
        except Exception as error:  # transformers' config classes raise many types
            raise manifest.damaged(self.folder, f"config.json is no config of a model ({error})") from None
        wrong = [f"{name} is not in it" for name in wanted if name not in found]
        wrong += [f"{name}, which the model has not" for name in found if name not in wanted]
        for name, shape in wanted.items():
            if found.get(name, shape) != shape:
                wrong.append(f"{name} of shape {list(found[name])}, the model's is {list(shape)}")
        if wrong and not other and (self._trained or any("_lora_" in name for name in wanted)):
            raise UserError(
                asked=f"the weights in {self.folder}",
                found=first_lines(wrong),
                why="they are of the same model, of which this run's options train others",
                instead=f"the options that it was saved with: {self._trained or 'no --lora_r'}; or a new run, in "
                "another --output_dir",
            )
        if other or wrong:
            of_run = f"--model {given}" if (given := self.arguments.get("model")) else "no --model"
            raise UserError(
                asked=f"the weights in {self.folder}",
                found=first_lines([*other, *wrong]),
                why="its weights are another model's: under this one's config they compute other numbers, if any",
                instead=f"the model that it was saved with ({of_run}; its config is {self.folder}/config.json)",
            )

    @property
    def _trained(self) -> str:
        """The options by which the saved run trained other weights than all of a model's; empty: it trained these."""
        usual = {each.name: each.default for each in fields(AdapterArguments)} | {"objective": DEFAULT}
        said = {name: value for name, value in self.arguments.items() if value not in (None, usual.get(name, value))}
        return " ".join(f"--{name} {value}" for name, value in said.items())

    def check_optimizer(self, optim: str) -> None:
        """Raises UserError unless the state beside the weights is that of ``--optim``."""
        saved = self.arguments.get("optim")
        if saved != optim:
            raise UserError(
                asked=f"--optim {optim} from {self.folder}",
                found=f"the state of {saved}" if saved else "no word of the optimizer whose state it is",
                why="an optimizer goes on from what it knew of the gradients, and another keeps other things of them",
                instead=f"--optim {saved}; or " * bool(saved) + "a new run that starts from its weights alone: export "
                f"them ({command('export')}), and give --model that folder",
            )

    def best_for(self, output: Folder) -> str | None:
        """The best checkpoint's note for a run in ``output`` that goes on from here, if there is one."""
        best = self.trainer_state.best_model_checkpoint
        return None if best is None else noted(noted_folder(best, self.folder.parent), output)

    def other_options(self, arguments: Mapping[str, Any]) -> list[str]:
        """A line for each of ``arguments`` that differs from the saved run's: allowed, but worth saying."""
        unimportant = {"output_dir", "overwrite_output_dir", "resume_from_checkpoint", "staging_dir"}
        return [
            f"{f'no --{name}' if value is None else f'--{name} {value}'} "
            f"(it was {'not given' if self.arguments[name] is None else self.arguments[name]})"
            for name, value in arguments.items()
            if name not in unimportant and name in self.arguments and not _same(self.arguments[name], value)
        ]

    def _json(self, name: str, make: Callable[[dict[str, Any]], T]) -> T:
        """The result of ``make``, which raises an error if it is wrong, on the content of a file of the manifest."""
        self._check_listed(name)
        data = self.folder.read(name)
        try:
            value = json.loads(data)
            if not isinstance(value, dict):
                raise ValueError(f"{a_type(value)} in the place of a dict")
            return make(value)
        except Exception as error:  # of many types: values of wrong types fail anywhere
            raise self._unusable(name, error) from error

    def _check_listed(self, name: str) -> None:
        if name not in self._files:
            raise manifest.damaged(self.folder, f"{name} is not in its {manifest.MANIFEST}")

    def _unusable(self, name: str, error: Exception) -> UserError:
        return manifest.damaged(self.folder, f"{name} can't be read ({type(error).__name__}: {str(error)[:300]})")


def saved_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that belong to ``model``'s state dict, under the names that they have in a checkpoint."""
    saved = model.state_dict().keys()
    return {name + BUFFER: buffer for name, buffer in model.named_buffers() if name in saved}


def open_checked(folder: Folder, console: Console) -> RunCheckpoint:
    """The checkpoint in ``folder``; raises UserError, which names the file, unless it is whole and as written."""
    found = RunCheckpoint(folder)
    found.check_tensors(console)
    return found


def find_checkpoint(
    asked: str | None, output: Folder, console: Console, accept: Callable[[RunCheckpoint], None]
) -> RunCheckpoint | None:
    """The checkpoint that ``--resume_from_checkpoint`` asks for: a path's, or the newest whole one of ``output``.

    ``latest`` passes over damaged ones, and says so; it does not see those that were set aside. None if nothing was
    asked for, or nothing was saved yet. Several hosts find the same. ``accept`` raises UserError if the run can't go on
    from a checkpoint, before its tensor files are read, which ends the search. Raises UserError too if the checkpoint
    at the path is damaged or not there, or all of ``output`` are damaged, and StorageError if that can't be told.
    """
    if asked is None:
        return None
    if asked != "latest":
        found = RunCheckpoint(Folder(asked))
        accept(found)
        found.check_tensors(console)
        return found
    problems = []
    for step, whole in reversed(hosts().once(lambda: saved_steps(output)).items()):
        if not whole:
            say(console, f"checkpoint-{step} is passed over: its save never ended (no {manifest.MANIFEST})")
            continue
        try:
            found = hosts().together(functools.partial(RunCheckpoint, folder_of(output, step)))
        except StorageError as error:
            raise _untold(step, error) from error
        except UserError as error:
            problems.append(error.found)
        else:
            accept(found)
            try:
                found.check_tensors(console)
                return found
            except StorageError as error:
                raise _untold(step, error) from error
            except UserError as error:
                problems.append(error.found)
        say(console, f"checkpoint-{step} is passed over: {problems[-1]}")
    if problems:
        raise UserError(
            asked="--resume_from_checkpoint latest",
            found=f"{len(problems)} checkpoints in {output}, none of them undamaged: {problems[0]}",
            why="starting anew would throw away what they stand for, unasked",
            instead="another --output_dir to start anew",
        )
    say(console, f"no checkpoint in {output} yet: training starts anew")
    return None


def _same(saved: Any, value: Any) -> bool:
    """Whether two values of an option are one; a path may be relative, and is absolute in a ``run.yaml``."""
    both = isinstance(saved, str) and isinstance(value, str)
    return saved == value or (both and os.path.abspath(saved) == os.path.abspath(value))


def _untold(step: int, error: StorageError) -> StorageError:
    return type(error)(
        asked=f"--resume_from_checkpoint latest, which is checkpoint-{step}",
        found=f"{error.asked}: {error.found}",
        why="so it can't be told whether that one is whole, and an older one would set it aside",
        instead="the same command again; or an older one, by its path",
    )
