"""transformers' callbacks: calling them, keeping their states, and those that only observe.

Observers (``--report_to``, ``--profile_steps``) can't end a run that has begun.
"""

import functools
from typing import Any

from rich.console import Console
from torch import nn
from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainerControl, TrainerState

# semi-private: transformers/trainer_callback.py and integrations/integration_utils.py, transformers 5.23
from transformers.integrations import get_reporting_integration_callbacks
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.trainer_callback import CallbackHandler, ExportableState

from shardwright.arguments.schedule import Schedule
from shardwright.checkpoint.lineage import live_steps
from shardwright.errors import UserError, did_you_mean
from shardwright.files.folder import Folder
from shardwright.hosts.restarts import note, words_again
from shardwright.inputs import TrainerCallbacks
from shardwright.report.lines import say


class Callbacks(CallbackHandler):
    """Calls callbacks, and keeps their states for a run that goes on.

    They get no ``optimizer`` and no dataloader: the update is a part of the step's one computation, and a batch that a
    callback took would be missing from training. The ``model``'s parameters are the trained ones, on the devices.

    ``remembered`` are :meth:`states` of the run that this one goes on with. A callback's options stay as made.
    """

    def __init__(
        self,
        callbacks: TrainerCallbacks,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        schedule: Schedule,
        remembered: Any,
    ) -> None:
        super().__init__(callbacks, model, tokenizer, None, schedule)
        for name, found in (remembered or {}).items():
            named = [callback for callback in self.callbacks if type(callback).__name__ == name]
            for callback, state in zip(named, found if isinstance(found, list) else [found], strict=False):
                kept = state.get("attributes", {})
                vars(callback).update({key: value for key, value in kept.items() if key in vars(callback)})

    def hear_saves(self, *, observers: bool) -> bool:
        """Whether one of them has an ``on_save`` of its own; ``observers``: trackers count too."""
        told = [
            c.callback if isinstance(c, Tracker) else c for c in self.callbacks if observers or type(c) is not Tracker
        ]
        return any(type(callback).on_save is not TrainerCallback.on_save for callback in told)

    def states(self) -> dict[str, Any]:
        """The callbacks' JSON-able states (EarlyStopping: how often in a row it was not better)."""
        remembering: Any = [callback for callback in self.callbacks if isinstance(callback, ExportableState)]
        states: Any = TrainerState(stateful_callbacks=remembering).stateful_callbacks
        return states


class Tracker(TrainerCallback):
    """Wraps an observing callback, such as one of transformers' integrations, and calls it until it fails.

    A failure before the first step (no key, no server) ends the run; nothing is lost yet. A later one is reported.
    """

    def __init__(self, name: str, callback: TrainerCallback, console: Console) -> None:
        self.name, self.callback, self._console, self._lost = name, callback, console, False

    def _tell(self, event: str, args: Any, state: Any, control: Any, **given: Any) -> Any:
        if self._lost:
            return None
        try:
            return getattr(self.callback, event)(args, state, control, **given)
        except (Exception, SystemExit) as error:  # each package raises its own types
            if event in ("on_init_end", "on_train_begin"):
                raise UserError(
                    asked=f"--report_to {self.name}",
                    found=_short(error),
                    why="it can't take this run's log",
                    instead="the login or the server that it needs, or its offline mode (WANDB_MODE=offline); or "
                    "--report_to none",
                ) from None
            self._lost = True
            say(self._console, f"report:  {self.name} is told nothing more, and the run goes on: {_short(error)}")
            return None


for _event in [name for name in vars(TrainerCallback) if name.startswith("on_")]:
    setattr(Tracker, _event, functools.partialmethod(Tracker._tell, _event))


def open_trackers(asked: str, console: Console) -> list[Tracker]:
    """A tracker for each name in ``asked`` (``none``, or names with commas between); UserError for a bad one."""
    names = [] if asked == "none" else [name.strip() for name in asked.split(",")]
    for name in names:
        if name not in INTEGRATION_TO_CALLBACK:
            known = sorted(INTEGRATION_TO_CALLBACK)
            raise UserError(
                asked=f"--report_to {asked}",
                found=f"{name!r} is none of transformers' integrations",
                why="the log goes to trackers through these",
                instead=f"{did_you_mean(name, known)}none, or some of {', '.join(known)}, with commas between them",
            )
    found = []
    for name in dict.fromkeys(names):
        (kind,) = get_reporting_integration_callbacks(name)
        try:
            found.append(Tracker(name, kind(), console))
        except (Exception, SystemExit) as error:  # each integration has its own way to say that its package is missing
            raise UserError(
                asked=f"--report_to {name}",
                found=_short(error),
                why="transformers' integration needs that package, as it is configured here",
                instead=f"pip install {name}, or --report_to {','.join(n for n in names if n != name) or 'none'}",
            ) from None
    return found


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


class SupervisorNotes(TrainerCallback):
    """Notes for the supervisor how the run's command goes on, as soon as there is something to go on from."""

    def __init__(self) -> None:
        self._begun = False

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not self._begun:
            self._begun = True
            note(begun=True, more=words_again(args.output_dir, args.resume_from_checkpoint, saved=False))
            self._look(args)

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        if self._begun and "saved_step" in (logs or {}):
            self._look(args)

    def _look(self, args: Any) -> None:
        if args.resume_from_checkpoint not in (None, "latest") and live_steps(Folder(args.output_dir)):
            note(more=words_again(args.output_dir, args.resume_from_checkpoint, saved=True))
