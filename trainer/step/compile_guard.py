"""CompileGuard: a step that would compile again stops the run, and the error names what changed."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from shardwright.errors import UserError
from shardwright.xla.runtime import program_count


class CompileGuard:
    """Stops a run that would compile its step again, and says which input changed.

    Args:
        what: the step's name in messages.
        expected: compiles that the step may take.
    """

    def __init__(self, what: str, expected: int) -> None:
        self.what, self.expected = what, expected
        self.compiles, self.first = 0, True
        self._before = 0  # compiles of the process when the step began
        self._signature: dict[str, str] = {}

    def before(self, batch: Mapping[str, torch.Tensor]) -> None:
        """Refuse a batch whose names, shapes or dtypes differ from the first batch's: it would compile anew."""
        signature = {name: f"shape {list(t.shape)}, {t.dtype}" for name, t in batch.items()}
        if self.first:
            self._signature = signature
        for name in sorted(signature.keys() | self._signature.keys()):
            now, then = signature.get(name, "absent"), self._signature.get(name, "absent")
            if now != then:
                raise UserError(
                    asked=f"the {self.what} on a batch whose {name!r} is: {now}",
                    found=f"the step was compiled for {name!r} being: {then}",
                    why="a changed input compiles the whole step again, minutes on a pod, at every change",
                    instead="the same shapes and dtypes in every batch: drop or pad the last, pack to sequence_length",
                )
        self._before = program_count()

    def after(self) -> None:
        """Count what the step has compiled. More than expected is an error, since no input changed."""
        self.compiles += program_count() - self._before
        self.first = False
        if self.compiles > self.expected:
            raise UserError(
                asked=f"{self.expected} compile of the {self.what} in this run",
                found=f"{self.compiles} compiles, though every input kept its shape and dtype: "
                + "; ".join(f"{name}: {text}" for name, text in self._signature.items()),
                why="something else in the traced graph changed between two steps, such as a number in its code",
                instead="make what changes a tensor input of the model, or constant",
            )
