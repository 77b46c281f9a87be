"""The learning rate of each step, by transformers' schedulers, on the host."""

import inspect
import json
import math
import warnings
from collections.abc import Mapping
from typing import Any

from shardwright.errors import UserError, did_you_mean

# transformers' SchedulerType, copied so that reading a command line does not import it, without the two that need the
# loss of every step, which the host does not read
KINDS = [
    *("linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup"),
    *("inverse_sqrt", "cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay"),
]
# the arguments that `Schedule` passes by itself
_GIVEN = {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch"}

_EXAMPLES = {"min_lr_rate": 0.1, "num_decay_steps": 10, "num_cycles": 1, "power": 2.0, "timescale": 1000}


class Schedule:
    """A learning rate for each step, by one of transformers' schedulers: a ``kind`` in :data:`KINDS`.

    ``notice`` says that the rate never reaches its peak; it is empty if it does.

    Raises:
        UserError: the scheduler has no such argument as in ``options``, lacks one, or gives no rate with these.
    """

    def __init__(
        self, kind: str, learning_rate: float, warmup_steps: int, total_steps: int, options: Mapping[str, Any]
    ) -> None:
        self._asked = f"--lr_scheduler_type {kind}" + (f" --lr_scheduler_kwargs {dict(options)}" if options else "")
        import torch

        # semi-private: transformers/optimization.py, transformers 5.23
        from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION, get_scheduler
        from transformers.trainer_utils import SchedulerType

        function: Any = TYPE_TO_SCHEDULER_FUNCTION[SchedulerType(kind)]
        further = {name: p for name, p in inspect.signature(function).parameters.items() if name not in _GIVEN}
        self._known = {name: p.default is p.empty for name, p in further.items()}  # name → whether it is needed
        self._check_names(options)

        # transformers' schedulers write the rate into an optimizer; this one optimises nothing
        carrier = torch.optim.SGD([torch.zeros((), requires_grad=True)], lr=learning_rate)
        try:
            with warnings.catch_warnings(action="ignore"):
                scheduler = get_scheduler(kind, carrier, warmup_steps, total_steps, dict(options))
        except Exception as error:  # of many types: a bad value breaks it anywhere
            raise self._refusal(f"{type(error).__name__}: {error}") from error
        assert isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR)
        # all in KINDS are functions of the step alone, so any step can be skipped to
        self._factor, self._peak, self._step = scheduler.lr_lambdas[0], learning_rate, 0
        self._check_rates(warmup_steps, total_steps)
        self.notice = ""
        if warmup_steps >= total_steps and self._factor(total_steps - 1) < 1:
            self.notice = f"warm-up of {warmup_steps} steps in a run of {total_steps}: it never reaches its peak"

    @property
    def learning_rate(self) -> float:
        """The rate of the next step."""
        return self._peak * self._factor(self._step)

    def get_last_lr(self) -> list[float]:
        """The same under torch's name, for callbacks."""
        return [self.learning_rate]

    def advance(self, steps: int = 1) -> None:
        self._step += steps

    def _check_names(self, options: Mapping[str, Any]) -> None:
        for name in options:
            if name not in self._known:
                raise self._refusal(f"no argument {name!r}; {did_you_mean(str(name), self._known)}".rstrip("; "))
        missing = [name for name, needed in self._known.items() if needed and name not in options]
        if missing:
            raise self._refusal(f"no {' and no '.join(missing)}, which it needs")

    def _check_rates(self, warmup_steps: int, total_steps: int) -> None:
        """Refuse invalid rates at the steps where a schedule can turn: about its phases' ends."""
        turns = (0, warmup_steps, total_steps // 2, total_steps - 1)
        for step in sorted({near for turn in turns for near in (turn - 1, turn, turn + 1) if 0 <= near < total_steps}):
            try:
                rate = self._peak * self._factor(step)
                good = 0 <= rate < math.inf
            except (ArithmeticError, TypeError, ValueError) as error:
                raise self._refusal(f"{type(error).__name__} at step {step + 1}: {error}") from error
            if not good:
                raise self._refusal(f"the rate {rate} at step {step + 1}")

    def _refusal(self, found: str) -> UserError:
        names = ", ".join(f"{name} (needed)" if needed else name for name, needed in self._known.items())
        needed = [name for name, needed in self._known.items() if needed]
        first = [name for name in _EXAMPLES if name in self._known][:1]
        shown = {name: _EXAMPLES.get(name, 1) for name in needed or first}
        return UserError(
            asked=self._asked,
            found=found,
            why="this scheduler of transformers gives no learning rates with that",
            instead=f"--lr_scheduler_kwargs '{json.dumps(shown)}'; it takes {names}"
            if names
            else "no --lr_scheduler_kwargs",
        )
