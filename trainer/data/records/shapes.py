"""The shape of a dataset's records, recognised by its columns.

A record of any shape is one string: the text itself for ``text``, otherwise the JSON of the columns that are read. So
the held-out share, the cache and a stream's cursor, which know documents by their text, need not know shapes.
"""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from datasets import Value
from datasets.features.features import require_decoding  # semi-private: datasets 5.2

from shardwright.errors import UserError
from shardwright.objectives import DEFAULT, OBJECTIVES
from shardwright.objectives.distill import IDS, LOGPS
from shardwright.objectives.objective import KTO, RecordShape
from shardwright.objectives.sft import SHAPES

# columns that may be lists; but for the first three, a string too: the JSON of a list, or a text
_LISTS = ("input_ids", IDS, LOGPS, "messages", "conversations", "prompt", "completion", "chosen", "rejected")


class BadRecord(ValueError):
    """A record that can't become a sample: the column, and its fault.

    ``parts``: the chat template renders its beginning differently alone than within the whole. ``instead``: a way round
    that leaves the data as they are.
    """

    def __init__(self, column: str, found: str, parts: bool = False, instead: str = "") -> None:
        self.column, self.found, self.parts, self.instead = column, found, parts, instead
        super().__init__(f"{column}: {found}")


def recognise(columns: Mapping[str, Any], asked: str, reads: Sequence[RecordShape]) -> RecordShape:
    """The first shape of ``reads`` that fits records with these columns (name -> feature of `datasets`).

    Raises UserError, with the columns, if none fits.
    """
    for shape in reads:
        if all(_fits(name, columns.get(name)) for name in shape.required):
            _check_media(columns, asked, shape)
            return shape
    _check_separators(columns, asked)
    whole = next((shape for shape in reads if columns.keys() >= {*shape.required}), None)
    if whole is None and not any(shape.is_text for shape in reads):
        raise _unread(asked, f"the columns {', '.join(columns)}", reads)
    known, other = "; ".join(", ".join(shape.required) for shape in reads), ""
    for name, shape in [(name, shape) for name, entry in OBJECTIVES.items() for shape in entry.shapes]:
        if shape not in SHAPES and columns.keys() >= {*shape.required}:
            known += f"; and {', '.join(shape.required)} with an --objective such as {name}"
            other = f"--objective {name}; or "
            break
    # the column that --text_column names
    named = reads[0].required[0] if len(reads) == 1 and reads[0].is_text else None
    why = "there is no such column of text" if named else f"records have one of these sets of columns: {known}"
    instead = other + _columns_offered(columns, named)
    if whole is not None and named is None and (whole not in SHAPES or not other):
        unfit = next(name for name in whole.required if not _fits(name, columns[name]))
        needed = "true or false" if unfit in KTO else "a list" if unfit in _LISTS[:3] else "text"
        why, instead = f"{unfit} has to be {needed}", f"each record's {unfit} written as {needed}"
    raise UserError(
        asked=asked if named is None else f"{asked}: the text in its column {named!r}",
        found="the columns " + ", ".join(f"{n} ({getattr(f, 'dtype', 'nested')})" for n, f in columns.items()),
        why=why,
        instead=instead,
    )


def _check_separators(columns: Mapping[str, Any], asked: str) -> None:
    """Refuse a table whose one column is several, with another mark than a comma between them."""
    name = next(iter(columns), "")
    if len(columns) == 1 and (found := re.search(r"[;|\t]", name)):
        raise UserError(
            asked=asked,
            found=f"the one column {name!r}",
            why=f"the first line of a table names its columns with commas between them, and here stands {found[0]!r}",
            instead=f"the table with commas: pandas.read_csv(path, sep={found[0]!r}).to_csv(path, index=False)",
        )


def _columns_offered(columns: Mapping[str, Any], named: str | None) -> str:
    """The option to write for records with these columns; ``named``: the one that --text_column names."""
    texts = [name for name, feature in columns.items() if getattr(feature, "dtype", "") in ("string", "large_string")]
    near = difflib.get_close_matches(named or "", texts, n=1)
    offered = ", or ".join(f"--text_column {name}" for name in (near or texts)[:2])
    if named is not None and offered:
        return offered
    renamed = (
        "columns renamed to instruction and output, which the chat template writes, or to prompt and completion, "
        "which stay as they are (dataset.rename_columns, or a table's first line)"
    )
    if turns := next((name for name, feature in columns.items() if _holds_turns(feature)), None):
        return f"that column of turns renamed: dataset.rename_column({turns!r}, 'messages')"
    return f"{offered}, to train on that text alone; or {renamed}" if offered else renamed


def _holds_turns(feature: Any) -> bool:
    """Whether a column is a list of messages, by the keys of its items."""
    item = getattr(feature, "feature", None)
    return isinstance(item, Mapping) and (item.keys() >= {"role", "content"} or item.keys() >= {"from", "value"})


def _check_media(columns: Mapping[str, Any], asked: str, shape: RecordShape) -> None:
    """Refuse pictures, sound and video by the types of columns, before one is decoded."""
    for name in shape.refused:
        if name in columns and require_decoding(columns[name]):
            raise UserError(
                asked=f"{asked}: records with {', '.join(shape.required)}",
                found=f"the column {name} ({type(columns[name]).__name__})",
                why="it is for the model to see, and a run trains on text alone",
                instead=f"records without it: dataset.remove_columns({name!r})",
            )


def recognise_splits(columns: Iterable[Mapping[str, Any]], asked: str, reads: Sequence[RecordShape]) -> RecordShape:
    """The shape of the first split; the others must be readable too, as text from the same column. Raises as above."""
    each = iter(columns)
    shape = recognise(next(each), asked, reads)
    for other in each:
        recognise(other, asked, (shape,) if shape.is_text else reads)
    return shape


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


def _fits(column: str, feature: Any) -> bool:
    if column in _LISTS and feature is not None and not isinstance(feature, Value):
        return True
    kind = getattr(feature, "dtype", "")
    if column in KTO:
        return kind == "bool" or kind.startswith(("int", "uint"))
    return column not in _LISTS[:3] and kind in ("string", "large_string")
