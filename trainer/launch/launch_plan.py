"""A launch plan: files, and commands to run in their folder."""

import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True)
class LaunchPlan:
    """A target's files, its commands to start the run, and those by which the user follows and ends it."""

    files: dict[str, str]  # name → text
    commands: list[list[str]]  # run in the files' folder, one after the other
    afterwards: list[list[str]]
    notes: list[str] = field(default_factory=list)  # sentences for the user
    folders: dict[str, Path] = field(default_factory=dict)  # name → folder of Python modules that is copied there


class _BlockDumper(yaml.SafeDumper):
    def represent_str(self, data: str) -> yaml.Node:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)


_BlockDumper.add_representer(str, _BlockDumper.represent_str)


def as_yaml(value: Any) -> str:
    """YAML in the order of the keys; texts of several lines become blocks."""
    return yaml.dump(value, Dumper=_BlockDumper, sort_keys=False, width=10_000, allow_unicode=True)


def script(commands: list[list[str]]) -> str:
    """The commands as a shell script that runs from anywhere."""
    lines = ["#!/usr/bin/env bash", "set -euo pipefail", 'cd "$(dirname "$0")"', *map(shlex.join, commands)]
    return "\n".join(lines) + "\n"
