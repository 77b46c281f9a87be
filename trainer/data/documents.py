"""Documents to train on and held-out ones."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets import Dataset, Features, Value

from trainer.cache import digest
from trainer.data.sources import Files, HubDataset, check_text_column, locate, pick_splits, unreadable
from trainer.errors import UserError

# one text file alone is cut at line ends into about a hundred documents, so that some can be held out
DOCUMENTS_OF_ONE_FILE = 100
DOCUMENT_BYTES = (4 << 10, 1 << 20)  # least and most that such a document holds, but for its last line


@dataclass(frozen=True)
class Documents:
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


def find_documents(dataset: str | None, text_column: str) -> Documents:
    """The source that ``--dataset`` names; None is the standard library. A hub dataset is downloaded here.

    Raises:
        UserError: nothing is there, or nothing to read. ``read`` raises it for what shows in the content alone.
    """
    where = locate(dataset)
    if isinstance(where, HubDataset):
        return _hub_source(where, text_column)
    return _text_source(where) if where.kind == "text" else _record_source(where, text_column)


def split_documents(source: Documents, scratch: Path, heldout_fraction: float) -> dict[str, Dataset]:
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


def _text_source(where: Files) -> Documents:
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

    return Documents(where.asked, fingerprint, read)


def _line_groups(path: Path) -> Iterator[str]:
    least, most = DOCUMENT_BYTES
    size = min(most, max(least, path.stat().st_size // DOCUMENTS_OF_ONE_FILE))
    with path.open(encoding="utf-8-sig") as file:
        while lines := file.readlines(size):
            yield "".join(lines)


def _record_source(where: Files, text_column: str) -> Documents:
    def read(scratch: Path) -> Mapping[str, Dataset]:
        try:
            splits = datasets.load_dataset(where.kind, data_files=where.by_split(), cache_dir=str(scratch))
        except Exception as error:  # malformed in one way or another: of many types
            raise unreadable(where, error) from error
        return _texts(splits, text_column, where.asked)

    return Documents(where.asked, digest([_stamps(where.files), text_column]), read)


def _hub_source(where: HubDataset, text_column: str) -> Documents:
    try:
        loaded = datasets.load_dataset(where.name, where.configuration, revision=where.revision)
    except Exception as error:  # offline, not found, gated, one of several configurations: of many types
        raise unreadable(where, error) from error
    splits = _texts(loaded, text_column, where.asked)
    # `datasets` keeps it equal from process to process for what it loads from its cache
    fingerprint = digest([split._fingerprint for split in splits.values()])
    return Documents(where.asked, fingerprint, lambda scratch: splits)


def _texts(splits: Mapping[str, Dataset], text_column: str, asked: str) -> dict[str, Dataset]:
    """The text of the split to train on and of the one to hold out, if there is one, as column ``text``."""
    train, heldout = pick_splits(splits.keys(), asked)
    check_text_column(splits[train].features, text_column, asked)
    picked = {"train": splits[train], **{name: splits[name] for name in heldout}}
    texts = {name: split.select_columns(text_column) for name, split in picked.items()}
    return {name: split.rename_columns({text_column: "text"}) for name, split in texts.items()}
