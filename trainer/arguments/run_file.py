"""A run as a file: the options in YAML or JSON that ``--config`` reads, and the `run.yaml` of an output folder."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, ClassVar

import yaml

from shardwright.arguments.data_options import WEIGHTED
from shardwright.arguments.known_flags.entry import with_one_warmup
from shardwright.arguments.known_flags.flag_words import words_of
from shardwright.errors import UserError, a_type, fault, nearest_beside, without_credentials

RUN_FILE = "run.yaml"
OPTION = "--config"
HELP = (
    "A YAML or JSON file of options by their names, such as the run.yaml of an output folder; options of the command "
    "line win."
)
_LARGEST = 1 << 20  # most bytes of such a file
_OUTPUTS = ("output_dir", "staging_dir")
_INPUTS = ("model", "tokenizer", "adapter", "teacher", "sample_prompts")
_NAMED = ("recipe", "chat_template", "resume_from_checkpoint")  # a bare word of these is no path


class _Loader(yaml.SafeLoader):
    """Reads scalars as YAML 1.2's core schema has them: `no` is a word, 2e-5 a number, 10:13 no sexagesimal one."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """The mapping of a node; a key that comes twice is an error."""
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = [key for number, key in enumerate(keys) if key in keys[:number]]
        if twice:
            raise yaml.constructor.ConstructorError(None, None, f"{twice[0]!r} comes twice", node.start_mark)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Writes texts in quotes that YAML 1.1 or 1.2 would read as something else, and escapes what can't be seen."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"'
    ),
)


for _tag, _form, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?[0-9]+", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", "-+.0123456789"),
):
    for _kind in (_Loader, _Dumper):
        _kind.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_form})\Z"), list(_first))
_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(node.value))  # 0042 is not octal


def read_options(path: str) -> dict[str, Any]:
    """The options in a YAML or JSON file, by name, with ``_`` in it; those without a value are left out.

    Raises UserError: there is no such file, or it holds no mapping of names to values.
    """
    try:
        text = _read(path).decode()
        found = json.loads(text) if path.endswith(".json") else yaml.load(text, _Loader)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise _refused(path, " ".join(fault(error).split())) from None
    if not isinstance(found, Mapping):
        raise _refused(path, f"{a_type(found)}")
    if other := [name for name in found if not isinstance(name, str)]:
        raise _refused(path, f"{other[0]!r}, a name that is no text")
    named = {name.lstrip("-").replace("-", "_"): value for name, value in found.items() if value is not None}
    return with_one_warmup(named)


def _read(path: str) -> bytes:
    if "://" in path:
        from shardwright.files.folder import Folder

        folder, _, name = path.rpartition("/")
        return Folder(folder).read(name)
    with open(os.path.expanduser(path), "rb") as file:
        data = file.read(_LARGEST + 1)
    if len(data) > _LARGEST:
        raise ValueError(f"more than {_LARGEST:,} bytes")
    return data


def _refused(path: str, found: str) -> UserError:
    return UserError(
        asked=f"{OPTION} {path}",
        found=found,
        why="it is a YAML or JSON file of options by their names: `learning_rate: 2e-5`",
        instead=f"{nearest_beside(path)}the {RUN_FILE} of an output folder, or one that `shardwright port` wrote",
    )


def with_files(words: Sequence[str], known: Mapping[str, bool] | None = None) -> list[str]:
    """The words of a command with the options of its ``--config`` files in their place, before all others.

    ``known``: the names of the command's options → whether they take a value; a file's other options are left out.
    None: all are taken, with their values. Raises UserError for a file that can't be read.
    """
    made: list[str] = []
    rest: list[str] = []
    left = iter(words)
    for each in left:
        if each == "--":
            rest += [each, *left]
            break
        name, equals, path = each.partition("=")
        if name != OPTION:
            rest.append(each)
            continue
        path = path if equals else next(left, "")
        options = read_options(path)
        if known is not None:
            made += [f"--{name}" for name, value in options.items() if known.get(name) is False and value is True]
            options = {name: value for name, value in options.items() if known.get(name)}
        made += words_of(options)
    return [*made, *rest]


def run_file(arguments: Any) -> str:
    """The `run.yaml` of a run with ``arguments``: all options, those that are not the default first.

    Read again, they are the same arguments, from whichever folder: paths of this machine are absolute. A value that
    follows from others is left to follow, also from those of a command that gives others. Left out is
    ``user:password@`` in a URL.
    """
    values, defaults = arguments.as_dict(), {each.name: each.default for each in fields(arguments)}
    values |= {name: defaults[name] for name in values if _follows(arguments, name, defaults[name])}
    if getattr(arguments, "steps_of_epochs", 0) == arguments.max_steps:
        values["max_steps"] = defaults["max_steps"]
    paths = [*_OUTPUTS, *_INPUTS, *(name for name in _NAMED if {"/", "."} & {*str(values[name])})]
    values |= {name: _absolute(values[name], name in _OUTPUTS) for name in paths if values[name]}
    sets = [f"{name}={_mixture(text)}" if name else _mixture(text) for name, text in arguments.eval_sets.items()]
    values |= {
        "dataset": values["dataset"] and _mixture(values["dataset"]),
        "eval_dataset": without_credentials(",".join(sets)) or None,
    }
    given = {name: value for name, value in values.items() if value != defaults[name]}
    others = {name: value for name, value in values.items() if name not in given}
    head = f"# The run, to be repeated: shardwright train --config {RUN_FILE}\n"
    return f"{head}{dumped(given)}\n# As is the default:\n{dumped(others)}"


def _follows(arguments: Any, name: str, default: Any) -> bool:
    """Whether an option is as it would be had it been left out, though that is not its ``default``."""
    if getattr(arguments, name) == default:
        return False
    try:
        return bool(replace(arguments, **{name: default}) == arguments)
    except UserError:
        return False


def _absolute(path: str, output: bool = False) -> str:
    """``path`` from the disk's root, if it is an ``output`` or an input that is there; else as it is."""
    there = (output and "://" not in path) or os.path.exists(os.path.expanduser(path))
    return os.path.abspath(os.path.expanduser(path)) if there else path


def _mixture(dataset: str) -> str:
    """The datasets of a mixture, each as :func:`_absolute` has it, with its weight; or the only one."""
    if os.path.exists(os.path.expanduser(dataset)):
        return _absolute(dataset)
    parts = [(part, WEIGHTED.fullmatch(part)) for part in map(str.strip, dataset.split(","))]
    return ",".join(f"{_absolute(match[1])}:{match[2]}" if match else _absolute(part) for part, match in parts)


def dumped(options: Mapping[str, Any]) -> str:
    """Options as YAML."""
    if not options:
        return ""
    text: str = yaml.dump(dict(options), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1 << 20)
    return text
