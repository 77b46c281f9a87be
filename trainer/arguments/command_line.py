"""Command lines that take an option by its whole name alone; a misspelt one ends the command with the nearest named.

Left to itself argparse takes any unambiguous beginning of an option for that option: ``--learning_rat 1`` would train.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from shardwright.errors import did_you_mean


class Parser(argparse.ArgumentParser):
    """The argparse parser of a script; ``--help`` prints ``description`` as it is written.

    A word that is no option, or only the beginning of one, ends the command with exit code 2.
    """

    def __init__(self, description: str | None) -> None:
        super().__init__(
            description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
        )

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses as argparse does, after a look for unknown options: argparse asks for what is missing first."""
        _check_options(self, sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)


class _Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Prints the description as it is written, and the default of each option."""


def parse(
    kinds: Sequence[Any],
    words: Sequence[str],
    description: str | None,
    epilog: str | None = None,
    flags: Mapping[str, str] | None = None,
) -> tuple[Any, ...]:
    """Returns an instance of each dataclass in ``kinds``, with the fields that the options among ``words`` set.

    A word that is no option, or only the beginning of one, ends the command with exit code 2.

    Args:
        kinds: dataclasses as transformers' ``HfArgumentParser`` takes them.
        words: the command line without the command.
        description: what ``--help`` prints before the options, as it is written.
        epilog: what it prints after them.
        flags: option → help of options without a value that the caller has taken out of ``words`` already; they are
            only listed by ``--help`` and offered as the nearest.
    """
    import transformers

    parser = transformers.HfArgumentParser(
        list(kinds), description=description, epilog=epilog, formatter_class=_Help, allow_abbrev=False
    )
    for option, text in (flags or {}).items():
        # both spellings, as HfArgumentParser gives every option
        parser.add_argument(option, "--" + option[2:].replace("_", "-"), action="store_true", help=text)
    _check_options(parser, words)
    *found, unknown = parser.parse_args_into_dataclasses(list(words), return_remaining_strings=True)
    if unknown:
        _refuse(parser, unknown[0])
    return tuple(found[: len(kinds)])


def _check_options(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Ends the command at the first of ``words`` that is an option unknown to ``parser``."""
    known = _options(parser)
    for word in words:
        if word == "--":  # no options follow
            return
        # argparse takes neither a negative number nor a word with a space in it for an option
        if re.match(r"-[^\d.]", word) and " " not in word and word.partition("=")[0] not in known:
            _refuse(parser, word)
        if word.startswith("-") and word.partition("=")[2] == "--":  # of which argparse makes an empty list
            parser.error(f"argument {word[:-3]}: '--' is no value")


def _refuse(parser: argparse.ArgumentParser, word: str) -> NoReturn:
    option = word.partition("=")[0]
    parser.error(f"no option {option}; {did_you_mean(option, _options(parser))}--help lists them")


def _options(parser: argparse.ArgumentParser) -> list[str]:
    # semi-private: CPython's Lib/argparse.py, Python 3.11 to 3.13
    return list(parser._option_string_actions)
