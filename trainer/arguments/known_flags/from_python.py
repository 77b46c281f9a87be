"""Options given in Python under other trainers' names."""

import functools
import sys
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from shardwright.arguments.known_flags.entry import word
from shardwright.arguments.known_flags.flag_words import refusal, text_of
from shardwright.arguments.known_flags.translate import Translation, look_up, translated
from shardwright.errors import UserError

Kind = TypeVar("Kind", bound=type)


def takes_known_flags(kind: Kind) -> Kind:
    """Make the dataclass ``kind`` of options take other trainers' too; UserError names all that it can't take.

    A mapping is taken for what a file of options would have of it.
    """
    made: Any = kind.__init__  # type: ignore[misc]
    texts = {each.name for each in fields(kind) if "dict" not in str(each.type)}

    @functools.wraps(made)
    def __init__(self: Any, *values: Any, **options: Any) -> None:
        known = {each.name for each in fields(kind)}
        mappings = {name: value for name, value in options.items() if name in texts and isinstance(value, Mapping)}
        options |= {name: text_of(name, value) for name, value in mappings.items()}
        found = translated(options.items(), known, look_up(known))
        made(self, *values, **options_of(found, kind.__name__))

    kind.__init__ = __init__  # type: ignore[misc]
    return kind


def options_of(found: Translation, asked: str) -> dict[str, Any]:
    """Our options in a translation; prints which arguments have no effect, and why.

    Raises UserError for all that can't be taken, or two arguments that set one option to two values. ``asked``: of what
    they are arguments.
    """
    if found.refused:
        names = ", ".join(f"{each.name}={word(each.value):.80}" for each in found.refused)
        raise UserError(
            asked=f"{asked}({names})",
            found="\n           ".join(refusal(each, found.known).rstrip(";") for each in found.refused),
            why="an argument that had no effect would be another run than it says",
            instead="the same without; docs/reference/flags.md has what takes the place of each",
        )
    set_by: dict[str, tuple[str, Any]] = {}
    for each in found.outcomes:
        for name, value in each.options.items():
            other, before = set_by.setdefault(name, (each.name, value))
            if word(before) != word(value):
                raise UserError(
                    asked=f"{asked}({other}=…, {each.name}={word(each.value):.80})",
                    found=f"{name} is {word(before):.80} by the first and {word(value):.80} by the second",
                    why="both set the same option",
                    instead=f"{name}={word(before):.80} alone, or {name}={word(value):.80}",
                )
    for note in found.notes:
        print(note, file=sys.stderr)
    return found.fill | found.options
