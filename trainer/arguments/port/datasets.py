"""Datasets: the entries of a published list of them, as arguments of their own, each of which a port accounts for."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwright.arguments.known_flags.entry import word
from shardwright.errors import UserError, in_short

_LISTS = {"datasets", "test_datasets", "pretraining_dataset"}  # of axolotl and trl
# keys of an entry that are written in --dataset
_OF_PLACE = {"path", "name", "split", "revision", "data_files", "data_dir", "fraction"}
_INFO = "dataset_info.json"
_MIXING = ("mix_strategy", "interleave_probs")
_URLS = ("hf_hub_url", "file_name")  # of an entry of that file, the first that it has


def spread(program: str, pairs: Sequence[tuple[str, Any]], folder: Path) -> list[tuple[str, Any]]:
    """``pairs`` of a published command with what its datasets' entries say besides as pairs of their own.

    ``folder``: where the command lies, beside which LLaMA-Factory's names of datasets are looked up. Raises UserError
    if its file of them can't be read.
    """
    if program == "llamafactory":
        found = _info(Path(str(dict(pairs).get("dataset_dir") or "data")), folder)
        return _mixed([made for name, value in pairs for made in _looked_up(name, value, *found)])
    return [made for name, value in pairs for made in ((name, value), *_keys(name, value))]


def _keys(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The keys of the entries in a list, each value once."""
    entries = value if name in _LISTS and isinstance(value, list) else []
    said = [(key, each) for entry in entries if isinstance(entry, Mapping) for key, each in entry.items()]
    for number, (key, each) in enumerate(said):
        if key not in _OF_PLACE and each is not None and (key, each) not in said[:number]:
            yield f"datasets.{key}", each


def _info(named: Path, folder: Path) -> tuple[Path, dict[str, Any]]:
    """The folder with LLaMA-Factory's file of datasets, and what is in it; nothing if there is none."""
    for place in (named, folder / named):
        try:
            return place, dict(json.loads((place / _INFO).read_text(encoding="utf-8")))
        except FileNotFoundError:
            continue
        except (OSError, ValueError, TypeError) as error:
            raise UserError(
                asked=f"the datasets named in {place / _INFO}",
                found=in_short(error),
                why="it is to say which files or hub ids they are",
                instead="a JSON object of names and their entries, or `dataset` with files and hub ids",
            ) from error
    return named, {}


def _looked_up(name: str, value: Any, place: Path, info: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    if name not in ("dataset", "eval_dataset") or not isinstance(value, str | list):
        yield name, value
        return
    names = [str(each).strip() for each in (value.split(",") if isinstance(value, str) else value)]
    entries = {each: info[each] for each in names if isinstance(info.get(each), Mapping)}
    yield name, ",".join(_place(place, entries[each]) or each if each in entries else each for each in names)
    said = [pair for entry in entries.values() for pair in _details(entry)]
    yield from (pair for number, pair in enumerate(said) if pair not in said[:number])


def _mixed(pairs: Sequence[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """``pairs`` with LLaMA-Factory's ``interleave_probs`` behind the datasets whose shares they are."""
    said = dict(pairs)
    names, shares = (word(said.get(name) or "").split(",") for name in ("dataset", "interleave_probs"))
    shares = shares if said.get("interleave_probs") else ["1"] * len(names)
    if not str(said.get("mix_strategy")).startswith("interleave") or len({*names}) != len(shares) or len(names) < 2:
        return [*pairs]
    mixed = ",".join(f"{name.strip()}:{share.strip()}" for name, share in zip(names, shares, strict=True))
    known = {"dataset": ("dataset", mixed)}
    return [known.get(name, (f"dataset.{name}" if name in _MIXING else name, value)) for name, value in pairs]


def _url(entry: Mapping[str, Any]) -> str | None:
    """The key that says where the entry's dataset is."""
    return next((key for key in _URLS if isinstance(entry.get(key), str) and entry[key]), None)


def _place(folder: Path, entry: Mapping[str, Any]) -> str:
    """The entry's dataset as --dataset takes it; empty if it says none that can be read."""
    kind = _url(entry)
    split = f"#{entry['split']}" if entry.get("split", "train") != "train" else ""
    if kind is None:
        return ""
    if kind == "file_name":
        return str(folder / entry[kind]) + split
    within = f"/{str(entry['folder']).strip('/')}" if entry.get("folder") else ""
    return str(entry[kind]) + within + (f":{entry['subset']}" if entry.get("subset") else "") + split


def _details(entry: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    known = (*_URLS, "subset", "split", "folder") if _url(entry) else ()
    for key, value in entry.items():
        if isinstance(value, Mapping):
            yield from ((f"dataset.{key}.{inner}", each) for inner, each in value.items())
        elif key not in known and not (known and key.endswith("_url")):
            yield f"dataset.{key}", value
