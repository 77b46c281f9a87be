"""transformers' callbacks: calling them, and keeping their states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainerState

# semi-private: transformers/trainer_callback.py, transformers 5.23
from transformers.trainer_callback import CallbackHandler, ExportableState

from shardwright.arguments.schedule import Schedule


class Callbacks(CallbackHandler):
    """Calls callbacks, and keeps their states for a run that goes on.

    They get no ``optimizer`` and no dataloader: the update is a part of the step's one computation, and a batch that a
    callback took would be missing from training. The ``model``'s parameters are the trained ones, on the devices.

    Args:
        remembered: :meth:`states` of the run that this one goes on with, else empty. A callback's options stay as they
            were made.
    """

    def __init__(
        self,
        callbacks: Sequence[TrainerCallback | type[TrainerCallback]],
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

    def states(self) -> dict[str, Any]:
        """The callbacks' JSON-able states (EarlyStopping: how often in a row it was not better)."""
        remembering: Any = [callback for callback in self.callbacks if isinstance(callback, ExportableState)]
        states: Any = TrainerState(stateful_callbacks=remembering).stateful_callbacks
        return states
