"""transformers' callbacks: what they are told besides a run's arguments, state and control, and what they remember."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import nn
from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainerState

# semi-private: transformers/trainer_callback.py, transformers 5.23
from transformers.trainer_callback import CallbackHandler, ExportableState


class Rated(Protocol):
    """What has the learning rate of the step that comes next."""

    @property
    def learning_rate(self) -> float: ...


class LearningRate:
    """What callbacks get as ``lr_scheduler``: it can be asked for the rate, in torch's way, and not be stepped."""

    def __init__(self, schedule: Rated) -> None:
        self._schedule = schedule

    def get_last_lr(self) -> list[float]:
        """Returns the rate of the step that comes next, as torch's schedulers do after their own step."""
        return [self._schedule.learning_rate]


class Callbacks(CallbackHandler):
    """Tells callbacks of events, and keeps what they must remember for a run that goes on.

    They get no ``optimizer`` and no dataloader: the update is a part of the step's one computation, and a batch that a
    callback took would be missing from training. The ``model``'s parameters are those that train, on the devices.

    Args:
        remembered: what :meth:`states` returned in the run that this one goes on with, else empty. Options stay those
            that a callback was made with.
    """

    def __init__(
        self,
        callbacks: Sequence[TrainerCallback | type[TrainerCallback]],
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        schedule: Rated,
        remembered: Any,
    ) -> None:
        super().__init__(callbacks, model, tokenizer, None, LearningRate(schedule))
        for name, found in (remembered or {}).items():
            named = [callback for callback in self.callbacks if type(callback).__name__ == name]
            for callback, state in zip(named, found if isinstance(found, list) else [found], strict=False):
                kept = state.get("attributes", {})
                vars(callback).update({key: value for key, value in kept.items() if key in vars(callback)})

    def states(self) -> dict[str, Any]:
        """Returns what the callbacks remember (EarlyStopping: how often in a row it was not better), JSON-able."""
        remembering: Any = [callback for callback in self.callbacks if isinstance(callback, ExportableState)]
        states: Any = TrainerState(stateful_callbacks=remembering).stateful_callbacks
        return states
