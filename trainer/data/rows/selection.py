"""Derived documents, stored or streamed: the first few only, or with others to evaluate on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from datasets import Dataset

from shardwright.data.records.document_stream import DocumentStream
from shardwright.data.records.documents import Documents
from shardwright.errors import UserError
from shardwright.files.cache import digest
from shardwright.objectives.objective import RecordShape

HELDOUT = "heldout"


def first_of(documents: Documents, most: int) -> Documents:
    """``documents`` with only the first ``most`` to train on."""

    def read(scratch: Path) -> Mapping[str, Dataset]:
        train, *rest = documents.read(scratch).items()
        return {train[0]: train[1].select(range(min(most, len(train[1])))), **dict(rest)}

    return replace(documents, fingerprint=digest([documents.fingerprint, most]), read=read)


def first_of_stream(stream: DocumentStream, most: int) -> DocumentStream:
    """The first ``most`` documents of ``stream``, file after file, as one part."""

    def read(part: int, document: int) -> Iterator[tuple[str, str | None]]:
        return itertools.islice(stream.documents(), document, most)

    return replace(stream, identity=f"{stream.identity}, the first {most}", parts=1, read=read, sizes={})


def evaluated_on(documents: Documents, others: Mapping[str, Documents]) -> Documents:
    """``documents`` with the training split of each of ``others`` held out, under its :func:`split_name`.

    Raises UserError if they are of another shape.
    """
    for other in others.values():
        _check_same(documents.shape, other.shape, other.asked)
    sets = {"train": documents, **{split_name(name): each for name, each in others.items()}}

    def read(scratch: Path) -> Mapping[str, Dataset]:
        return {name: next(iter(each.read(scratch / name).values())) for name, each in sets.items()}

    key = [documents.fingerprint, *((name, each.fingerprint) for name, each in others.items()), "eval"]
    return replace(documents, fingerprint=digest(key), read=read)


def split_name(name: str) -> str:
    """The split of the held-out set ``name``, which is empty for an unnamed one."""
    return f"{HELDOUT}-{name}" if name else HELDOUT


def stream_evaluated_on(stream: DocumentStream, others: DocumentStream) -> DocumentStream:
    """``stream`` with ``others`` as the documents held out; raises as :func:`evaluated_on`."""
    _check_same(stream.shape, others.shape, others.asked)
    return replace(stream, identity=f"{stream.identity}, evaluated on {others.identity}", heldout=others)


def _check_same(shape: RecordShape, other: RecordShape, asked: str) -> None:
    if shape != other:
        raise UserError(
            asked=f"to evaluate on {asked}",
            found=f"its records are {other.name} ({', '.join(other.required)}), and those to train on {shape.name} "
            f"({', '.join(shape.required)})",
            why="both are made into rows in one way",
            instead="an --eval_dataset whose columns are those of --dataset",
        )
