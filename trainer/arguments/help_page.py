"""The help of a command: its options in groups, by name; the few that most people need first.

`--help` shows the common options, where some are marked so, `--help GROUP` one group, and `--help all` every option.
"""

import argparse
import re
import shutil
from dataclasses import Field
from typing import Any

from shardwright.arguments.option_values import kind_of

ALL = "all"
_WIDEST = 110  # columns of a help page
METAVARS = {int: "N", float: "X", str: "TEXT"}


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Prints the description unchanged, an option by its first spelling, and its default where the text has none."""

    def __init__(self, prog: str) -> None:
        width = min(shutil.get_terminal_size((_WIDEST, 24)).columns, _WIDEST) - 2
        super().__init__(prog, max_help_position=32, width=width)

    def _format_action_invocation(self, action: argparse.Action) -> str:  # semi-private: Lib/argparse.py, 3.11 to 3.13
        shown = [each for each in action.option_strings if "-" not in each[2:]] or action.option_strings
        if not shown:
            return super()._format_action_invocation(action)
        takes = action.nargs != 0 and not (action.nargs == "?" and action.metavar is None)
        text = ", ".join(shown)
        return f"{text} {self._format_args(action, self._get_default_metavar_for_optional(action))}" if takes else text

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        if default in (None, False, "", argparse.SUPPRESS) or re.search(r"\bdefault\b", text, re.IGNORECASE):
            return text
        return f"{text} (default: {str(default).lower() if default is True else default})"


class HelpAction(argparse.Action):
    """Prints the page that its value names, and ends the command."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        parser.print_page(values)
        parser.exit()


def group_of(kind: type, name: str) -> tuple[str, str]:
    """The group of the option ``name`` of the dataclass ``kind`` and its title, by the class that defines it."""
    owner = next(each for each in reversed(kind.__mro__) if name in vars(each).get("__annotations__", {}))
    word = re.sub(r"(Arguments|Choice|Options)$", "", owner.__name__).lower() or owner.__name__.lower()
    titled = next(each for each in reversed(kind.__mro__) if each.__name__.lower().startswith(word))
    return word, getattr(titled, "group_title", (titled.__doc__ or "").splitlines()[0])


def in_brief(text: str) -> str:
    """The first sentence of an option's help, and what it says of the default."""
    first, *others = re.split(r"(?<=\.)(?<!e\.g\.)\s+(?=[A-Z`])", text)
    return " ".join([first, *(each for each in others if each.startswith("Default:"))])


def shown_as(field: Field[Any], hint: Any) -> dict[str, Any]:
    """The form in which an option shows its value: the words to choose from, or the kind; a switch shows none."""
    kind, optional = kind_of(hint)
    if choices := field.metadata.get("choices"):
        return {"metavar": "{" + ",".join(choices) + "}"}
    if kind is bool:
        return {"metavar": "{true,false}"} if optional else {}
    return {"metavar": METAVARS[kind]}
