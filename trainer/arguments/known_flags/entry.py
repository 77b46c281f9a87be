"""Entry: what becomes of one argument of another trainer, and the words that a table of them is written with."""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwright.arguments.option_values import FALSE_WORDS, TRUE_WORDS

OURS, UNNEEDED, MISSING = "ours", "not needed", "not to be had"
WITH_SFT = {"loss_type": "sigmoid,sft"}  # what an argument fills that adds the chosen answer's likelihood
BOTH_ANSWERS = "twice as long, for two answers share a row"
_OFF = {"", "none", "null", "off", "0.0", "[]", "{}", *FALSE_WORDS}  # values that ask for nothing

Reader = Callable[[Any], Any]


@dataclass(frozen=True)
class Entry:
    """The outcome of one argument, a flag or a key.

    Args:
        kind: OURS: an option here means the same; UNNEEDED: it is taken, said, and has no effect; MISSING: refused.
        name: of OURS, the option that takes the value, as ``read`` makes it; empty: no option does.
        options: options that are set besides, whatever the value. Of MISSING they are the nearest there are.
        fill: options that hold where nothing else sets them.
        why: of UNNEEDED and MISSING, the reason; of OURS, what a reader of a port must know.
        instead: of MISSING, what to use.
        at: values, in small letters, → entries of their own.
        suffix: what stands between the value of ``name`` and this one, which is put behind it.
        many: it takes several words.
    """

    kind: str
    name: str = ""
    read: Reader | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    fill: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""
    instead: str = ""
    at: Mapping[str, Entry] = field(default_factory=dict)
    suffix: str = ""
    many: bool = False

    def of(self, value: Any) -> Entry:
        """The entry of this ``value``: its own, or this one."""
        text = word(value).lower()
        if text not in self.at and {"true", "false"} & self.at.keys():
            text = "true" if text in TRUE_WORDS else "false" if text in FALSE_WORDS else text
        if text in self.at:
            return self.at[text]
        off = text in _OFF and (self.kind == MISSING or (self.kind == OURS and not self.name))
        return NOTHING if off else self

    @property
    def quiet(self) -> bool:
        """Whether nobody need be told that this argument has no effect: it asks for nothing, or for what is so."""
        return self.kind == UNNEEDED and self.why in (NOTHING.why, DEFAULT.why)

    def made(self, value: Any) -> dict[str, Any]:
        """Our options and their values for ``value``; ValueError if it is none that they can take."""
        read = self.read(value) if self.read else plain(value)
        return {**({self.name: read} if self.name else {}), **self.options}


Cells = Mapping[str, Entry | str | tuple[str, str]]
NOTHING = Entry(UNNEEDED, why="it asks for nothing")
DEFAULT = Entry(UNNEEDED, why="it is the default")


def word(value: Any) -> str:
    """A value as a command line has it: a list with commas, a flat mapping as name=value with commas, else JSON."""
    if isinstance(value, enum.Enum):
        return word(value.value)
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, list | tuple | set) and all(isinstance(each, str | int | float) for each in value):
        return ",".join(word(each) for each in value)
    if isinstance(value, Mapping) and all(isinstance(each, str | int | float) for each in value.values()):
        return ",".join(f"{name}={word(each)}" for name, each in value.items())
    if isinstance(value, Mapping | list | tuple):
        return json.dumps(value, default=str)
    return str(value)


def with_one_warmup(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments without the one of warm-up that has no effect in transformers: the steps count, unless they are 0."""
    if not {"warmup_steps", "warmup_ratio"} <= given.keys():
        return dict(given)
    none = word(given["warmup_steps"]) in ("", "none", "0", "0.0")
    return {name: value for name, value in given.items() if name != ("warmup_steps" if none else "warmup_ratio")}


def plain(value: Any) -> Any:
    """The value of an enum, a list of words as one text with commas; anything else as it is."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, list | tuple) and value and all(isinstance(each, str) for each in value):
        return ",".join(value)
    return value


def table(cells: Cells) -> dict[str, Entry]:
    """Arguments, or values of one, by names with blanks between them → what becomes of each.

    That is an entry; in words why it is not needed; or why it is not to be had, and what to use.
    """
    found: dict[str, Entry] = {}
    for names, cell in cells.items():
        entry = unneeded(cell) if isinstance(cell, str) else missing(*cell) if isinstance(cell, tuple) else cell
        found |= dict.fromkeys(names.split() or [names], entry)
    return found


def ours(name: str, why: str = "", read: Reader | None = None, at: Cells | None = None, **more: Any) -> Entry:
    """An argument whose value our option ``name`` takes; ``more``: of the entry."""
    return Entry(OURS, name, read, why=why, at=table(at or {}), **more)


def listed(name: str, why: str = "", **more: Any) -> Entry:
    """An argument of several names, which our option ``name`` takes with commas between them."""
    return ours(name, why, words, many=True, **more)


def sets(why: str = "", at: Cells | None = None, **options: Any) -> Entry:
    """An argument that stands for our ``options``."""
    return Entry(OURS, options=options, why=why, at=table(at or {}))


def fills(why: str = "", **options: Any) -> Entry:
    """An argument that stands for our ``options`` where nothing else sets them."""
    return Entry(OURS, fill=options, why=why)


def unneeded(why: str, at: Cells | None = None) -> Entry:
    """An argument that is taken and has no effect, because …"""
    return Entry(UNNEEDED, why=why, at=table(at or {}), many=True)


def missing(why: str, instead: str, at: Cells | None = None, **nearest: Any) -> Entry:
    """An argument that is refused, because …; ``nearest``: the options that a port takes in its place."""
    return Entry(MISSING, why=why, instead=instead, at=table(at or {}), options=nearest, many=True)


def called(column: str) -> Entry:
    """The records' own name for our ``column``."""
    return ours("columns", read=lambda name: f"{column}={name}")


def under(names: str) -> Entry:
    """The name of a key or a role in records, which is read if it is one of ``names``."""
    instead = f"records that have it as {' or '.join(names.split())}"
    return missing("it is read under another name", instead, {names: NOTHING})


def same(names: str) -> dict[str, Entry]:
    """Arguments that are options here under the same names."""
    return {name: ours(name) for name in names.split()}


def renamed(**names: str) -> dict[str, Entry]:
    """Arguments (theirs=ours) that are options here under other names."""
    return {theirs: ours(name) for theirs, name in names.items()}


def share(value: Any) -> float:
    """A share of the steps, from 0 to below 1; ValueError for another number, which would count steps."""
    found = float(value)
    if not 0 <= found < 1:
        raise ValueError("it is a share of the steps, from 0 to below 1")
    return found


def words(value: Any) -> Any:
    """Names in a list, or with blanks or commas between them, with commas; what is neither a list nor text stays."""
    if not isinstance(value, list | tuple | set | str):
        return value
    parts = [str(each) for each in value] if not isinstance(value, str) else value.strip("[]").split()
    return ",".join(part.strip(" ,'\"") for part in parts if part.strip(" ,'\""))


def joined(value: Any) -> str:
    """A list or a mapping as our options write them: words with commas, or name=value with commas."""
    return word(json.loads(value)) if isinstance(value, str) and value.lstrip().startswith("{") else word(value)


def beta_alone(value: Any) -> Any:
    """The ``beta`` of axolotl's ``trl``, if nothing else is in it; ValueError for what speaks of generated answers."""
    if not isinstance(value, Mapping) or {name for name, each in value.items() if each is not None} != {"beta"}:
        raise ValueError("of its keys beta alone means something here: nothing is generated while a run trains")
    return value["beta"]


def padding_alone(value: Any) -> Any:
    """The special tokens of a YAML, if the padding token is the only one; ValueError for others."""
    names = [name for name, token in value.items() if token] if isinstance(value, Mapping) else [word(value)]
    if names != ["pad_token"]:
        raise ValueError("a model is trained with the tokens of its own tokenizer")
    return value
