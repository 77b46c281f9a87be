"""Readers of a run's `trainer_state.json`."""

import json
from operator import itemgetter
from pathlib import Path
from typing import Any


def entries(output: Path, name: str) -> list[dict[str, Any]]:
    """The lines of the run's log that have a value of ``name``."""
    return [each for each in json.loads((output / "trainer_state.json").read_text())["log_history"] if name in each]


def logged(output: Path, name: str, *more: str) -> list[Any]:
    """The values of ``name`` in the run's log; with ``more``, tuples of them all."""
    return [*map(itemgetter(name, *more), entries(output, name))]


def losses(output: Path) -> list[tuple[float, ...]]:
    """Where each training line of the log stands, its loss, norm and rate."""
    return logged(output, "loss", "step", "grad_norm", "learning_rate", "epoch")
