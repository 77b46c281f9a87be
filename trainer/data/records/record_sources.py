"""Sources of records: the standard library, files here or in a bucket, the hub or a caller's; and their splits."""

import contextlib
import json
import os
import re
import stat
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import datasets
from datasets import Dataset, IterableDataset

from shardwright.data.records.bucket import copied
from shardwright.errors import UserError, a_type, nearest_beside
from shardwright.files.folder import ABSENT, errors

_TEXT = (".txt", ".md", ".rst", ".tex", ".py", ".c", ".h", ".cc", ".cpp", ".java", ".js", ".ts", ".go", ".rs")
KIND_OF = {
    **dict.fromkeys(_TEXT, "text"),
    **dict.fromkeys((".json", ".jsonl", ".ndjson"), "json"),
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".csv": "csv",
}
_PACKED = {".gz": "gzip -d", ".zst": "zstd -d", ".bz2": "bzip2 -d", ".xz": "xz -d"}  # → what unpacks it
_LONGEST_LINE = 1 << 24  # bytes of a record
_SPLIT = re.compile(r"\w[\w.-]*")
_PART = re.compile(rf"({_SPLIT.pattern})\[.*\]")  # as datasets writes it
HELDOUT_SPLITS = ("validation", "test")  # the first that a dataset has is held out; the other is not used
# how the names of files and folders with these splits begin on the hub (datasets' SPLIT_KEYWORDS)
_HELDOUT_FILE = re.compile(r"((?P<validation>valid(ation)?|val|dev)|(?P<test>test(ing)?|eval(uation)?))(?![a-z])")
# companions of a dataset in its repository: text that is no data if the data are records, …
ABOUT = re.compile(
    r"(readme|licen[cs]e|copying|notice|authors|citation|changelog|contributing|code_of_conduct|security|requirements"
    r"|checksums?|(sha|md5)\d*(sums?)?)([^a-z].*)?"
)
# … and records about the dataset
ABOUT_RECORDS = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "croissant.json"}
STDLIB_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


@dataclass(frozen=True)
class Files:
    """Local files of one kind: text, json, parquet, arrow or csv."""

    asked: str  # the user's words for the dataset, for errors
    files: Mapping[str, Path]  # path relative to the dataset's folder → file, sorted
    kind: str
    is_folder: bool = True
    skip_undecodable: bool = False  # a text file that is not UTF-8 is skipped, not refused
    split: str | None = None  # the one to train on, where it is not `train`

    def by_split(self) -> dict[str, list[str]]:
        """Split → names of its files. In a folder of records, file names tell the split, as on the hub:

        ``data/test-00000-of-00001.parquet`` and ``test/1.jsonl`` belong to ``test``. Of a ``split`` that was asked for,
        and of what is held out beside it, the files and folders begin with its name; others are left out.
        """
        names: dict[str, list[str]] = {}
        if self.split is not None:
            for name in self.files:
                for split in (self.split, *heldout_names(self.split)):
                    begins = re.compile(rf"{re.escape(split)}(?![A-Za-z_])")
                    if any(map(begins.match, name.split("/"))):
                        names.setdefault(split, []).append(name)
                        break
            return names if self.split in names else {}  # what is held out beside it is not all that is there
        for name in self.files:
            parts = name.lower().split("/") if self.is_folder and self.kind != "text" else []
            match = next(filter(None, map(_HELDOUT_FILE.match, parts)), None)
            split = "train" if match is None else "validation" if match["validation"] else "test"
            names.setdefault(split, []).append(name)
        return names


@dataclass(frozen=True)
class HubDataset:
    """A dataset on the hub: ``id``, ``id/FOLDER``, ``id@revision``, ``id:configuration``, or these together."""

    asked: str
    name: str
    revision: str | None
    configuration: str | None
    split: str | None = None  # the one to train on, where it is not `train`
    folder: str | None = None  # the one within it to read

    @property
    def words(self) -> dict[str, Any]:
        """The dataset as functions of `datasets` take it."""
        return {"name": self.configuration, "revision": self.revision, "data_dir": self.folder}


@dataclass(frozen=True)
class HeldRecords:
    """A caller's records: a ``Dataset``, or an ``IterableDataset`` that can be iterated again."""

    asked: str
    records: Dataset | IterableDataset
    split = None

    @property
    def identity(self) -> str:
        """A name for the records; a stream has no fingerprint and is named by its columns and parts."""
        if isinstance(self.records, Dataset):
            # semi-private: datasets/arrow_dataset.py, datasets 5.2; a hash of the content or of its origin
            return f"{len(self.records):,} records ({self.records._fingerprint})"
        return f"a stream of {self.records.num_shards} parts, columns {sorted(self.records.features or ())}"

    def stream(self) -> IterableDataset:
        return self.records.to_iterable_dataset() if isinstance(self.records, Dataset) else self.records


Place = Files | HubDataset | HeldRecords
AnyDataset: TypeAlias = str | Dataset | IterableDataset | None  # as `--dataset` and `Trainer` take it


def locate(dataset: AnyDataset, option: str = "dataset") -> Place:
    """The place that ``--dataset``, or another ``option``, names; None is the standard library. Nothing is read.

    Raises UserError if there is no such file or folder, or it holds nothing to read, or files of several kinds.
    """
    if isinstance(dataset, Dataset | IterableDataset):
        return HeldRecords(f"{a_type(dataset)}", _unformatted(dataset))
    if dataset is None:
        files = _files(Path(os.__file__).parent, ".py", STDLIB_LEFT_OUT)
        return Files("the standard library", files, "text", skip_undecodable=True)
    asked, path = f"--{option} {dataset}", Path(os.path.expanduser(dataset))
    if os.path.exists(path):  # Path.exists would raise for a name that is too long
        return Files(asked, *_local_files(path, asked), is_folder=path.is_dir())
    base, _, split = dataset.rpartition("#")
    if base and _SPLIT.fullmatch(split):
        whole = locate(base, option)
        return whole if isinstance(whole, HeldRecords) else replace(whole, asked=asked, split=split)
    if base and (part := _PART.fullmatch(split)):
        raise UserError(
            asked=asked,
            found=f"a part of the split {part[1]}",
            why="a split is read whole",
            instead=f"--{option} {base}#{part[1]}; and --max_samples 1000, which takes the first so many of --dataset",
        )
    if "://" in dataset:
        copy = copied(dataset, asked, _kind)
        return Files(asked, *_local_files(copy, asked), is_folder=copy.is_dir())
    if dataset.startswith((os.sep, ".", "~")) or _kind(path):
        raise UserError(
            asked=asked,
            found=f"no such file or folder: {path.absolute()}",
            why="it looks like a path, and nothing lies there",
            instead=f"{nearest_beside(dataset)}the path of a text, JSON-lines, Parquet, Arrow or CSV file or folder, "
            "or a hub id: roneneldan/TinyStories",
        )
    place, _, configuration = dataset.partition(":")
    path_there, _, revision = place.partition("@")
    names = path_there.split("/", 2)
    folder = names.pop().strip("/") if len(names) == 3 else None
    return HubDataset(asked, "/".join(names), revision or None, configuration or None, folder=folder or None)


def _unformatted(records: Dataset | IterableDataset) -> Dataset | IterableDataset:
    """The records as Python's own values, of the columns that their format shows (``with_format``)."""
    if isinstance(records, IterableDataset):
        return records.with_format(None)
    shown = records.format
    if shown["type"] == "custom":
        raise UserError(
            asked="rows of a Dataset with a transform",
            found="with_transform or set_transform, a function that is called whenever a record is looked at",
            why="rows are stored, and their name in the cache does not know what it returns",
            instead="dataset.map(the function)",
        )
    if shown["type"] is None and shown["columns"] == records.column_names:
        return records
    plain = records.with_format(None)
    return plain if shown["output_all_columns"] else plain.select_columns(shown["columns"])


def _files(root: Path, suffix: str, left_out: set[str]) -> dict[str, Path]:
    """Relative path → file of those under ``root`` whose names end in ``suffix``, sorted; links are followed.

    Left out are hidden files and folders, those in ``left_out``, and what vanishes meanwhile. Raises StorageError if a
    folder can't be listed, or it can't be told whether a file is there.
    """
    top = os.path.realpath(root)
    seen = {top}

    def kept(names: list[str]) -> list[str]:
        return [name for name in names if not name.startswith(".") and name not in left_out]

    def is_new(folder: str) -> bool:
        """True unless its files come under another name too, as those of a link within ``root``, or in a circle, do."""
        real = os.path.realpath(folder)
        again = real in seen or (os.path.islink(folder) and real.startswith(f"{top}{os.sep}"))
        seen.add(real)
        return not again

    def unlisted(error: OSError) -> None:
        if not isinstance(error, ABSENT):
            raise error

    files = {}
    with errors("list", str(root)):
        for folder, inner, names in os.walk(root, onerror=unlisted, followlinks=True):
            inner[:] = [name for name in sorted(kept(inner)) if is_new(os.path.join(folder, name))]
            for path in (Path(folder, name) for name in kept(names) if name.endswith(suffix)):
                if (state := _state(path)) is not None and stat.S_ISREG(state.st_mode):
                    name = path.relative_to(root).as_posix()  # of bytes that are no UTF-8: written as \xe9
                    files[os.fsencode(name).decode(errors="backslashreplace")] = path
    return dict(sorted(files.items()))


def _state(file: Path) -> os.stat_result | None:
    """The size, kind and times of ``file``; None: it is gone. Raises StorageError if that can't be told."""
    with errors("read", str(file)), contextlib.suppress(*ABSENT):
        return file.stat()
    return None


def _local_files(path: Path, asked: str) -> tuple[dict[str, Path], str]:
    """The files at ``path``, and their one kind. A path that is itself a file of unknown suffix is text."""
    found = {path.name: path} if path.is_file() else _files(path, "", set())
    for name in map(Path, found):
        inside = name.with_suffix("")
        if name.suffix.lower() in _PACKED and _kind(inside) and inside.as_posix() not in found:
            raise UserError(
                asked=asked,
                found=f"a packed file, {name}",
                why="a run reads from any row on, which in a packed file can't be found",
                instead=f"the file unpacked: {_PACKED[name.suffix.lower()]} {found[name.as_posix()]}",
            )
    if path.is_file() and path.suffix.lower() == ".tsv":
        raise UserError(
            asked=asked,
            found="a table with tabs between its cells",
            why="tables are read with commas between them, and as text its columns would be letters",
            instead="a .csv file of it (pandas.read_csv(path, sep='\\t')); or a .txt file, to train on it as text",
        )
    if path.is_file() and _kind(path) is None and _begins_with_record(path):
        raise UserError(
            asked=asked,
            found="a JSON object in its first line",
            why="a file of another ending is trained on as it is, letter by letter, and that looks like records",
            instead=f"mv {path} {path}.jsonl, for a record a line; or {path.name}.txt, for text",
        )
    if path.is_file():
        files, kinds = found, {_kind(path) or "text": path.name}
    else:
        files = {name: file for name, file in found.items() if _kind(file)}
        data = {
            name: file
            for name, file in files.items()
            if file.name.lower() not in ABOUT_RECORDS
            and not (_kind(file) == "text" and ABOUT.fullmatch(file.stem.lower()))
        }
        if any(_kind(file) != "text" for file in data.values()):
            files = data
        kinds = {KIND_OF[file.suffix.lower()]: name for name, file in files.items()}
    if len(kinds) > 1:
        raise UserError(
            asked=asked,
            found="files of several kinds: " + ", ".join(f"{kind} ({name})" for kind, name in sorted(kinds.items())),
            why="which of them hold the text to train on can't be told",
            instead="a folder with files of one kind, or the path of one file",
        )
    if not any((state := _state(file)) and state.st_size for file in files.values()):
        raise UserError(
            asked=asked,
            found="an empty file" if path.is_file() else f"nothing in any file that ends in {', '.join(KIND_OF)}",
            why="there is no text to train on",
            instead="a text, JSON-lines, Parquet, Arrow or CSV file, or a folder of such files",
        )
    return files, next(iter(kinds))


def _begins_with_record(path: Path) -> bool:
    """Whether the first line of ``path`` is a JSON object; one that can't be read is told of where it is read."""
    with contextlib.suppress(OSError, ValueError, RecursionError), path.open("rb") as file:
        return isinstance(json.loads(file.readline(_LONGEST_LINE)), dict)
    return False


def _kind(file: str | Path) -> str | None:
    """The kind of data in a file of this name; None: none that is known."""
    return KIND_OF.get(Path(file).suffix.lower())


def not_utf8(asked: str, error: Exception, path: Path | None = None) -> UserError:
    """The UserError of text that is not UTF-8, in a record or in the text file ``path``, whose line it names."""
    line = None if path is None else _undecodable_line(path)
    return UserError(
        asked=f"{asked}: its text",
        found=f"{f'{path}, line {line}' if line else 'a record'}: {cause(error)}",
        why="text is read as UTF-8",
        instead="convert the file (iconv -t utf-8), unpack it if it is packed, or leave it out",
    )


def _undecodable_line(path: Path) -> int | None:
    """The number (from 1) of the first line of ``path`` that is not UTF-8; None if all are, or it can't be read."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return number
    return None


def unreadable(where: Place, error: Exception) -> UserError:
    """The UserError of a dataset that `datasets` could not open."""
    if isinstance(where, Files):
        why = f"it can't be read as {where.kind}"
        instead = "files with one JSON object a line (.jsonl), Parquet or Arrow files, or tables with a first line "
        instead += "of names (.csv)"
    elif isinstance(where, HeldRecords):
        why = "its records can't be read"
        instead = "a dataset of the library `datasets` whose first record can be looked at"
    else:
        why = f"no file or folder is called that, and the hub gives no dataset {where.name}"
        instead = "an existing path, or the id of a hub dataset that this machine can reach or has in its cache "
        instead += "(id:configuration where it has several), such as roneneldan/TinyStories"
    return UserError(asked=where.asked, found=cause(error), why=why, instead=instead)


def without_rows(where: Place) -> UserError:
    return UserError(
        asked=where.asked,
        found="no rows",
        why="there is nothing in it to learn from, or to evaluate on",
        instead="data with a record at least",
    )


def cause(error: Exception) -> str:
    """The error in words. `datasets` wraps some causes in an error that only says that it failed."""
    inner = error.__cause__ if isinstance(error, datasets.exceptions.DatasetGenerationError) else None
    return f"{type(inner or error).__name__}: {inner or error}"


def heldout_names(train: str) -> list[str]:
    """The splits that may be held out beside ``train``: of ``train_sft`` first ``validation_sft`` and ``test_sft``."""
    beside = [train.replace("train", name) for name in HELDOUT_SPLITS] if "train" in train else []
    return list(dict.fromkeys([*beside, *HELDOUT_SPLITS]))


def pick_splits(names: Collection[str], asked: str, split: str | None = None) -> list[str]:
    """The split to train on, and the one to hold out if there is one. ``split``: the one that was asked for.

    Raises UserError if there is none of that name; or several splits, and none is called train.
    """
    train = split or (next(iter(names)) if len(names) == 1 else "train")
    if train not in names:
        dataset = asked.removeprefix("--dataset ").removesuffix(f"#{split}")
        likely = sorted(names, key=lambda name: (not name.startswith("train"), name))
        raise UserError(
            asked=asked,
            found=f"the splits {', '.join(names)}" if names else "no file of that split",
            why=f"none of them is called {train}",
            instead=", or ".join(f"--dataset {dataset}#{name}" for name in likely[:3]) or f"--dataset {dataset}",
        )
    return [train, *[name for name in heldout_names(train) if name in names and name != train][:1]]
