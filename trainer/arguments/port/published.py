"""Published: the program, the arguments and the surroundings of a command or a YAML file that somebody published."""

from __future__ import annotations

import itertools
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shardwright.arguments.known_flags.flag_words import arguments_in
from shardwright.arguments.known_flags.table import find
from shardwright.arguments.port.datasets import spread
from shardwright.arguments.port.no_objective import check_name, in_words, trains
from shardwright.arguments.run_file import read_options
from shardwright.errors import UserError, fault

YAML = (".yaml", ".yml", ".json")
_OBJECTIVES = ("dpo", "kto", "reward", "sft", "orpo", "ipo", "simpo", "cpo")
_ASSIGNMENT = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)=(.*)\Z", re.DOTALL)
_VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^}]*))?\}|\$(\w+)")
_PROGRAMS = ("axolotl", "llamafactory-cli", "llamafactory", "trl")  # that are given a job's name
_ENDS = ("&&", ";", "|", ">", "2>&1", "&")  # words of a shell, behind which is another command
# keys that tell whose YAML it is
_AXOLOTL = {"base_model", "micro_batch_size", "sequence_len", "sample_packing"}
_LLAMA_FACTORY = {"finetuning_type", "stage", "cutoff_len"}


@dataclass
class Published:
    """A command as published.

    Args:
        program: whose arguments they are, as the table names it: ``trl sft``, ``axolotl``, …
        pairs: the arguments, by name and value, in their order; those of a YAML file before those of the command.
        launcher: words before the script: of `accelerate launch`, `torchrun`, `deepspeed`, the environment.
        objective: the one that the script trains; None: that is for an argument to say.
    """

    program: str
    pairs: list[tuple[str, Any]]
    launcher: list[str] = field(default_factory=list)
    objective: str | None = None


def read_published(path: str) -> Published:
    """The command in a shell script, or the arguments in a YAML or JSON file.

    Raises UserError if there is no such file, or no training is started in it, or one without an objective here.
    """
    found = _read(path)
    return replace(found, pairs=spread(found.program, found.pairs, Path(path).parent))


def _read(path: str) -> Published:
    if path.endswith(YAML):
        return _of_file(path, read_options(path))
    try:
        text = Path(os.path.expanduser(path)).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise _refused(path, fault(error)) from None
    lines = list(_lines(text))
    for words in lines:
        if found := _command(words, Path(path).parent):
            return found
    raise _refused(path, f"{len(lines)} commands, none of which starts a training")


def _refused(path: str, found: str) -> UserError:
    return UserError(
        asked=f"to port {path}",
        found=found,
        why="it is a shell script that starts a training, or a trainer's YAML file",
        instead="`accelerate launch … train.py --…`, `trl sft …`, `axolotl train …` or `llamafactory-cli train …`",
    )


def _of_file(path: str, options: dict[str, Any]) -> Published:
    pairs, keys = list(options.items()), set(options)
    if keys & _AXOLOTL:
        return Published("axolotl", pairs)
    if keys & _LLAMA_FACTORY:
        return Published("llamafactory", pairs)
    program, objective = _of_trl(_objective_in(path))
    return Published(program, pairs, objective=objective)


def _objective_in(text: str) -> str | None:
    """The objective that the name of a script or a file has in it, as a word; one that is none here is refused."""
    for part in reversed(Path(text).parts):
        check_name(part)
        words = in_words(part)
        if found := next((name for name in _OBJECTIVES if name in words), None):
            return found
    return None


def _of_trl(objective: str | None) -> tuple[str, str | None]:
    """The program of the table and our objective, by trl's word for it."""
    if objective in ("orpo", "ipo", "simpo", "cpo"):
        return "trl dpo", "simpo" if objective == "cpo" else objective
    name = objective or "sft"
    return f"trl {name}", None if name == "sft" else name


def _lines(text: str) -> Iterator[list[str]]:
    """The words of each command, with continued lines joined and variables put in."""
    known: dict[str, str] = {}
    for line in re.sub(r"\\[ \t]*\r?\n", " ", text).splitlines():
        line = line.strip().removeprefix("$ ")
        if not line or line.startswith("#"):
            continue
        filled = _VARIABLE.sub(lambda found: _filled(found, known), line)
        try:
            words = shlex.split(filled, comments=True)
        except ValueError:  # of a here-document, or a quote over several lines
            continue
        assigned = [_ASSIGNMENT.match(word) for word in words if word != "export"]
        if words and all(assigned):
            known.update({found[1]: found[2] for found in assigned if found})
        elif words:
            yield words


def _filled(found: re.Match[str], known: dict[str, str]) -> str:
    name = found[1] or found[3]
    return known.get(name, found[2] if found[2] is not None else found[0])


def _command(words: Sequence[str], folder: Path) -> Published | None:
    """The training that the words start; None: they start none."""
    at = next((number for number, word in enumerate(words) if _starts(words, number)), None)
    if at is None:
        return None
    word, rest = words[at], list(words[at + 1 :])
    launcher, name = list(words[:at]), word.rpartition("/")[2]
    if name in _PROGRAMS:
        job, rest = rest[0], rest[1:]
        launcher = [each for each in launcher if each not in ("uv", "run")]
    else:
        job = name
    if (name in _PROGRAMS or words[at - 1] == "-m") and not trains(job.rpartition(".")[2]):
        return None
    program, objective = _program(name, job)
    return Published(program, list(_pairs(rest, folder, program)), launcher, objective)


def _starts(words: Sequence[str], number: int) -> bool:
    """Whether the word at ``number`` is the script or the program that trains."""
    word, name = words[number], words[number].rpartition("/")[2]
    if name in _PROGRAMS:
        return number + 1 < len(words)
    module = number > 0 and words[number - 1] == "-m"
    return word.endswith(".py") or (module and not word.startswith(("torch.", "accelerate.", "deepspeed.")))


def _program(name: str, job: str) -> tuple[str, str | None]:
    """The table's program and our objective of a script ``name`` or a program and its ``job``."""
    if program := next((each for each in ("axolotl", "llamafactory") if each in name), None):
        return program, None
    objective = _objective_in(job)
    return ("transformers", None) if objective is None else _of_trl(objective)


def _pairs(words: Sequence[str], folder: Path, program: str) -> Iterator[tuple[str, Any]]:
    """Names and values in the words behind a script; a YAML file's come in its place."""
    own = list(itertools.takewhile(lambda word: word not in _ENDS, words))
    for each in arguments_in(own, lambda name: find(name, program)):
        if each.spelt and (each.name != "config" or each.value is True):
            yield each.name, each.value
        elif each.spelt or each.words[0].endswith(YAML):
            yield from _file_beside(each.value if each.spelt else each.words[0], folder).items()
        elif "=" in each.words[0] and program == "llamafactory":  # its overrides
            name, _, value = each.words[0].partition("=")
            yield name, value


def _file_beside(path: str, folder: Path) -> dict[str, Any]:
    """The options in a file that a command names, from where it stands or from here."""
    beside = folder / path
    return read_options(str(beside if beside.exists() else path))
