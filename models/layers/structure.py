"""Structural comparison of modules: layers that compare equal compute the same from the same inputs."""

import enum
import functools
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

_DEEPEST = 6  # levels of nested objects
# nn.Module's own attributes, which hold parameters, buffers, submodules and hooks
_OWN = frozenset(vars(nn.Module())) - {"training"}


def described(value: Any, depth: int = 0) -> Any:
    """Plain data that is equal for equal values; None for an object that can't be described."""
    if value is None:
        return "None"
    if isinstance(value, bool | int | float | complex | str | bytes | enum.Enum | torch.dtype | torch.device | type):
        return type(value).__name__, value
    if isinstance(value, torch.Tensor):
        return ("tensor", tuple(value.shape), value.dtype, None if value.is_meta else value.cpu().numpy().tobytes())
    if isinstance(value, PretrainedConfig):
        return "config", type(value).__name__, value.to_json_string(use_diff=False)
    if isinstance(value, functools.partial):
        return described((value.func, value.args, value.keywords), depth)
    if isinstance(value, types.MethodType):
        return "method", value.__func__, type(value.__self__)
    if callable(value) and not isinstance(value, nn.Module):
        return "function", value
    if depth > _DEEPEST:
        return None
    if isinstance(value, Mapping):
        items = [(str(key), described(inner, depth + 1)) for key, inner in value.items()]
        return None if any(inner is None for _, inner in items) else ("mapping", tuple(items))
    if isinstance(value, tuple | list | set | frozenset):
        entries = sorted(value, key=str) if isinstance(value, set | frozenset) else value
        inner = [described(entry, depth + 1) for entry in entries]
        return None if any(entry is None for entry in inner) else (type(value).__name__, tuple(inner))
    return None


def attributes(module: nn.Module) -> dict[str, Any]:
    """A module's own attributes, without parameters, buffers, submodules and hooks."""
    return {key: value for key, value in vars(module).items() if key not in _OWN}
