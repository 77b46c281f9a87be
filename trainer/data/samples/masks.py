"""Masks of records: they leave out of the loss turns of weight 0, and masks beside tokens.

Shape legend: T tokens of a sample.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from shardwright.data.records.shapes import BadRecord
from shardwright.models.ops.labels import IGNORE

_WEIGHTS = ("weight", "train")  # keys of messages: OpenAI's 0 or 1, Axolotl's false or true


def silenced(messages: list[dict[str, Any]], first: int) -> frozenset[int]:
    """The numbers of the messages that say that no loss is on them. The key leaves the messages where it is obeyed.

    It stays where it asks for a loss on what is no answer. ``first``: the first message that may be trained on.
    """
    silent = set()
    for i, message in enumerate(messages):
        for key in _WEIGHTS:
            if (weight := message.get(key)) not in (None, 0, 1):
                raise BadRecord("messages", f"message {i + 1} has {key} {weight!r}: a loss is on a turn or not")
            if weight is not None and not weight:
                silent.add(i)
            if not message.get(key) or (message["role"] == "assistant" and i >= max(first, 1)):
                message.pop(key, None)
    return frozenset(silent)


def masked(values: Mapping[str, Any], tokens: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and labels [T] without padding, and without labels where another mask is 0; raises BadRecord.

    ``values``: the record's masks.
    """
    masks = {name: _mask(name, value, len(tokens)) for name, value in values.items()}
    seen = masks.pop("attention_mask", np.ones(len(tokens), dtype=bool))
    labels = np.where(np.logical_and.reduce([*masks.values(), seen]), labels, IGNORE).astype(np.int32)
    places = np.flatnonzero(seen)
    if not len(places):
        raise BadRecord("attention_mask", "no token that is seen")
    if places[-1] - places[0] + 1 != len(places):
        raise BadRecord("attention_mask", "a 0 between tokens, where padding is at an end")
    return tokens[seen], labels[seen]


def _mask(name: str, given: Any, count: int) -> np.ndarray:
    plain = isinstance(given, list) and set(map(type, given)) <= {int, bool, float}
    if not plain or len(given) != count or not set(given) <= {0, 1}:
        raise BadRecord(name, f"something other than a 0 or a 1 for each of {count} tokens")
    return np.array(given, dtype=bool)
