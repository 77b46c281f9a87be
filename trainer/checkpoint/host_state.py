"""The host's part of a checkpoint: the run's position, the states of random generators, and packages' versions.

Its JSON files are checked when it is opened, before hours of work.
"""

import base64
import datetime
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import TrainerState

from shardwright.hosts.versions import versions

_GENERATORS = (random, np.random, torch.default_generator)  # of this process
_NUMPY_WORDS = 624  # of the Mersenne Twister's state
_MOST = 1 << 53  # no count is as large


def host_state(
    step: int,
    learning_rate: float,
    data: Mapping[str, Any],
    metrics_read: int,
    mesh: Mapping[str, int],
    asked_batch: Sequence[int],
) -> dict[str, Any]:
    """The host's state after ``step``, as JSON values; ``learning_rate`` is the schedule's peak, ``data`` a cursor.

    ``asked_batch`` is of the command: rows of a device's micro-batch, and micro-batches a step; others may be trained.
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


def set_random_state(state: Mapping[str, Any], generators: tuple[Any, Any, Any] = _GENERATORS) -> None:
    """Sets the generators to states of :func:`random_state`; raises errors of many types if they are none."""
    python, legacy, of_torch = generators
    version, words, gauss = state["python"]
    numpys = state["numpy"]
    key, at = _as_array(numpys["state"]["key"], np.uint32), numpys["state"]["pos"]
    # numpy itself does not look: it would read beyond the key
    if len(key) != _NUMPY_WORDS or type(at) is not int or not 0 <= at <= _NUMPY_WORDS:
        raise ValueError("no state of numpy's generator")
    if gauss is not None and type(gauss) is not float:
        raise ValueError("no state of Python's generator")
    torchs = torch.from_numpy(_as_array(state["torch"], np.uint8))
    python.setstate((version, tuple(_as_array(words, np.uint32).tolist()), gauss))
    legacy.set_state({**numpys, "state": {**numpys["state"], "key": key}})
    of_torch.set_state(torchs)


def check_random_state(state: Mapping[str, Any]) -> None:
    """Raises what :func:`set_random_state` would raise, and sets nothing."""
    set_random_state(state, (random.Random(), np.random.RandomState(), torch.Generator()))


def _as_text(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _as_array(text: str, dtype: Any) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype=dtype).copy()


def checked_host(host: dict[str, Any]) -> dict[str, Any]:
    """``host``; raises an error, of many types, unless it is as a save writes `host.json`."""
    _check(host, "step", _is_count(host["step"]))
    _check(host, "learning_rate", _is_number(host["learning_rate"]) and 0 < host["learning_rate"] < math.inf)
    _check(host, "metrics_read", type(host["metrics_read"]) is bool)
    _check(host, "data", isinstance(host["data"], dict))
    datetime.date.fromisoformat(host["data"].get("date", "2026-01-01"))
    _check(host, "untrained", _is_count(host.get("untrained", 0)))
    _check(host, "says_how", type(host.get("says_how", False)) is bool)
    _check(host, "base", isinstance(host.get("base"), str | None))
    lineage = host.get("lineage", {})
    steps = isinstance(lineage, dict) and all(_is_count(int(step)) for step in lineage)
    _check(host, "lineage", steps and all(isinstance(mark, str) for mark in lineage.values()))
    check_random_state(host["random"])
    return host


def checked_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """``arguments``; raises an error unless the fields that an export reads have their types."""
    _check(arguments, "model", isinstance(arguments.get("model"), str | None))
    _check(arguments, "seed", _is_count(arguments.get("seed", 0)))
    return arguments


def checked_trainer_state(state: dict[str, Any]) -> dict[str, Any]:
    """``state``; raises an error, of many types, unless it is as transformers' class writes `trainer_state.json`."""
    TrainerState(**state)
    for name in ("global_step", "num_input_tokens_seen"):
        _check(state, name, _is_count(state.get(name, 0)))
    epoch, metric, best = state.get("epoch"), state.get("best_metric"), state.get("best_global_step")
    _check(state, "epoch", epoch is None or (_is_number(epoch) and 0 <= epoch < _MOST))
    _check(state, "best_metric", metric is None or _is_number(metric))
    _check(state, "best_global_step", best is None or _is_count(best))
    for name, kind in (("best_model_checkpoint", str), ("stateful_callbacks", dict), ("log_history", list)):
        _check(state, name, isinstance(state.get(name), kind | None))
    for entry in state.get("log_history") or []:
        numbers = [entry[key] for key in ("loss", "eval_loss") if key in entry]
        good = all(map(_is_number, numbers)) and (not numbers or _is_count(entry["step"]))
        _check(state, "log_history", isinstance(entry, dict) and good)
    return state


def _check(values: dict[str, Any], name: str, good: bool) -> None:
    if not good:
        raise ValueError(f"{name} is {repr(values.get(name))[:80]}")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MOST


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < _MOST)
