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
from dataclasses import MISSING, Field, fields
from typing import Any, NoReturn, get_type_hints

from shardwright.arguments.help_page import ALL, HelpAction, HelpFormatter, group_of, in_brief, shown_as
from shardwright.arguments.known_flags.flag_words import STRAY, in_ours, refusal
from shardwright.arguments.known_flags.translate import NO_OPTION, Outcome
from shardwright.arguments.option_values import FALSE_WORDS, TRUE_WORDS, kind_of
from shardwright.arguments.run_file import HELP, OPTION, with_files
from shardwright.errors import UserError, command, did_you_mean

# argparse's own words → plainer ones (semi-private: CPython's Lib/argparse.py, Python 3.11 to 3.13)
_PLAINER = (
    (r"argument (--\w+)(?:/--[\w-]+)*: ", r"\1: "),
    (r"invalid int value: ('.*')", r"\1 is no whole number, such as 10"),
    (r"invalid float value: ('.*')", r"\1 is no number, such as 0.1 or 2e-5"),
    (r"expected one argument", "a value is missing behind it"),
)
_REQUIRED = "the following arguments are required: "  # argparse's, too


class Parser(argparse.ArgumentParser):
    """The argparse parser of a script; unknown or shortened options end the command with exit code 2."""

    def __init__(self, description: str | None, **more: Any) -> None:
        super().__init__(description=description, formatter_class=HelpFormatter, allow_abbrev=False, **more)
        self.option_groups: dict[str, Any] = {}  # name → argparse's group
        self.common = set[str]()  # destinations of the options that the short help shows
        self._takes_run_file = False

    def takes_run_file(self) -> None:
        """Add the option ``--config``: a run's options, of which this command takes those that it has."""
        self.add_argument(OPTION, metavar="FILE", help=HELP)
        self._takes_run_file = True

    def format_help(self) -> str:
        """The help, with commands as the user starts them."""
        return re.sub(r"(?:python\s+)?scripts/(\w+)\.py", lambda found: command(found[1]), super().format_help())

    def format_usage(self) -> str:
        """The usage line with the options that must be given; the others are listed below it."""
        return f"usage: {self._usage()}\n"

    def print_help(self, file: Any = None) -> None:
        """Print the usage line and the help."""
        self.usage = self._usage()
        super().print_help(file)

    def print_page(self, page: str | None) -> None:
        """Print the common options (None, where there are such), one group of options, or all of them."""
        if page not in (None, ALL, *self.option_groups):
            near = did_you_mean(str(page), [ALL, *self.option_groups])
            self.error(f"no group {page!r}; {near}--help takes one of {', '.join([ALL, *self.option_groups])}")
        short, titles = page is None and bool(self.common), {n: g.title for n, g in self.option_groups.items()}
        kept = self.common if short else set()
        for name, group in self.option_groups.items():
            shown = group._group_actions  # semi-private: Lib/argparse.py, 3.11 to 3.13
            shown[:] = [
                each for each in shown if page in (ALL, name) or (page is None and not short) or each.dest in kept
            ]
            if short:
                group.title = name
                for each in shown:
                    each.help = in_brief(each.help)
        if page in self.option_groups:
            self.epilog = None
        elif short:
            lines = [f"  {name:<{max(map(len, titles))}}  {title.partition(': ')[2]}" for name, title in titles.items()]
            about = "more options: --help GROUP lists a group, --help all every option; - and _ are the same in names"
            self.epilog = "\n".join([about, *lines, *(["", self.epilog] if self.epilog else [])])
        self.print_help()

    def _usage(self) -> str:
        needed = [f"{each.option_strings[0]} {each.metavar or each.dest.upper()}" for each in self._needed]
        places = [each.metavar or each.dest for each in self._actions if not each.option_strings]
        return " ".join([self.prog, *needed, "[options]", *map(str, places)])

    @property
    def _needed(self) -> list[argparse.Action]:
        return [each for each in self._actions if each.required and each.option_strings]

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
        lines = [refusal(each, self._known) for each in refused]
        if len(refused) > 1:
            each = "".join(f"\n  {line.rstrip(';')}" for line in lines)
            text = f"{len(refused)} options that this command can't take:{each}\n--help lists those that it can"
        elif lines[0].endswith(STRAY):
            found, why = lines[0].rstrip(";"), "each value stands behind the name of its option"
            self._end(f"{self.prog} … {refused[0].name}", found, why, "--help lists them")
        else:
            text = lines[0] + (" --help lists them" if refused[0].kind == NO_OPTION else "")
        self.exit(2, f"{self.prog}: error: {text}\n")

    def error(self, message: str) -> NoReturn:
        """Ends the command with what is wrong, without the usage, whose hundred options would hide it."""
        for pattern, words in _PLAINER:
            message = re.sub(pattern, words, message)
        if lacking := message.partition(_REQUIRED)[2]:
            self.lacks(lacking)
        self.exit(2, f"{self.prog}: error: {message}; --help lists what it takes\n")

    def lacks(self, names: str) -> NoReturn:
        """Ends the command for want of the arguments of these ``names``."""
        file = f", or a run's file with {OPTION}" if self._takes_run_file else ""
        instead = f"{self._usage()}{file}; --help lists what it takes"
        self._end(self.prog, f"no {names}", "it has no default", instead)

    def _end(self, asked: str, found: str, why: str, instead: str) -> NoReturn:
        self.exit(2, f"error: {UserError(asked=asked, found=found, why=why, instead=instead)}\n")

    @property
    def _of_run(self) -> bool:
        return "--learning_rate" in self._known

    @property
    def _known(self) -> list[str]:
        return list(self._option_string_actions)  # semi-private: CPython's Lib/argparse.py, Python 3.11 to 3.13


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
    general = parser.option_groups.get("training", parser)
    general.add_argument(OPTION, metavar="FILE", help=HELP)
    parser.common |= {OPTION[2:]} if parser.common else set()
    for option, text in (flags or {}).items():
        general.add_argument(*_spellings(option[2:]), action="store_true", help=text)
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
    parser = Parser(description, epilog=epilog, add_help=False)
    about = "Show the common options, the options of a group, or `all`."
    parser.add_argument("-h", "--help", nargs="?", action=HelpAction, metavar="GROUP", help=about)
    for kind in kinds:
        parser.common |= {*getattr(kind, "COMMON", ())}
        hints = get_type_hints(kind)
        for each in fields(kind):
            name, title = group_of(kind, each.name)
            if name not in parser.option_groups:
                parser.option_groups[name] = parser.add_argument_group(f"{name}: {title.rstrip('.')}")
            _add(parser.option_groups[name], each, hints[each.name])
    return parser


def _add(group: Any, field: Field[Any], hint: Any) -> None:
    kind, text = kind_of(hint)[0], field.metadata["help"].replace("%", "%%")
    more: dict[str, Any] = {"required": True} if field.default is MISSING else {"default": field.default}
    more |= shown_as(field, hint)
    if kind is bool:  # it takes a word or none
        more |= {"nargs": "?", "const": True}
    group.add_argument(*_spellings(field.name), type=_truth if kind is bool else kind, help=text, **more)
    if field.default is True:
        no, opposite = _spellings(f"no_{field.name}"), f"The opposite of --{field.name}."
        group.add_argument(*no, action="store_false", dest=field.name, default=False, help=opposite)


def _spellings(name: str) -> list[str]:
    return list(dict.fromkeys(("--" + name, "--" + name.replace("_", "-"))))


def _truth(word: str) -> bool:
    if word.lower() in TRUE_WORDS | FALSE_WORDS:
        return word.lower() in TRUE_WORDS
    raise argparse.ArgumentTypeError(f"{word!r} is none of yes/no, true/false, t/f, y/n, 1/0")
