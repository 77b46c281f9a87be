"""The shape of a dataset's records, recognised by its columns.

A record of any shape is one string: the text itself for ``text``, otherwise the JSON of the columns that are read. So
the held-out share, the cache and a stream's cursor, which know documents by their text, need not know shapes.
"""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from datasets import Value
from datasets.features.features import require_decoding  # semi-private: datasets 5.2

from shardwright.data.records.column_names import is_string, offered, offered_texts
from shardwright.errors import UserError
from shardwright.objectives import DEFAULT, OBJECTIVES
from shardwright.objectives.distill import IDS, LOGPS
from shardwright.objectives.objective import KTO, RecordShape
from shardwright.objectives.sft import SHAPES

# columns that may be lists; but for the first three, a string too: the JSON of a list, or a text
_LISTS = ("input_ids", IDS, LOGPS, "messages", "conversations", "prompt", "completion", "chosen", "rejected")
_RENAMED = (
    "columns by the names that they have there: --columns instruction=NAME,output=NAME, which the chat template "
    "writes, or prompt=NAME,completion=NAME, which stay as they are"
)


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
    # records with one of the names that were given need all; those with none are read by their own
    named = not {own for _, own in reads[0].names}.isdisjoint(columns)
    for shape in (shape for shape in reads if bool(shape.names) is named):
        called = all(own in columns for _, own in shape.names)
        if called and all(_fits(name, columns.get(shape.name_of[name])) for name in shape.required):
            _check_media(columns, asked, shape)
            return shape
    _check_separators(columns, asked)
    _check_below(columns, asked, reads)
    _refuse(columns, asked, reads)


def _check_below(columns: Mapping[str, Any], asked: str, reads: Sequence[RecordShape]) -> None:
    """Refuse a file whose records are a list under one name, such as ``{"data": [...]}``."""
    for name, feature in columns.items():
        inner = getattr(feature, "feature", None)
        if isinstance(inner, Mapping) and any({*each.required} <= inner.keys() for each in reads):
            raise UserError(
                asked=asked,
                found=f"one record, with a list under {name!r} of objects with {', '.join(inner)}",
                why="a file's records are its lines, or its one list",
                instead=f"a file of that list alone: json.dump(json.load(open(path))[{name!r}], open(other, 'w'))",
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


def _refuse(columns: Mapping[str, Any], asked: str, reads: Sequence[RecordShape]) -> NoReturn:
    """Refuse records of which no shape of ``reads`` fits the columns."""
    found = "the columns " + ", ".join(f"{n} ({getattr(f, 'dtype', 'nested')})" for n, f in columns.items())
    names, plain = dict(reads[0].names), [*dict.fromkeys(replace(shape, names=()) for shape in reads)]
    option = offered(columns, plain)
    if text := names.get("text"):
        raise UserError(
            asked=f"{asked}: the text in its column {text!r}",
            found=found,
            why="there is no such column of text",
            instead=offered_texts(columns, text) or _RENAMED,
        )
    if absent := [own for own in names.values() if own not in columns]:
        near = [each for own in absent for each in difflib.get_close_matches(own, columns, n=1)]
        raise UserError(
            asked=f"{asked} {option_of(reads[0])}",
            found=found,
            why=f"there is no column {', '.join(absent)}",
            instead=option or (f"the name {', '.join(near)}" if near else _RENAMED),
        )
    tried = [shape for shape in reads if bool(shape.names) is bool(names)]
    whole = next((each for each in tried if all(each.name_of[name] in columns for name in each.required)), None)
    if whole is None and not any(shape.is_text for shape in reads):
        raise _unread(asked, f"the columns {', '.join(columns)}", reads, option)
    known, others = "; ".join(", ".join(shape.required) for shape in plain), [option] if option else []
    of_others = ((n, each) for n, entry in OBJECTIVES.items() for each in entry.shapes if each not in SHAPES)
    objective, shape = next((pair for pair in of_others if columns.keys() >= {*pair[1].required}), ("", None))
    if shape is not None:
        known += f"; and {', '.join(shape.required)} with an --objective such as {objective}"
        others.insert(0, f"--objective {objective}")
    if not option and (texts := offered_texts(columns, None)):
        others.append(f"{texts}, to train on that text alone")
    why = f"records have one of these sets of columns: {known}"
    instead = "; or ".join(others if option else [*others, _RENAMED])
    if whole is not None and (whole not in SHAPES or shape is None):
        unfit = next(name for name in whole.required if not _fits(name, columns[whole.name_of[name]]))
        needed = "true or false" if unfit in KTO else "a list" if unfit in _LISTS[:3] else "text"
        why, instead = f"{unfit} has to be {needed}", f"each record's {unfit} written as {needed}"
    raise UserError(asked=asked, found=found, why=why, instead=instead)


def option_of(shape: RecordShape) -> str:
    """The option that gives the shape its names."""
    return f"--columns {','.join(map('='.join, shape.names))}"


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


def _unread(asked: str, found: str, reads: Sequence[RecordShape], option: str = "") -> UserError:
    known = "; or ".join(shape.words or ", ".join(shape.required) for shape in reads)
    return UserError(
        asked=f"{asked}, to train on {reads[0].trained}",
        found=found,
        why="the objective reads other records",
        instead=f"{option or f'a dataset with the columns {known}'}; or --objective {DEFAULT}, the default",
    )


def _fits(column: str, feature: Any) -> bool:
    if column in _LISTS and feature is not None and not isinstance(feature, Value):
        return True
    kind = getattr(feature, "dtype", "")
    if column in KTO:
        return kind == "bool" or kind.startswith(("int", "uint"))
    return column not in _LISTS[:3] and is_string(feature)
