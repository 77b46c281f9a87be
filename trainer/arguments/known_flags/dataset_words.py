"""Readers of values that name datasets, chat templates or roles: theirs as our options write them, or ValueError."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwright.arguments.data_options import ROLE_OF

_FILE_KINDS = ("json", "text", "csv", "parquet", "arrow")  # `path` of a dataset whose files are named beside it
_READ_AS = {"developer": "system", **ROLE_OF}  # alias → role, of conversations that are read as they are


def first_to_train_on(value: Any) -> str:
    """The first split, of a list or a text with commas, with `train` in its name; what is held out follows from it."""
    names = value.split(",") if isinstance(value, str) else list(value)
    return next((str(name).strip() for name in names if "train" in str(name)), str(names[0]))


def _each(value: Any) -> list[str]:
    """The datasets of a list, of a mapping to the share that is taken of each, or of a text with commas."""
    found = json.loads(value) if isinstance(value, str) and value.lstrip().startswith(("{", "[")) else value
    if isinstance(found, Mapping) and any(float(share) != 1 for share in found.values()):
        raise ValueError(
            "of each a share is taken there; shares here are of the rows: --dataset a.jsonl:0.7,b.jsonl:0.3"
        )
    found = found.split(",") if isinstance(found, str) else list(found)
    return [name for each in found for name in ([each.strip()] if isinstance(each, str) else _described(each))]


def only_one(value: Any) -> str:
    """The one name of a list, a mapping or a text with commas; ValueError for several."""
    found = _each(value)
    if len(found) != 1:
        raise ValueError(f"{len(found)} of them, and one is taken")
    return found[0]


def several(value: Any) -> str:
    """Datasets with commas between them, as --dataset mixes them by their sizes."""
    return ",".join(dict.fromkeys(_each(value)))


def held_out(value: Any) -> str:
    """Datasets as --eval_dataset takes them: one, or several by names, which are made of theirs."""
    found = list(dict.fromkeys(_each(value)))
    if len(found) == 1:
        return found[0]
    stems = [re.sub(r"\W", "_", Path(name).stem) for name in found]
    names = [stem if stems.count(stem) == 1 and stem[:1].isalpha() else f"set{i}" for i, stem in enumerate(stems, 1)]
    return ",".join(f"{name}={dataset}" for name, dataset in zip(names, found, strict=True))


def _described(entry: Mapping[str, Any]) -> list[str]:
    """A dataset in axolotl's or trl's words (`path`, `name`, `split`, `fraction`, …), as --dataset takes it."""
    if (share := entry.get("fraction")) is not None:
        whole = _described({key: value for key, value in entry.items() if key != "fraction"})
        if len(whole) != 1:
            raise ValueError("a share is that of one file, or of a folder of them")
        return [f"{whole[0]}:{share}"]
    split, path, files = (entry.get(name) for name in ("split", "path", "data_files"))
    split = str(split or "train")
    if "[" in split or "+" in split:
        raise ValueError(f"a split is taken whole, and by itself, not {split}")
    if not path:
        raise ValueError("it has no path")
    if files and path not in _FILE_KINDS:
        raise ValueError(f"{path} is taken whole, and not some of its files: a folder with these files")
    if files:
        return [files] if isinstance(files, str) else [str(file) for file in files]
    revision = f"@{entry['revision']}" if entry.get("revision") else ""
    configuration = f":{entry['name']}" if entry.get("name") else ""
    folder = f"/{str(entry['data_dir']).strip('/')}" if entry.get("data_dir") else ""
    return [f"{path}{folder}{revision}{configuration}" + (f"#{split}" if split != "train" else "")]


def template(value: Any) -> str:
    """A chat template's file; ValueError for its text."""
    text = str(value)
    if "{{" in text or "{%" in text:
        raise ValueError("a template is read from a file: --chat_template FILE")
    return text


def known_roles(value: Any) -> Any:
    """Names of roles that are read as they are meant; ValueError for others."""
    found = json.loads(value) if isinstance(value, str) else value
    for role, aliases in found.items():
        for alias in [aliases] if isinstance(aliases, str) else aliases:
            if _READ_AS.get(alias, alias) != role:
                raise ValueError(f"{alias} is not read as {role}: rename it to {role} in the data")
    return value
