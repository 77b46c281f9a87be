"""The host's part of a checkpoint: the run's position, the states of random generators, and packages' versions."""

from __future__ import annotations

import base64
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from shardwright.hosts.versions import versions

_NUMPY_WORDS = 624  # of the Mersenne Twister's state


def host_state(
    step: int,
    learning_rate: float,
    data: Mapping[str, Any],
    metrics_read: int,
    mesh: Mapping[str, int],
    asked_batch: Sequence[int],
) -> dict[str, Any]:
    """The host's state after ``step``, as JSON values: with the schedule's peak and the cursor of the next batch.

    ``asked_batch`` is of the command: rows of a micro-batch for each device, and micro-batches a step. A run resumed on
    other devices may have trained with others.
    """
    return {
        "step": step,
        "learning_rate": learning_rate,
        "data": data,
        "metrics_read": metrics_read,
        "random": random_state(),
        "mesh": mesh,
        "asked_batch": list(asked_batch),
        "versions": versions(),
    }


def random_state() -> dict[str, Any]:
    """The states of Python's, numpy's and torch's generators, as JSON values."""
    version, words, gauss = random.getstate()
    legacy: Any = np.random.get_state(legacy=False)
    return {
        "python": [version, _as_text(np.array(words, dtype=np.uint32)), gauss],
        "numpy": {**legacy, "state": {**legacy["state"], "key": _as_text(legacy["state"]["key"])}},
        "torch": _as_text(torch.get_rng_state().numpy()),
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Sets the generators to states of :func:`random_state`; raises errors of many types if they are none."""
    python, legacy, of_torch = _decoded(state)
    random.setstate(python)
    np.random.set_state(legacy)
    torch.set_rng_state(of_torch)


def check_random_state(state: Mapping[str, Any]) -> None:
    """Raises what :func:`set_random_state` would raise, and sets nothing."""
    python, legacy, of_torch = _decoded(state)
    random.Random().setstate(python)
    np.random.RandomState().set_state(legacy)
    torch.Generator().set_state(of_torch)


def _decoded(state: Mapping[str, Any]) -> tuple[Any, Any, torch.Tensor]:
    version, words, gauss = state["python"]
    legacy = state["numpy"]
    key, at = _as_array(legacy["state"]["key"], np.uint32), legacy["state"]["pos"]
    # numpy itself does not look: it would read beyond the key
    if len(key) != _NUMPY_WORDS or type(at) is not int or not 0 <= at <= _NUMPY_WORDS:
        raise ValueError("no state of numpy's generator")
    if gauss is not None and type(gauss) is not float:
        raise ValueError("no state of Python's generator")
    python = (version, tuple(_as_array(words, np.uint32).tolist()), gauss)
    of_numpy = {**legacy, "state": {**legacy["state"], "key": key}}
    return python, of_numpy, torch.from_numpy(_as_array(state["torch"], np.uint8))


def _as_text(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _as_array(text: str, dtype: Any) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype=dtype).copy()
