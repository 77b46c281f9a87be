"""Command lines that take options by whole names only, and those of other trainers that mean the same.

A misspelt option ends the command and names the nearest.

By default argparse accepts any unambiguous beginning of an option: ``--learning_rat 1`` would train.
"""

import argparse
import itertools
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, NoReturn, get_type_hints

from shardwright.arguments.known_flags.flag_words import in_ours, refusal
from shardwright.arguments.known_flags.translate import NO_OPTION, Outcome
from shardwright.arguments.option_values import FALSE_WORDS, TRUE_WORDS, kind_of
from shardwright.arguments.run_file import HELP, OPTION, with_files
from shardwright.errors import command

# argparse's own words → plainer ones (semi-private: CPython's Lib/argparse.py, Python 3.11 to 3.13)
_PLAINER = (
    (r"argument (--\w+)(?:/--[\w-]+)*: ", r"\1: "),
    (r"invalid int value: ('.*')", r"\1 is no whole number, such as 10"),
    (r"invalid float value: ('.*')", r"\1 is no number, such as 0.1 or 2e-5"),
    (r"expected one argument", "a value is missing behind it"),
)


class Parser(argparse.ArgumentParser):
    """The argparse parser of a script; unknown or shortened options end the command with exit code 2."""

    def __init__(
        self, description: str | None, formatter_class: Any = argparse.RawDescriptionHelpFormatter, **more: Any
    ) -> None:
        super().__init__(description=description, formatter_class=formatter_class, allow_abbrev=False, **more)
        self._takes_run_file = False

    def takes_run_file(self) -> None:
        """Add the option ``--config``: a run's options, of which this command takes those that it has."""
        self.add_argument(OPTION, metavar="FILE", help=HELP)
        self._takes_run_file = True

    def format_help(self) -> str:
        """The help, with commands as the user starts them."""
        return re.sub(r"(?:python\s+)?scripts/(\w+)\.py", lambda found: command(found[1]), super().format_help())

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Look for unknown options first, since argparse would first complain of missing ones; then parse.

        With an option ``--config`` (:meth:`takes_run_file`) the file's options come first, those of this command alone.
        Other trainers' options are taken where they mean one of ours, or nothing (:mod:`known_flags`).
        """
        words = sys.argv[1:] if args is None else list(args)
        if self._takes_run_file:
            # semi-private: CPython's Lib/argparse.py, Python 3.11 to 3.13
            taken = {name.lstrip("-"): action.nargs != 0 for name, action in self._option_string_actions.items()}
            words = with_files(words, taken)
        words, found = in_ours(words, self._known, of_run=self._of_run)
        if found.refused:
            self.refuse(found.refused)
        for note in found.notes:
            print(note, file=sys.stderr)
        for word in itertools.takewhile("--".__ne__, words):  # -- ends the options
            if word.startswith("-") and word.partition("=")[2] == "--":  # argparse would make an empty list of it
                self.error(f"argument {word[:-3]}: '--' is no value")
        return super().parse_known_args(words, namespace)

    def refuse(self, refused: Sequence[Outcome]) -> NoReturn:
        """Ends the command with a line for each argument that is refused."""
        lines = refusal(refused, self._known)
        if len(refused) > 1:
            each = "".join(f"\n  {line.rstrip(';')}" for line in lines)
            text = f"{len(refused)} options that this command can't take:{each}\n--help lists those that it can"
        else:
            text = lines[0] + (" --help lists them" if refused[0].kind == NO_OPTION else "")
        self.exit(2, f"{self.prog}: error: {text}\n")

    def error(self, message: str) -> NoReturn:
        """Ends the command with what is wrong, without the usage, whose hundred options would hide it."""
        for pattern, words in _PLAINER:
            message = re.sub(pattern, words, message)
        self.exit(2, f"{self.prog}: error: {message}; --help lists what it takes\n")

    @property
    def _of_run(self) -> bool:
        return "--learning_rate" in self._known

    @property
    def _known(self) -> list[str]:
        return list(self._option_string_actions)  # semi-private: CPython's Lib/argparse.py, Python 3.11 to 3.13


class _Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Prints the description unchanged, and each option's default."""


def parse(
    kinds: Sequence[Any],
    words: Sequence[str],
    description: str | None,
    epilog: str | None = None,
    flags: Mapping[str, str] | None = None,
) -> tuple[Any, ...]:
    """An instance of each dataclass in ``kinds``, with the fields that the options in ``words`` set.

    The options are those of transformers' ``HfArgumentParser``, whose import would cost most of a second. As there,
    words in the file ``SCRIPT.args`` beside the script come first; those of a ``--config`` come before them.

    ``flags`` are options without a value, and their help, that the caller has already taken out of ``words``: they are
    only listed by ``--help`` and offered as the nearest.
    """
    parser = options_parser(kinds, description, epilog)
    parser.add_argument(OPTION, metavar="FILE", help=HELP)
    for option, text in (flags or {}).items():
        parser.add_argument(*_spellings(option[2:]), action="store_true", help=text)
    beside = os.path.splitext(sys.argv[0])[0] + ".args"
    if os.path.isfile(beside):
        with open(beside, encoding="utf-8") as file:
            words = [*file.read().split(), *words]
    found, unknown = parser.parse_known_args(with_files(words))
    if unknown:
        parser.refuse([Outcome(word, None, NO_OPTION, "") for word in unknown])
    return tuple(kind(**{each.name: getattr(found, each.name) for each in fields(kind)}) for kind in kinds)


def options_parser(kinds: Sequence[Any], description: str | None = None, epilog: str | None = None) -> Parser:
    """A parser with an option for each field of the dataclasses ``kinds``; one that is True also has ``--no_…``."""
    parser = Parser(description, epilog=epilog, formatter_class=_Help)
    for group in kinds:
        hints = get_type_hints(group)
        for each in fields(group):
            kind, text = kind_of(hints[each.name])[0], each.metadata["help"]
            more: dict[str, Any] = {"required": True} if each.default is MISSING else {"default": each.default}
            if kind is bool:  # it takes a word or none
                more |= {"nargs": "?", "const": True}
            parser.add_argument(*_spellings(each.name), type=_truth if kind is bool else kind, help=text, **more)
            if each.default is True:
                no = _spellings(f"no_{each.name}")
                parser.add_argument(*no, action="store_false", dest=each.name, default=False, help=text)
    return parser


def _spellings(name: str) -> list[str]:
    return list(dict.fromkeys(("--" + name, "--" + name.replace("_", "-"))))


def _truth(word: str) -> bool:
    if word.lower() in TRUE_WORDS | FALSE_WORDS:
        return word.lower() in TRUE_WORDS
    raise argparse.ArgumentTypeError(f"{word!r} is none of yes/no, true/false, t/f, y/n, 1/0")
