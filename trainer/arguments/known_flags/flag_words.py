"""A command line with theirs among its options, in the words of ours."""

import difflib
import itertools
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardwright.arguments.known_flags.entry import MISSING, OURS, Entry, word
from shardwright.arguments.known_flags.table import names
from shardwright.arguments.known_flags.translate import (
    NO_OPTION,
    Look,
    Outcome,
    Translation,
    flag,
    look_up,
    translated,
)

_PARTS = 3  # options with one word in common that are named together
_NEAR, _NEAR_THEIRS = 0.75, 0.85  # difflib's ratio of two spellings, from which one is a hint at the other
STRAY = "stands behind no option;"  # the end of a line on a word of the command line that is none's value


def is_option(text: str) -> bool:
    """Whether argparse takes a word for an option: to it a negative number is none, nor is a word with a blank."""
    return re.match(r"-[^\d.]", text) is not None and " " not in text


@dataclass(frozen=True)
class Argument:
    """An argument of a command line.

    Args:
        words: as they stand there.
        spelt: its first word up to a ``=``; empty: they are a word behind no option.
        value: True if none is written, a list of several words.
    """

    words: list[str]
    spelt: str = ""
    value: Any = None

    @property
    def name(self) -> str:
        """The name as a table and the options have it; of a word with one dash as it is spelt."""
        return spelling(self.spelt) if self.spelt.startswith("--") else self.spelt


def spelling(word: str) -> str:
    """The name of an option, with ``_`` in it and no dashes before it."""
    return word.lstrip("-").replace("-", "_")


def arguments_in(words: Sequence[str], look: Look) -> Iterator[Argument]:
    """The arguments in ``words``, each with as many words behind it as its entry takes, which ``look`` finds."""
    at = 0
    while at < len(words):
        first, at = words[at], at + 1
        spelt, equals, text = first.partition("=")
        if not is_option(spelt):
            yield Argument([first])
            continue
        entry = look(spelling(spelt))
        limit = len(words) if entry is not None and entry.many else at + 1
        after = [] if equals else list(itertools.takewhile(lambda each: not is_option(each), words[at:limit]))
        at += len(after)
        value = [text] if equals else after
        yield Argument([first, *after], spelt, True if not value else value[0] if len(value) == 1 else value)


def in_ours(words: Sequence[str], options: Collection[str], *, of_run: bool) -> tuple[list[str], Translation]:
    """The words with ``options``, as the parser spells them, in place of theirs, and what became of each.

    ``of_run``: the command takes the options of a run, so that all of the table has something to say.
    """
    known = {spelling(each) for each in options if each.startswith("--")}

    def look(name: str) -> Entry | None:
        found = look_up(known)(name)
        return found if of_run or (found is not None and found.kind == OURS) else None

    def stays(each: Argument) -> bool:
        """Whether it is a word behind no option, or an option of ours without a value, which is the parser's own."""
        return not each.spelt or (each.spelt in options and each.words == [each.spelt])

    before = list(itertools.takewhile("--".__ne__, words))
    arguments = list(arguments_in(before, look))
    asked = [each for each in arguments if not stays(each)]
    found = translated([(each.name, each.value) for each in asked], known, look)
    found.outcomes = [replace(each, name=of.spelt) for each, of in zip(found.outcomes, asked, strict=True)]
    made, outcomes = words_of(found.fill), iter(found.outcomes)
    for each in arguments:
        if stays(each):
            made += each.words
            continue
        options_made = next(outcomes).options
        same = each.spelt in options and options_made == {each.name: each.value}
        made += each.words if same else words_of(options_made)
    made += words_of({name: found.options[name] for name in found.extended})
    return [*made, *words[len(before) :]], found


def words_of(options: Mapping[str, Any]) -> list[str]:
    """Options as words of a command line; one without a value is left out."""
    return [f"--{name}={text_of(name, value)}" for name, value in options.items() if value is not None]


def text_of(name: str, value: Any) -> str:
    """The value of our option ``name`` as a word of a command line."""
    if name == "dataset" and isinstance(value, Mapping):  # of a file of options: path or id → its weight
        return ",".join(f"{each}:{weight}" for each, weight in value.items())
    return json.dumps(value) if name == "lr_scheduler_kwargs" and not isinstance(value, str) else word(value)


def refusal(each: Outcome, options: Collection[str]) -> str:
    """A line on an argument that is refused; of one that nobody knows, with the nearest spelling of ``options``."""
    stray = each.kind == NO_OPTION and each.value is None  # a word of a command line, as it stands there
    spelt = each.name if stray else flag(each.name)
    if each.kind == MISSING:
        return f"{spelt}{'' if each.value is True else f' {word(each.value):.80}'}: not to be had, {each.said}"
    if stray and not spelt.startswith("-"):
        return f"{spelt!r} {STRAY}"
    return f"no option {spelt}; {f'{each.said};' if each.said else nearest(spelt, options)}".rstrip()


def nearest(spelt: str, options: Collection[str]) -> str:
    """``did you mean '--x'?`` with the nearest of ``options``, else, of a run's, of the table's names.

    Empty if none is near; a name of theirs, which means nothing to the command, is no hint at itself.
    """
    name, known = spelling(spelt), sorted({spelling(each) for each in options})
    found = difflib.get_close_matches(name, known, n=1, cutoff=_NEAR)
    theirs = set(names())
    if not found and name not in theirs and "learning_rate" in known:
        found = difflib.get_close_matches(name, sorted(theirs), n=1, cutoff=_NEAR_THEIRS)
    if not found:  # a word of one of ours, such as --epochs for --num_train_epochs
        found = [each for each in known if name in each.split("_")]
    if not found or len(found) > _PARTS:
        return ""
    if len(found) > 1:
        return f"did you mean one of {', '.join('--' + each for each in found)}?"
    text = "--" + (found[0].replace("_", "-") if "-" in spelt.lstrip("-") else found[0])
    return f"did you mean {text!r}?"
