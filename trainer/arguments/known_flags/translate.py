"""Translation of arguments, theirs and ours by name and value, into options, and what became of each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from shardwright.arguments.known_flags.entry import (
    BOTH_ANSWERS,
    MISSING,
    NOTHING,
    OURS,
    UNNEEDED,
    WITH_SFT,
    Entry,
    word,
)
from shardwright.arguments.known_flags.table import find, own
from shardwright.objectives import DEFAULT, OBJECTIVES
from shardwright.objectives.objective import Objective
from shardwright.objectives.segment_objective import SegmentObjective

Look = Callable[[str], Entry | None]
NO_OPTION = "no option"  # the outcome of a name that nobody knows
_LENGTH = "sequence_length"
_READ_AS = {"instruction": "prompt", "output": "completion", "messages": "prompt"}  # where there are no such columns


@dataclass(frozen=True)
class Outcome:
    """The outcome of one argument: ``kind`` is that of an entry, or NO_OPTION; ``said`` is for a person."""

    name: str
    value: Any
    kind: str
    said: str
    options: dict[str, Any] = field(default_factory=dict)
    fill: dict[str, Any] = field(default_factory=dict)  # options that hold where nothing else sets them
    nearest: dict[str, Any] = field(default_factory=dict)  # of one that is not to be had
    behind: dict[str, str] = field(default_factory=dict)  # option → the text that is written behind its value


@dataclass
class Translation:
    """Options in place of arguments; ``fill`` holds where nothing else sets the option."""

    outcomes: list[Outcome] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    fill: dict[str, Any] = field(default_factory=dict)
    known: frozenset[str] = frozenset()  # the options that there are
    extended: list[str] = field(default_factory=list)  # options behind whose value another argument's is written

    @property
    def refused(self) -> list[Outcome]:
        return [each for each in self.outcomes if each.kind in (MISSING, NO_OPTION)]

    @property
    def notes(self) -> list[str]:
        """A line for each argument that is taken and has no effect, but asks for something, or has twice its number."""
        return [
            f"{flag(each.name)}: not needed here, {each.said}"
            if each.kind == UNNEEDED
            else f"{flag(each.name)} {word(each.value)}: {shown(each.options)}, {each.said}"
            for each in self.outcomes
            if (each.kind == UNNEEDED and each.said) or (each.kind == OURS and each.said == BOTH_ANSWERS)
        ]


def flag(name: str) -> str:
    """The name of an argument as a command line has it."""
    return name if name.startswith("-") else f"--{name}"


def shown(options: dict[str, Any]) -> str:
    return " ".join(f"--{name} {word(value)}" for name, value in options.items())


def look_up(known: Collection[str]) -> Look:
    """Finds the entry of a name, among ``known`` options that of some of its values alone."""
    return lambda name: own(name) if name in known else find(name)


def translated(
    pairs: Iterable[tuple[str, Any]],
    known: Collection[str],
    look: Look,
    *,
    near: bool = False,
    objective: str | None = None,
) -> Translation:
    """Translate ``pairs`` of a name and a value; ``known``: the options there are, whose names go before the table's.

    ``look`` finds the entry of a name. ``near``: take what comes nearest to what is not to be had. ``objective``: that
    of the run, where no pair names one. Of answers others' lengths are of one, and two share a row here.
    """
    found = Translation(known=frozenset(known))
    for name, value in pairs:
        outcome = _outcome(name, value, look, known)
        found.outcomes.append(outcome)
        found.options |= outcome.options | (outcome.nearest if near else {})
        found.fill |= outcome.fill
    behind = [pair for each in found.outcomes for pair in each.behind.items()]
    for name, text in sorted(behind, key=lambda each: each[1].startswith("#")):  # a split behind a configuration
        if name in found.options:
            found.options[name] = ",".join(f"{part}{text}" for part in word(found.options[name]).split(","))
            found.extended.append(name)
    _add_chosen(found)
    found.fill = {name: value for name, value in found.fill.items() if name not in found.options}
    kind = OBJECTIVES.get(str({"objective": objective, **found.fill, **found.options}["objective"]))
    _join_columns(found, kind or OBJECTIVES[DEFAULT])
    if kind is not None and issubclass(kind, SegmentObjective):
        found.outcomes = [_of_a_row(each) for each in found.outcomes]
        lengths = [each.options for each in found.outcomes if _LENGTH in each.options]
        found.options |= {_LENGTH: lengths[-1][_LENGTH]} if lengths else {}
    return found


def _add_chosen(found: Translation) -> None:
    """Add the chosen answer's likelihood, where an argument asks for it, to whichever loss the others name."""
    asked = [number for number, each in enumerate(found.outcomes) if each.fill == WITH_SFT]
    objective = found.options.get("objective", "dpo")
    if not asked or objective not in ("dpo", "ipo"):
        for number in asked:
            said = f"the loss of --objective {objective} has no further part; instead: --objective dpo"
            found.outcomes[number] = replace(found.outcomes[number], kind=MISSING, said=said, options={}, fill={})
            found.options.pop("loss_weights", None)
            found.fill.pop("loss_type", None)
        return
    for number, each in enumerate(found.outcomes):
        theirs = "ipo" if each.options.get("objective") == "ipo" else each.options.get("loss_type")
        if theirs and "," not in str(theirs):
            both = {**each.options, "loss_type": f"{theirs},sft"} | ({"objective": "dpo"} if theirs == "ipo" else {})
            found.outcomes[number] = replace(each, options=both)
            found.options |= both


def _join_columns(found: Translation, kind: type[Objective]) -> None:
    """Join the names of columns that several arguments say, each under the column that the objective reads."""
    if not any("columns" in each.options and each.name != "columns" for each in found.outcomes):
        return
    read, joined = {name for shape in kind.shapes for name in (*shape.required, *shape.optional)}, dict[str, str]()
    for number, each in enumerate(found.outcomes):
        named = [part.partition("=") for part in str(each.options.get("columns") or "").split(",") if part]
        names = {column if column in read else _READ_AS.get(column, column): own for column, _, own in named}
        if other := next((joined[column] for column, own in names.items() if joined.get(column, own) != own), None):
            said = f"another dataset has it as {other}; instead: datasets whose columns have the same names"
            found.outcomes[number] = replace(each, kind=MISSING, said=said, options={})
        elif named:
            joined |= names
            if each.name != "columns" and all(column == own for column, own in names.items()):
                found.outcomes[number] = replace(each, kind=UNNEEDED, said="", options={})
            else:
                text = ",".join(map("=".join, names.items()))
                found.outcomes[number] = replace(each, options=each.options | {"columns": text})
    found.options.pop("columns", None)
    if others := [f"{column}={own}" for column, own in joined.items() if column != own]:
        found.options["columns"] = ",".join(others)


def _of_a_row(each: Outcome) -> Outcome:
    length = str(each.options.get(_LENGTH, ""))
    if each.name == _LENGTH or not length.isdecimal():
        return each
    return replace(each, options=each.options | {_LENGTH: 2 * int(length)}, said=BOTH_ANSWERS)


def _outcome(name: str, value: Any, look: Look, known: Collection[str]) -> Outcome:
    entry, setting = look(name), value
    if name in known and (entry is None or value is None):
        entry = Entry(OURS, name)
    elif name in known and entry is not None and isinstance(value, str):
        entry = replace(entry, read=None)  # it is written as ours is
    if entry is None and name.startswith("no_"):
        entry, setting = look(name[3:]), False
    if entry is None:
        return Outcome(name, value, NO_OPTION, "")
    unset = name not in known and setting in (None, "") and word(setting) not in entry.at
    at = NOTHING if unset else entry.of(setting)
    names = {at.name, *at.options, *at.fill} - {""} if at.kind == OURS else set()
    if not names <= set(known):
        unknown = ", ".join(f"--{each}" for each in sorted(names - set(known)))
        said = "" if names == {name} else f"it would be {unknown}, which this command has not"
        return Outcome(name, value, NO_OPTION, said)
    if at.kind == UNNEEDED:
        return Outcome(name, value, UNNEEDED, "" if at.quiet else f"because {at.why}")
    if at.kind == MISSING:
        nearest = {each: setting for each, setting in at.options.items() if each in known}
        return Outcome(name, value, MISSING, f"{at.why}; instead: {at.instead}", nearest=nearest)
    try:
        made = at.made(setting)
    except (ValueError, TypeError, AttributeError) as error:  # a file's value may be of any kind
        return Outcome(name, value, MISSING, f"{word(setting)!r:.80}: {error}")
    if at.suffix:
        return Outcome(name, value, OURS, f"behind --{at.name}", behind={at.name: at.suffix + word(made.pop(at.name))})
    return Outcome(name, value, OURS, at.why, options=made, fill=dict(at.fill))
