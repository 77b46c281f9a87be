"""Families whose attention needs more than its structure: one entry a line, by the name of a class of transformers'."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwright.models.attention.block_indexer import chosen_keys

# class of a module → the forward that it has under our attention: its own numbers, in a way that XLA can run
FORWARDS: dict[str, Callable[..., Any]] = {
    "Qwen4ExpTextQSAIndexer": chosen_keys,
}
