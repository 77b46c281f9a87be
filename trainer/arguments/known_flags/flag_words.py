"""A command line with theirs among its options, in the words of ours."""

import difflib
import itertools
import json
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from shardwright.arguments.known_flags.entry import MISSING, OURS, Entry, word
from shardwright.arguments.known_flags.table import find, names, own
from shardwright.arguments.known_flags.translate import NO_OPTION, Outcome, Translation, flag, translated

_PARTS = 3  # options with one word in common that are named together
_NEAR, _NEAR_THEIRS = 0.75, 0.85  # difflib's ratio of two spellings, from which one is a hint at the other


def is_option(text: str) -> bool:
    """Whether argparse takes a word for an option: to it a negative number is none, nor is a word with a blank."""
    return re.match(r"-[^\d.]", text) is not None and " " not in text


def in_ours(words: Sequence[str], options: Collection[str], *, of_run: bool) -> tuple[list[str], Translation]:
    """The words with ``options``, as the parser spells them, in place of theirs, and what became of each.

    ``of_run``: the command takes the options of a run, so that all of the table has something to say.
    """
    known = {each.lstrip("-").replace("-", "_") for each in options if each.startswith("--")}

    def look(name: str) -> Entry | None:
        found = own(name) if name in known else find(name)
        return found if of_run or (found is not None and found.kind == OURS) else None

    before = list(itertools.takewhile("--".__ne__, words))
    pairs: list[tuple[str, Any]] = []
    spellings: list[str] = []  # of the pairs
    parts: list[tuple[list[str], int | None]] = []  # words as they stand, and the number of the pair in them
    at = 0
    while at < len(before):
        first = before[at]
        spelt, equals, text = first.partition("=")
        name, at = spelt.lstrip("-").replace("-", "_"), at + 1
        if not is_option(spelt):
            parts.append(([first], None))
            continue
        entry = look(name)
        limit = len(before) if entry is not None and entry.many else at + 1
        after = [] if equals else list(itertools.takewhile(lambda each: not is_option(each), before[at:limit]))
        at += len(after)
        if spelt in options and not equals and not after:
            parts.append(([first], None))
            continue
        parts.append(([first, *after], len(pairs)))
        pairs.append((name if spelt.startswith("--") else spelt, _value(equals, text, after)))
        spellings.append(spelt)
    found = translated(pairs, known, look)
    found.outcomes = [replace(each, name=spelt) for each, spelt in zip(found.outcomes, spellings, strict=True)]
    made = _words(found.fill)
    for raw, number in parts:
        outcome = None if number is None else found.outcomes[number]
        if outcome is None or (outcome.name in options and outcome.options == dict([pairs[number or 0]])):
            made += raw
        else:
            made += _words(outcome.options)
    made += _words({name: found.options[name] for name in found.extended})
    return [*made, *words[len(before) :]], found


def _value(equals: str, text: str, after: list[str]) -> Any:
    if equals:
        return text
    return True if not after else after[0] if len(after) == 1 else after


def _words(options: dict[str, Any]) -> list[str]:
    return [f"--{name}={text_of(name, value)}" for name, value in options.items() if value is not None]


def text_of(name: str, value: Any) -> str:
    """The value of our option ``name`` as a word of a command line."""
    return json.dumps(value) if name == "lr_scheduler_kwargs" and not isinstance(value, str) else word(value)


def refusal(refused: Sequence[Outcome], options: Collection[str]) -> list[str]:
    """A line for each argument that is refused; of one that nobody knows, the nearest spelling of ``options``."""
    return [_line(each, options) for each in refused]


def _line(each: Outcome, options: Collection[str]) -> str:
    stray = each.kind == NO_OPTION and each.value is None  # a word of a command line, as it stands there
    spelt = each.name if stray else flag(each.name)
    if each.kind == MISSING:
        return f"{spelt}{'' if each.value is True else f' {word(each.value):.80}'}: not to be had, {each.said}"
    if stray and not spelt.startswith("-"):
        return f"{spelt!r} stands behind no option;"
    return f"no option {spelt}; {each.said or nearest(spelt, options)}".rstrip()


def nearest(spelt: str, options: Collection[str]) -> str:
    """``did you mean '--x'?`` with the nearest of ``options``, else of the table's names; empty if none is near."""
    name = spelt.lstrip("-").replace("-", "_")
    known = {each.lstrip("-").replace("-", "_"): each for each in options}
    found = difflib.get_close_matches(name, known, n=1, cutoff=_NEAR)
    found = [known[each] for each in found] or [
        f"--{each}" for each in difflib.get_close_matches(name, list(names()), n=1, cutoff=_NEAR_THEIRS)
    ]
    if not found:  # a word of one of ours, such as --epochs for --num_train_epochs
        found = sorted({each.lstrip("-").replace("-", "_") for part, each in known.items() if name in part.split("_")})
    if not found or len(found) > _PARTS:
        return ""
    if len(found) > 1:
        return f"did you mean one of {', '.join('--' + each for each in found)}?"
    with_dashes = "-" in spelt.lstrip("-")
    text = "--" + (found[0].lstrip("-").replace("_", "-") if with_dashes else found[0].lstrip("-").replace("-", "_"))
    return f"did you mean {text!r}?"
