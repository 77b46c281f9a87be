"""Command lines that take options by whole names only; a misspelt option ends the command and names the nearest.

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

from shardwright.arguments.option_values import kind_of
from shardwright.errors import command, did_you_mean


class Parser(argparse.ArgumentParser):
    """The argparse parser of a script; unknown or shortened options end the command with exit code 2."""

    def __init__(
        self, description: str | None, formatter_class: Any = argparse.RawDescriptionHelpFormatter, **more: Any
    ) -> None:
        super().__init__(description=description, formatter_class=formatter_class, allow_abbrev=False, **more)

    def format_help(self) -> str:
        """The help, with commands as the user starts them."""
        return re.sub(r"(?:python\s+)?scripts/(\w+)\.py", lambda found: command(found[1]), super().format_help())

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Look for unknown options first, since argparse would first complain of missing ones; then parse."""
        for word in itertools.takewhile("--".__ne__, sys.argv[1:] if args is None else args):  # -- ends the options
            # to argparse a negative number is no option, nor is a word with a space
            if re.match(r"-[^\d.]", word) and " " not in word and word.partition("=")[0] not in self._known:
                self.refuse(word)
            if word.startswith("-") and word.partition("=")[2] == "--":  # argparse would make an empty list of it
                self.error(f"argument {word[:-3]}: '--' is no value")
        return super().parse_known_args(args, namespace)

    def refuse(self, word: str) -> NoReturn:
        option = word.partition("=")[0]
        self.error(f"no option {option}; {did_you_mean(option, self._known)}--help lists them")

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
    words in the file ``SCRIPT.args`` beside the script come first.

    ``flags`` are options without a value, and their help, that the caller has already taken out of ``words``: they are
    only listed by ``--help`` and offered as the nearest.
    """
    parser = options_parser(kinds, description, epilog)
    for option, text in (flags or {}).items():
        parser.add_argument(*_spellings(option[2:]), action="store_true", help=text)
    beside = os.path.splitext(sys.argv[0])[0] + ".args"
    if os.path.isfile(beside):
        with open(beside, encoding="utf-8") as file:
            words = [*file.read().split(), *words]
    found, unknown = parser.parse_known_args(list(words))
    if unknown:
        parser.refuse(unknown[0])
    return tuple(kind(**{each.name: getattr(found, each.name) for each in fields(kind)}) for kind in kinds)


def options_parser(kinds: Sequence[Any], description: str | None = None, epilog: str | None = None) -> Parser:
    """A parser with an option for each field of the dataclasses ``kinds``; one that is True also has ``--no_…``."""
    parser = Parser(description, epilog=epilog, formatter_class=_Help)
    for group in kinds:
        hints = get_type_hints(group)
        for each in fields(group):
            kind, text = kind_of(hints[each.name])[0], each.metadata["help"]
            more: dict[str, Any] = {"required": True} if each.default is MISSING else {"default": each.default}
            if kind is bool and each.default is not None:  # it takes a word or none
                more |= {"nargs": "?", "const": True}
            parser.add_argument(*_spellings(each.name), type=_truth if kind is bool else kind, help=text, **more)
            if each.default is True:
                no = _spellings(f"no_{each.name}")
                parser.add_argument(*no, action="store_false", dest=each.name, default=False, help=text)
    return parser


def _spellings(name: str) -> list[str]:
    return list(dict.fromkeys(("--" + name, "--" + name.replace("_", "-"))))


def _truth(word: str) -> bool:
    if word.lower() in ("yes", "true", "t", "y", "1"):
        return True
    if word.lower() in ("no", "false", "f", "n", "0"):
        return False
    raise argparse.ArgumentTypeError(f"{word!r} is none of yes/no, true/false, t/f, y/n, 1/0")
