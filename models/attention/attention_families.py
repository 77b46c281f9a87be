"""Families whose attention needs a forward of its own, one line each, by the name of transformers' class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwright.models.attention.block_indexer import chosen_keys

# class of a module → its forward under our attention: the same numbers, in operations that XLA can run
FORWARDS: dict[str, Callable[..., Any]] = {"Qwen4ExpTextQSAIndexer": chosen_keys}
