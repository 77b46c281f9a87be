"""The reference of the options of every command, read from their parsers: docs/reference/options.md and beside it."""

import argparse
import importlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from shardwright.arguments.command_line import Parser
from shardwright.arguments.training import TrainingArguments
from shardwright.scripts.main import COMMANDS

COMMAND = "python scripts/measure/reference_pages.py"
TARGET = "jobset"  # launch's first word; each target has the same options
INDEX = f"""# Options of every command

```
shardwright train --help
```

An option is written with `_` or `-`; one whose default is true also with `no_` before its name; `--config FILE` reads
options from a file ([options](../options.md)).
`{COMMAND}` writes these pages from the code.

| command | what it does | its options |
|---|---|---|
"""


class _Found(Exception):
    """A command's parser, at the moment it would read words."""


def parser_of(command: str) -> Parser:
    """The parser that a command makes of its words; nothing of the command runs behind it."""

    def stop(self: Parser, *_: Any) -> NoReturn:
        raise _Found(self)

    words, reads = sys.argv, Parser.parse_known_args
    before = dict(os.environ)
    sys.argv = [command, *([TARGET] if command == "launch" else [])]
    Parser.parse_known_args = stop  # type: ignore[assignment, method-assign]
    try:
        importlib.import_module(f"shardwright.scripts.{command}").main()
    except _Found as caught:
        parser: Parser = caught.args[0]
        return parser
    finally:
        sys.argv, Parser.parse_known_args = words, reads  # type: ignore[method-assign]
        os.environ.clear()
        os.environ.update(before)
    raise LookupError(f"{command} reads no words")


def pages() -> dict[str, str]:
    """File in docs/reference → its text."""
    parsers = {command: parser_of(command) for command in COMMANDS}
    of_run = {action.dest for action in listed(parsers["train"])}
    index, others = [], []
    for command, about in COMMANDS.items():
        own = [each for each in listed(parsers[command]) if each.dest not in of_run or not takes_all(parsers[command])]
        where = "[options of a run](options_train.md)"
        if command != "train":
            where = f"[its own](options_commands.md#{command})" + (
                f", and {where}" if takes_all(parsers[command]) else ""
            )
            others.append(_section(command, about, own, parsers[command]))
        index.append(f"| `{command}` | {about} | {where} |")
    return {
        "options.md": INDEX + "\n".join(index) + "\n",
        "options_train.md": _of_run(parsers["train"]),
        "options_commands.md": _head("Options of the other commands", "plan") + "\n".join(others),
    }


def takes_all(parser: Parser) -> bool:
    """Whether a command takes every option of a run too."""
    return "learning_rate" in {action.dest for action in parser._actions}


def listed(parser: Parser) -> list[argparse.Action]:
    """A parser's options, each once; `--no_…` and help are left out."""
    found: dict[str, argparse.Action] = {}
    for action in parser._actions:  # semi-private: CPython's Lib/argparse.py, Python 3.11 to 3.13
        opposite = isinstance(action, argparse._StoreFalseAction)
        if action.dest != "help" and action.help != argparse.SUPPRESS and not opposite:
            found.setdefault(action.dest, action)
    return list(found.values())


def _head(title: str, command: str) -> str:
    return f"# {title}\n\n```\nshardwright {command} --help\n```\n\nWritten by `{COMMAND}`.\n\n"


def _of_run(parser: Parser) -> str:
    """A table for each group of options, by the class that has them."""
    groups: dict[str, list[argparse.Action]] = {}
    for action in listed(parser):
        named = (each for each in reversed(TrainingArguments.__mro__) if "__annotations__" in vars(each))
        kinds = (each for each in named if action.dest in vars(each)["__annotations__"])
        owner = next(kinds, TrainingArguments)
        groups.setdefault(TITLES.get(owner.__name__, "Objective"), []).append(action)
    tables = (f"## {title}\n\n{_table(actions, parser)}\n" for title, actions in groups.items())
    return _head("Options of a run", "train") + "\n".join(tables)


TITLES = {
    "ModelArguments": "Model, recipe, mesh",
    "DataArguments": "Data",
    "OptimizerArguments": "Optimizer",
    "AdapterArguments": "Adapter",
    "OutputArguments": "Output: log, evaluation, checkpoints",
    "TrainingArguments": "Steps, batch, learning rate",
}


def _section(command: str, about: str, actions: Sequence[argparse.Action], parser: Parser) -> str:
    return f"## {command}\n\n`shardwright {command}`: {about}.\n\n{_table(actions, parser)}\n"


def _table(actions: Sequence[argparse.Action], parser: Parser) -> str:
    return "\n".join(["| option | |", "|---|---|", *_rows(actions, parser)])


def _rows(actions: Sequence[argparse.Action], parser: Parser) -> Iterator[str]:
    formatter = parser._get_formatter()
    for action in actions:
        name = next(iter(action.option_strings), str(action.metavar or action.dest))
        text = " ".join(formatter._expand_help(action).split()) if action.help else ""
        text = re.sub(r" \(default: (None|False)\)$", "", text)  # asks for nothing
        if action.choices:
            text += f" One of {', '.join(map(str, action.choices))}."
        needed = "must be given; " if action.required and action.option_strings else ""
        yield f"| `{name}` | {needed}{escaped(text)} |"


def escaped(text: str) -> str:
    """Text within a cell of a table."""
    return re.sub(r"([|<])", r"\\\1", text)
