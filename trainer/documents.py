"""Where text comes from: the standard library, local files or the hub, as documents to train on and held-out ones."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets import Dataset, Features, Value

from trainer.errors import UserError

SUFFIXES = {
    "text": [".txt", ".md", ".rst", ".tex", ".py", ".c", ".h", ".cc", ".cpp", ".java", ".js", ".ts", ".go", ".rs"],
    "json": [".json", ".jsonl"],
    "parquet": [".parquet"],
}
KIND_OF = {suffix: kind for kind, suffixes in SUFFIXES.items() for suffix in suffixes}
HELDOUT_SPLITS = ("validation", "test")  # the first that a dataset has is held out; the other is left alone
STDLIB_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test"}

# one text file alone is cut at line ends into about a hundred documents, so that some can be held out
DOCUMENTS_OF_ONE_FILE = 100
DOCUMENT_BYTES = (4 << 10, 1 << 20)  # least and most that such a document holds, but for its last line


@dataclass(frozen=True)
class Files:
    """Local files of one kind, by their path under the dataset's folder and sorted by it."""

    asked: str
    files: Mapping[str, Path]
    kind: str
    is_folder: bool = True
    skip_undecodable: bool = False

    def by_split(self) -> dict[str, list[str]]:
        """Paths of the files of each split; in a folder, the names of files say their splits as they do on the hub."""
        paths: dict[str, list[str]] = {}
        for name, path in self.files.items():
            paths.setdefault(_split_of(name) if self.is_folder else "train", []).append(str(path))
        return paths


@dataclass(frozen=True)
class HubDataset:
    """A dataset on the hub: ``id``, ``id:configuration``, ``id@revision`` or ``id@revision:configuration``."""

    asked: str
    name: str
    revision: str | None
    configuration: str | None


@dataclass(frozen=True)
class Source:
    """Documents that are not read yet.

    Args:
        asked: what the user asked for, as errors say it.
        fingerprint: changes when the documents do.
        read: takes a scratch folder, which must outlive the result, and gives the documents to train on as ``train``,
            and those that the dataset itself holds out, if any, under the name of their split. Columns: ``text``, and
            of files ``name``.
    """

    asked: str
    fingerprint: str
    read: Callable[[Path], Mapping[str, Dataset]]


def locate(dataset: str | None) -> Files | HubDataset:
    """What ``--dataset`` names; None is the standard library. Nothing is read.

    Raises:
        UserError: nothing is there, or nothing to read.
    """
    if dataset is None:
        files = _files(Path(os.__file__).parent, "*.py", STDLIB_LEFT_OUT)
        return Files("the standard library", files, "text", skip_undecodable=True)
    asked, path = f"--dataset {dataset}", Path(dataset).expanduser()
    if path.exists():
        return Files(asked, *_local_files(path, asked), is_folder=path.is_dir())
    if dataset.startswith((os.sep, ".", "~")) or path.suffix.lower() in KIND_OF:
        raise UserError(
            asked=asked,
            found=f"no such file or folder: {path.absolute()}",
            why="it looks like a path, and nothing lies there",
            instead="the path of a text, JSON-lines or Parquet file or folder, or a hub id: roneneldan/TinyStories",
        )
    place, _, configuration = dataset.partition(":")
    name, _, revision = place.partition("@")
    return HubDataset(asked, name, revision or None, configuration or None)


def find_source(dataset: str | None, text_column: str) -> Source:
    """The source that ``--dataset`` names; None is the standard library. A hub dataset is downloaded here.

    Raises:
        UserError: nothing is there, or nothing to read. ``read`` raises it for what shows in the content alone.
    """
    where = locate(dataset)
    if isinstance(where, HubDataset):
        return _hub_source(where, text_column)
    return _text_source(where) if where.kind == "text" else _record_source(where, text_column)


def split_documents(source: Source, scratch: Path, heldout_fraction: float) -> dict[str, Dataset]:
    """``train`` and ``heldout`` documents of ``source``.

    Where the dataset holds nothing out itself, the documents whose names (of records: their text) have the lowest
    hashes are held out: a choice that no seed changes, and that puts no text on both sides.

    Raises:
        UserError: too few documents have text in them, or the source can't be read.
    """
    train, *given = source.read(scratch).values()
    hashes = _hashes(train)
    filled = hashes >= 0
    distinct = np.unique(hashes[filled])
    if len(distinct) < (1 if given else 2):
        raise UserError(
            asked=source.asked,
            found=f"{len(distinct)} document{'' if len(distinct) == 1 else 's'} with text in it",
            why="some must be trained on and others held out",
            instead="a dataset with more documents",
        )
    if given:
        return {"train": train.select(np.flatnonzero(filled)), "heldout": given[0]}
    heldout = filled & (hashes <= distinct[math.ceil(heldout_fraction * len(distinct)) - 1])
    return {"train": train.select(np.flatnonzero(filled & ~heldout)), "heldout": train.select(np.flatnonzero(heldout))}


def digest(content: Sequence[Any]) -> str:
    """A name for JSON-able ``content``, the same in every process: 32 hexadecimal digits."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]


def _hashes(documents: Dataset) -> np.ndarray:
    """Of each document's name (of a record: its text), int64 ≥ 0; -1 where there is no text. [documents]"""
    named = "name" if "name" in documents.column_names else "text"
    values = (
        key_hash(name) if has_text(text) else -1
        for batch in documents.iter(1024)
        for name, text in zip(batch[named], batch["text"], strict=True)
    )
    return np.fromiter(values, dtype=np.int64, count=len(documents))


def key_hash(key: str) -> int:
    """Of a document's name (of a record: its text), 0 to 2**63 - 1; not Python's hash(), which differs each run."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest()) >> 1


def has_text(text: str | None) -> bool:
    """Whether a document holds anything but white space."""
    return bool(text) and not str(text).isspace()


# ---- files ----


def _files(root: Path, pattern: str, left_out: set[str]) -> dict[str, Path]:
    """Files under ``root`` by their path relative to it and sorted by it, but hidden ones and those in ``left_out``."""
    files = {}
    for path in root.rglob(pattern):
        parts = path.relative_to(root).parts
        if not left_out.intersection(parts) and not any(part.startswith(".") for part in parts) and path.is_file():
            files["/".join(parts)] = path
    return dict(sorted(files.items()))


def _local_files(path: Path, asked: str) -> tuple[dict[str, Path], str]:
    """The files at ``path`` and the one kind that they are of; a file that was named itself may have any suffix."""
    if path.is_file():
        files, kinds = {path.name: path}, {KIND_OF.get(path.suffix.lower(), "text"): path.name}
    else:
        files = {name: file for name, file in _files(path, "*", set()).items() if file.suffix.lower() in KIND_OF}
        kinds = {KIND_OF[file.suffix.lower()]: name for name, file in files.items()}
    if len(kinds) > 1:
        raise UserError(
            asked=asked,
            found="files of several kinds: " + ", ".join(f"{kind} ({name})" for kind, name in sorted(kinds.items())),
            why="which of them hold the text to train on can't be told",
            instead="a folder with files of one kind, or the path of one file",
        )
    if not any(file.stat().st_size for file in files.values()):
        raise UserError(
            asked=asked,
            found="an empty file" if path.is_file() else f"nothing in any file that ends in {', '.join(KIND_OF)}",
            why="there is no text to train on",
            instead="a text, JSON-lines or Parquet file, or a folder of such files",
        )
    return files, next(iter(kinds))


def _stamps(files: Mapping[str, Path]) -> list[Any]:
    stamps: list[Any] = []
    for name, path in files.items():
        stat = path.stat()
        stamps.append([name, str(path.resolve()), stat.st_size, stat.st_mtime_ns])
    return stamps


def text_documents(where: Files, name: str) -> Iterator[tuple[str, str]]:
    """(name, text) of each document of the text file ``name``: one, or its groups of lines if it is the only file.

    Raises:
        UserError: it can't be read, and is not to be skipped.
    """
    path = where.files[name]
    try:
        if len(where.files) == 1:
            yield from ((f"{name}:{i}", text) for i, text in enumerate(_line_groups(path)))
        else:
            yield name, path.read_text(encoding="utf-8-sig")
    except (UnicodeDecodeError, OSError) as error:
        if not where.skip_undecodable:
            raise UserError(
                asked=f"{where.asked}: the text of {path}",
                found=f"{type(error).__name__}: {error}",
                why="a text file must be readable UTF-8",
                instead="convert it (iconv -t utf-8), or move it out of the folder",
            ) from error


def _text_source(where: Files) -> Source:
    fingerprint = digest(_stamps(where.files))

    def documents() -> Iterator[dict[str, str]]:
        for file in where.files:
            yield from ({"text": text, "name": name} for name, text in text_documents(where, file))

    def read(scratch: Path) -> Mapping[str, Dataset]:
        features = Features(text=Value("large_string"), name=Value("string"))
        try:
            made = Dataset.from_generator(documents, features=features, cache_dir=str(scratch), fingerprint=fingerprint)
        except datasets.exceptions.DatasetGenerationError as error:
            raise (error.__cause__ if isinstance(error.__cause__, UserError) else error) from None
        return {"train": made}

    return Source(where.asked, fingerprint, read)


def _line_groups(path: Path) -> Iterator[str]:
    least, most = DOCUMENT_BYTES
    size = min(most, max(least, path.stat().st_size // DOCUMENTS_OF_ONE_FILE))
    with path.open(encoding="utf-8-sig") as file:
        while lines := file.readlines(size):
            yield "".join(lines)


# ---- records ----


def _record_source(where: Files, text_column: str) -> Source:
    def read(scratch: Path) -> Mapping[str, Dataset]:
        try:
            splits = datasets.load_dataset(where.kind, data_files=where.by_split(), cache_dir=str(scratch))
        except Exception as error:  # malformed in one way or another: of many types
            raise unreadable(where, error) from error
        return _texts(splits, text_column, where.asked)

    return Source(where.asked, digest([_stamps(where.files), text_column]), read)


def _split_of(name: str) -> str:
    """The split of a file in a dataset folder, such as ``test-00000-of-00001.parquet`` or ``validation/1.jsonl``."""
    match = re.match(rf"({'|'.join(HELDOUT_SPLITS)})(?![a-z])", name.lower())
    return match[1] if match else "train"


def _hub_source(where: HubDataset, text_column: str) -> Source:
    try:
        loaded = datasets.load_dataset(where.name, where.configuration, revision=where.revision)
    except Exception as error:  # offline, not found, gated, one of several configurations: of many types
        raise unreadable(where, error) from error
    splits = _texts(loaded, text_column, where.asked)
    # `datasets` keeps it equal from process to process for what it loads from its cache
    fingerprint = digest([split._fingerprint for split in splits.values()])
    return Source(where.asked, fingerprint, lambda scratch: splits)


def unreadable(where: Files | HubDataset, error: Exception) -> UserError:
    """The error of records that `datasets` can't open."""
    if isinstance(where, Files):
        return UserError(
            asked=where.asked,
            found=cause(error),
            why=f"it can't be read as {where.kind}",
            instead="files with one JSON object a line (.jsonl), or Parquet files",
        )
    return UserError(
        asked=where.asked,
        found=cause(error),
        why=f"no file or folder is called that, and the hub gives no dataset {where.name}",
        instead="an existing path, or the id of a hub dataset that this machine can reach or has in its cache "
        "(id:configuration where it has several), such as roneneldan/TinyStories",
    )


def cause(error: Exception) -> str:
    """What went wrong: `datasets` wraps it in an error that only says that it failed."""
    inner = error.__cause__ if isinstance(error, datasets.exceptions.DatasetGenerationError) else None
    return f"{type(inner or error).__name__}: {inner or error}"


def pick_splits(names: Collection[str], asked: str) -> tuple[str, list[str]]:
    """The split to train on, and the one to hold out if there is one.

    Raises:
        UserError: which is to be trained on can't be told.
    """
    train = next(iter(names)) if len(names) == 1 else "train"
    if train not in names:
        raise UserError(
            asked=asked,
            found=f"the splits {', '.join(names)}",
            why="none of them is called train",
            instead="a dataset with a split called train, or the path of one of its files",
        )
    return train, [name for name in HELDOUT_SPLITS if name in names and name != train][:1]


def check_text_column(columns: Mapping[str, Any], text_column: str, asked: str) -> None:
    """Refuse ``columns`` (name -> feature) in which ``text_column`` is not one of strings.

    Raises:
        UserError: lists the columns.
    """
    if getattr(columns.get(text_column), "dtype", None) not in ("string", "large_string"):
        tokenised = "; what is tokenised already can't be used" if "input_ids" in columns else ""
        raise UserError(
            asked=f"{asked}: the text in its column {text_column!r}",
            found="the columns " + ", ".join(f"{n} ({getattr(f, 'dtype', 'nested')})" for n, f in columns.items()),
            why=f"there is no such column of text{tokenised}",
            instead="--text_column with the name of a column of strings",
        )


def _texts(splits: Mapping[str, Dataset], text_column: str, asked: str) -> dict[str, Dataset]:
    """The text of the split to train on and of the one to hold out, if there is one, as column ``text``."""
    train, heldout = pick_splits(splits.keys(), asked)
    check_text_column(splits[train].features, text_column, asked)
    picked = {"train": splits[train], **{name: splits[name] for name in heldout}}
    texts = {name: split.select_columns(text_column) for name, split in picked.items()}
    return {name: split.rename_columns({text_column: "text"}) for name, split in texts.items()}
