"""Checks of a checkpoint's JSON files when it is opened, before hours of work."""

from __future__ import annotations

import math
from typing import Any

from transformers import TrainerState

from shardwright.checkpoint.host_state import check_random_state

_MOST = 1 << 53  # no count is as large


def checked_host(host: dict[str, Any]) -> dict[str, Any]:
    """``host``; raises an error, of many types, unless it is as a save writes `host.json`."""
    _check(host, "step", _is_count(host["step"]))
    _check(host, "learning_rate", _is_number(host["learning_rate"]) and 0 < host["learning_rate"] < math.inf)
    _check(host, "metrics_read", type(host["metrics_read"]) is bool)
    _check(host, "data", isinstance(host["data"], dict))
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
