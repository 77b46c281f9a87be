"""A launch plan: files, and commands to run in their folder."""

import functools
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined


@dataclass(frozen=True)
class LaunchPlan:
    """A target's files, its commands to start the run, and those by which the user follows and ends it."""

    files: dict[str, str]  # name → text
    commands: list[list[str]]  # run in the files' folder, one after the other
    afterwards: list[list[str]]
    notes: list[str] = field(default_factory=list)  # sentences for the user
    folders: dict[str, Path] = field(default_factory=dict)  # name → folder of Python modules that is copied there


def filled(name: str, **values: Any) -> str:
    """The file ``name`` of a plan, from its template beside this module."""
    return _templates().get_template(f"{name}.j2").render(**values)


@functools.cache
def _templates() -> Environment:
    made = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters |= {"yaml": _in_yaml, "words": shlex.join, "literal": lambda word: word.replace("$(", "$$(")}
    return made


def _in_yaml(value: Any) -> str:
    """A value as YAML has it on one line."""
    plain = list(value) if isinstance(value, tuple) else value
    text = yaml.safe_dump(plain, default_flow_style=True, width=float("inf"), allow_unicode=True)
    return text.removesuffix("...\n").rstrip("\n")


def script(commands: list[list[str]]) -> str:
    """The commands as a shell script that runs from anywhere."""
    lines = ["#!/usr/bin/env bash", "set -euo pipefail", 'cd "$(dirname "$0")"', *map(shlex.join, commands)]
    return "\n".join(lines) + "\n"
