"""Option fields: their kinds of values, and checks that refuse an invalid value by the option's name."""

import functools
import os
from collections.abc import Collection
from dataclasses import field, fields
from numbers import Integral, Real
from types import NoneType
from typing import Any, get_args, get_type_hints

from shardwright.errors import UserError, a_type, did_you_mean

_LARGEST = (2 - 2**-23) * 2.0**127  # float32's
# argparse's words of truth, as transformers' HfArgumentParser reads them
TRUE_WORDS = {"yes", "true", "t", "y", "1"}
FALSE_WORDS = {"no", "false", "f", "n", "0"}
_MOST = 2**32 - 1  # for any whole number: the largest seed that every library takes


def option(default: Any, help: str, choices: Collection[str] = ()) -> Any:
    """A field of a dataclass of options, with its text in ``--help``, and the words it is one of, if it is."""
    # no other keys: transformers' HfArgumentParser hands them all to argparse
    return field(default=default, metadata={"help": help, **({"choices": choices} if choices else {})})


def kind_of(hint: Any) -> tuple[type, bool]:
    """The type that an option of this annotation is read as (str for ``dict | str``), and whether it may be None."""
    kinds = get_args(hint) or (hint,)
    return next(kind for kind in (bool, float, int, str) if kind in kinds), NoneType in kinds


def check_values(arguments: Any) -> None:
    """Make numbers Python's own and paths ``str``; UserError for one that fits not its annotation or its choices."""
    hints = _hints(arguments.__class__)
    for each in (each for each in fields(arguments) if each.metadata):  # only options have a help
        name, value = each.name, getattr(arguments, each.name)
        kind, optional = kind_of(hints[name])
        if dict in get_args(hints[name]) or value is each.default or (value is None and optional):
            continue
        try:
            setattr(arguments, name, read := _read(kind, value))
        except (TypeError, ValueError) as error:
            *_, needed, example = _KINDS[kind]
            raise UserError(
                asked=f"--{name} {value!r:.80}",
                found=f"{a_type(value)}, where {needed} is needed{f': {error}' if str(error) else ''}",
                why="a run can't be made of it",
                instead=f"--{name} {_meant(kind, value, each.default, example)}",
            ) from error
        if known := each.metadata.get("choices"):
            check_choice(name, read, known)


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    """`get_type_hints`, which reads each annotation's text anew."""
    return get_type_hints(kind)


def check_choice(name: str, value: Any, known: Collection[str], of: str = "") -> None:
    """Refuse a ``value`` of the option ``name`` that is not in ``known``; ``of``: beside which other option it is."""
    if value not in known:
        raise UserError(
            asked=f"--{name} {value}",
            found=f"{value!r} is none of the known ones",
            why=f"{name}{of and f' of {of}'} is one of a fixed list",
            instead=f"{did_you_mean(value, known)}one of {', '.join(known)}",
        )


# kind → the types that it is read from, the bounds of its values in words, the kind in words, an example
_KINDS: dict[type, tuple[Any, str, str, str]] = {
    bool: (bool, "", "True or False", "true"),
    int: (Integral, f"at most {_MOST}", "a whole number", "1"),
    float: (Real, "finite, also in float32", "a number", "0.1"),
    str: ((str, os.PathLike), "not empty, and without a null character", "text in UTF-8", "text"),
}


def _read(kind: type, value: Any) -> Any:
    types, bounds, *_ = _KINDS[kind]
    if kind is int and isinstance(value, float) and value.is_integer():  # as transformers keeps logging_steps
        value = int(value)
    if not isinstance(value, types) or (isinstance(value, bool) and kind is not bool):
        raise TypeError
    made = kind(value)
    limit = {int: _MOST, float: _LARGEST}.get(kind)
    if (limit is not None and not abs(made) <= limit) or (kind is str and (not made or "\0" in made)):  # NaN too
        raise ValueError(bounds)
    if kind is str:
        made.encode()  # UnicodeEncodeError, a ValueError: bytes of a command line that are no UTF-8
    return made


def _meant(kind: type, value: object, default: object, example: str) -> str:
    """The value that ``value`` spells, as ``10`` in quotes does; else the default, or an example."""
    word = str(value).strip().lower()
    if kind is bool and word in TRUE_WORDS | FALSE_WORDS:
        return str(word in TRUE_WORDS).lower()
    try:
        if kind in (int, float) and isinstance(value, str):
            return f"{_read(kind, kind(value.strip()))} (in Python and in a file without quotes)"
    except (TypeError, ValueError):
        pass
    return example if default is None or default == "" else f"{default}, the default"


class Checked:
    """A group of options with checks that raise UserError for an invalid value, by the option's name."""

    def check(self, name: str, good: bool, why: str, instead: Any) -> None:
        """Refuse the value of the option ``name`` unless it is ``good``."""
        if not good:
            value = getattr(self, name)
            raise UserError(asked=f"--{name} {value}", found=f"{value!r}", why=why, instead=f"--{name} {instead}")

    def at_least(self, least: float, why: str, *names: str, instead: float | None = None) -> None:
        """Refuse a number below ``least``; ``instead`` is offered, or ``least``."""
        for name in names:
            value = getattr(self, name)
            self.check(name, value is None or value >= least, why, least if instead is None else instead)

    def check_path(self, *names: str) -> None:
        """Refuse a path that can't be looked up; whether it must exist is checked later."""
        for name in names:
            value = getattr(self, name)
            try:
                if value is not None and "://" not in value:
                    os.stat(os.path.expanduser(value))
            except (FileNotFoundError, NotADirectoryError):
                pass
            except OSError as error:  # a name too long, a folder that this user may not look into, a circle of links
                raise UserError(
                    asked=f"--{name} {value:.200}",
                    found=f"{type(error).__name__}: {error.strerror}",
                    why="what lies there can't be seen",
                    instead="a path that this user can open, or a hub id",
                ) from error
