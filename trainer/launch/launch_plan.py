"""What a target makes of a request: files, and commands that are run in their folder."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True)
class LaunchPlan:
    """Files and commands.

    Args:
        files: name → text.
        folders: name → the folder of Python modules that is copied there.
        commands: what is run in the files' folder, one after the other.
        afterwards: what to type to follow the run, and to end it.
        notes: what the user should know beside.
    """

    files: dict[str, str]
    commands: list[list[str]]
    afterwards: list[list[str]]
    notes: list[str] = field(default_factory=list)
    folders: dict[str, Path] = field(default_factory=dict)


def as_yaml(value: Any) -> str:
    """YAML with keys in the order given; multi-line texts stay readable."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=10_000, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """Writes a text of several lines as a block."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)


def script(commands: list[list[str]]) -> str:
    """A shell script of the commands, to be run by hand from anywhere."""
    lines = ["#!/usr/bin/env bash", "set -euo pipefail", 'cd "$(dirname "$0")"', *map(shlex.join, commands)]
    return "\n".join(lines) + "\n"


def exports(variables: dict[str, str]) -> list[str]:
    """The variables as lines of a shell script; their values are taken as they are."""
    return [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
