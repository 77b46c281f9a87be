"""The shape of a dataset's records, recognised by its columns.

A record of any shape is one string: the text itself for ``text``, otherwise the JSON of the columns that are read. So
the held-out share, the cache and a stream's cursor, which know documents by their text, need not know shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from datasets import Value

from shardwright.errors import UserError
from shardwright.objectives import DEFAULT, OBJECTIVES
from shardwright.objectives.objective import RecordShape
from shardwright.objectives.sft import SHAPES


class BadRecord(ValueError):
    """A record that can't become a sample: the column, and its fault.

    ``parts``: the chat template renders its beginning differently alone than within the whole.
    """

    def __init__(self, column: str, found: str, parts: bool = False) -> None:
        self.column, self.found, self.parts = column, found, parts
        super().__init__(f"{column}: {found}")


def recognise(columns: Mapping[str, Any], asked: str, reads: Sequence[RecordShape]) -> RecordShape:
    """The first shape of ``reads`` that fits records with these columns (name -> feature of `datasets`).

    Raises:
        UserError: none fits; lists the columns.
    """
    for shape in reads:
        if all(_FITS.get(name, _is_text)(columns.get(name)) for name in shape.required):
            return shape
    if not any(shape.is_text for shape in reads):
        raise _unread(asked, f"the columns {', '.join(columns)}", reads)
    known = "; ".join(", ".join(shape.required) for shape in reads)
    for name, shape in [(name, shape) for name, entry in OBJECTIVES.items() for shape in entry.shapes]:
        if shape not in SHAPES and columns.keys() >= {*shape.required}:
            known += f"; and {', '.join(shape.required)} with an --objective such as {name}"
            break
    named = reads[0].required[0] if len(reads) == 1 else None  # the column that --text_column names
    raise UserError(
        asked=asked if named is None else f"{asked}: the text in its column {named!r}",
        found="the columns " + ", ".join(f"{n} ({getattr(f, 'dtype', 'nested')})" for n, f in columns.items()),
        why="there is no such column of text" if named else f"records have one of these sets of columns: {known}",
        instead="--text_column with the name of a column of strings",
    )


def check_text(asked: str, reads: Sequence[RecordShape]) -> None:
    """Refuse plain text where the objective reads none."""
    if not any(shape.is_text for shape in reads):
        raise _unread(asked, "plain text", reads)


def _unread(asked: str, found: str, reads: Sequence[RecordShape]) -> UserError:
    known = "; or ".join(shape.words or ", ".join(shape.required) for shape in reads)
    return UserError(
        asked=f"{asked}, to train on {reads[0].trained}",
        found=found,
        why="the objective reads other records",
        instead=f"a dataset with the columns {known}; or --objective {DEFAULT}, the default",
    )


def _is_text(feature: Any) -> bool:
    return getattr(feature, "dtype", None) in ("string", "large_string")


def _is_list(feature: Any) -> bool:
    return feature is not None and not isinstance(feature, Value)


def _is_either(feature: Any) -> bool:
    """Whether it is a list, or a string: the JSON of a list, or a text."""
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
