"""Translation of arguments, theirs and ours by name and value, into options, and what became of each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from shardwright.arguments.known_flags.entry import MISSING, NOTHING, OURS, UNNEEDED, Entry, word
from shardwright.arguments.known_flags.table import find, own

Look = Callable[[str], Entry | None]
NO_OPTION = "no option"  # the outcome of a name that nobody knows


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
        """A line for each argument that is taken and has no effect, but asks for something."""
        taken = [each for each in self.outcomes if each.kind == UNNEEDED and each.said]
        return [f"{flag(each.name)}: not needed here, {each.said}" for each in taken]


def flag(name: str) -> str:
    """The name of an argument as a command line has it."""
    return name if name.startswith("-") else f"--{name}"


def shown(options: dict[str, Any]) -> str:
    return " ".join(f"--{name} {word(value)}" for name, value in options.items())


def translated(
    pairs: Iterable[tuple[str, Any]], known: Collection[str], look: Look = find, *, near: bool = False
) -> Translation:
    """Translate ``pairs`` of a name and a value; ``known``: the options there are, whose names go before the table's.

    ``look`` finds the entry of a name that is none of them. ``near``: take what comes nearest to what is not to be had.
    """
    found, suffixes = Translation(known=frozenset(known)), []
    for name, value in pairs:
        entry = own(name) if name in known and look is find else look(name)
        if name in known and (entry is None or value is None):
            entry = Entry(OURS, name)
        elif name in known and entry is not None and isinstance(value, str):
            entry = replace(entry, read=None)  # it is written as ours is
        if entry is None and name.startswith("no_"):
            entry, value = look(name[3:]), False
        if entry is not None and name not in known and (value is None or value == ""):
            entry = NOTHING
        outcome, at = _outcome(name, value, entry, known)
        found.outcomes.append(outcome)
        if at is not None and at.suffix:
            suffixes.append((at.name, at.suffix + word(at.read(value) if at.read else value)))
        given = outcome.options | (outcome.nearest if near else {})
        found.options |= given
        found.fill |= outcome.fill
    for name, text in sorted(suffixes, key=lambda each: each[1].startswith("#")):  # a split behind a configuration
        if name in found.options:
            found.options[name] = ",".join(f"{part}{text}" for part in word(found.options[name]).split(","))
            found.extended.append(name)
    found.fill = {name: value for name, value in found.fill.items() if name not in found.options}
    return found


def _outcome(name: str, value: Any, entry: Entry | None, known: Collection[str]) -> tuple[Outcome, Entry | None]:
    if entry is None:
        return Outcome(name, value, NO_OPTION, ""), None
    at = entry.of(value)
    names = {at.name, *at.options, *at.fill} - {""} if at.kind == OURS else set()
    if not names <= set(known):
        unknown = ", ".join(f"--{each}" for each in sorted(names - set(known)))
        return Outcome(name, value, NO_OPTION, f"it would be {unknown}, which this command has not"), None
    if at.kind == UNNEEDED:
        return Outcome(name, value, UNNEEDED, "" if at.quiet else f"because {at.why}"), at
    if at.kind == MISSING:
        nearest = {each: setting for each, setting in at.options.items() if each in known}
        return Outcome(name, value, MISSING, f"{at.why}; instead: {at.instead}", nearest=nearest), at
    try:
        options = at.made(value)
    except (ValueError, TypeError) as error:
        return Outcome(name, value, MISSING, f"{word(value)!r:.80}: {error}"), None
    if at.suffix:
        return Outcome(name, value, OURS, f"behind --{at.name}"), at
    return Outcome(name, value, OURS, at.why, options=options, fill=dict(at.fill)), at
