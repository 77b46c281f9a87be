"""The shapes that records have: by which columns each is known, and which of them are read.

A record of any shape is one string: of ``text`` the text itself, of all others the JSON of the columns that are read.
So what knows documents by their text (the share that is held out, the cache, a stream's cursor) knows no shapes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from datasets import Value

from shardwright.errors import UserError


@dataclass(frozen=True)
class RecordShape:
    """What a record is made of.

    Args:
        name: as a person is told it.
        required: the columns that it is known by.
        optional: columns that are read where there are any.
        trained: what the loss is on, in words.
    """

    name: str
    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    trained: str = "every token"

    @property
    def is_text(self) -> bool:
        """Whether records are documents of plain text, which rows are cut from; all others are samples."""
        return self.name == "text"

    @property
    def is_chat(self) -> bool:
        """Whether every record needs a chat template."""
        return self.name in ("messages", "conversations")

    @property
    def is_pair(self) -> bool:
        """Whether a record has two answers to one prompt, of which one was chosen."""
        return self == PAIRS

    def document(self, record: Mapping[str, Any]) -> str | None:
        """The record as one string; of text None if there is none."""
        if self.is_text:
            return record[self.required[0]]
        values = {name: _without_nulls(record.get(name)) for name in (*self.required, *self.optional)}
        values = {name: value for name, value in values.items() if value is not None}
        return json.dumps(values, ensure_ascii=False, default=str)


class BadRecord(ValueError):
    """A record that no sample can be made of: the column, and what was found there.

    ``parts``: the chat template renders its beginning otherwise than the whole.
    """

    def __init__(self, column: str, found: str, parts: bool = False) -> None:
        self.column, self.found, self.parts = column, found, parts
        super().__init__(f"{column}: {found}")


_TURNS = "the assistant's turns"
# in this order: a set with a rendered `text` beside its messages is a set of messages
SHAPES = (
    RecordShape("messages", ("messages",), ("tools",), _TURNS),
    RecordShape("conversations", ("conversations",), ("system", "tools"), _TURNS),
    RecordShape("prompt/completion", ("prompt", "completion"), ("tools",), "the completion"),
    RecordShape("instruction/output", ("instruction", "output"), ("input", "system"), "the output"),
    RecordShape("text", ("text",)),
    RecordShape("input_ids", ("input_ids",), ("labels",), "every token, or its labels"),
)
# recognised where an objective asks for pairs, and nowhere else: many sets of pairs can be trained on as messages too
PAIRS = RecordShape(
    "chosen/rejected", ("chosen", "rejected"), ("prompt", "tools"), "the chosen answer against the rejected"
)


def text_shape(column: str = "text") -> RecordShape:
    """The shape of records with a text in ``column``."""
    return RecordShape("text", (column,))


def recognise(columns: Mapping[str, Any], text_column: str | None, asked: str, pairs: bool = False) -> RecordShape:
    """The shape of records with these columns (name -> feature of `datasets`); ``text_column`` names it as text.

    Args:
        pairs: they must be pairs of answers.

    Raises:
        UserError: they are none that is known; lists the columns.
    """
    fitting = [PAIRS] if pairs else SHAPES if text_column is None else [text_shape(text_column)]
    for shape in fitting:
        if all(_FITS.get(name, _is_text)(columns.get(name)) for name in shape.required):
            return shape
    if pairs:
        raise no_pairs(asked, f"the columns {', '.join(columns)}")
    known = "; ".join(", ".join(shape.required) for shape in SHAPES)
    if PAIRS.required[0] in columns and PAIRS.required[1] in columns:
        known += "; and chosen, rejected with an --objective such as dpo"
    raise UserError(
        asked=asked if text_column is None else f"{asked}: the text in its column {text_column!r}",
        found="the columns " + ", ".join(f"{n} ({getattr(f, 'dtype', 'nested')})" for n, f in columns.items()),
        why="there is no such column of text" if text_column else f"records have one of these sets of columns: {known}",
        instead="--text_column with the name of a column of strings",
    )


def no_pairs(asked: str, found: str) -> UserError:
    """The error of an objective on data that are no pairs of answers."""
    return UserError(
        asked=f"{asked}, to learn which of two answers is preferred",
        found=found,
        why="each record needs a chosen and a rejected answer, as strings or as messages",
        instead="a dataset with the columns prompt, chosen and rejected; or --objective sft, the default",
    )


def _is_text(feature: Any) -> bool:
    return getattr(feature, "dtype", None) in ("string", "large_string")


def _is_list(feature: Any) -> bool:
    return feature is not None and not isinstance(feature, Value)


def _is_either(feature: Any) -> bool:
    """A list, or the JSON of one; or a string that is meant as one."""
    return _is_list(feature) or _is_text(feature)


_FITS: dict[str, Callable[[Any], bool]] = {
    "messages": _is_either,
    "conversations": _is_either,
    "prompt": _is_either,
    "completion": _is_either,
    "chosen": _is_either,
    "rejected": _is_either,
    "input_ids": _is_list,
}


def _without_nulls(value: Any) -> Any:
    """``value`` without keys that are null: Arrow gives every message the keys of all others."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list | tuple) else value
