"""Fewer documents than there are, and others to evaluate on: of stored documents, and of streams."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from datasets import Dataset

from trainer.cache import digest
from trainer.data.document_stream import DocumentStream
from trainer.data.documents import Documents
from trainer.data.shapes import Shape
from trainer.errors import UserError


def first_of(documents: Documents, most: int) -> Documents:
    """``documents`` with the first ``most`` of those to train on."""

    def read(scratch: Path) -> Mapping[str, Dataset]:
        train, *rest = documents.read(scratch).items()
        return {train[0]: train[1].select(range(min(most, len(train[1])))), **dict(rest)}

    return replace(documents, fingerprint=digest([documents.fingerprint, most]), read=read)


def first_of_stream(stream: DocumentStream, most: int) -> DocumentStream:
    """``stream`` with its first ``most`` documents, file after file, as one part."""

    def read(part: int, document: int) -> Iterator[tuple[str, str | None]]:
        return itertools.islice(stream.documents(), document, most)

    return replace(stream, identity=f"{stream.identity}, the first {most}", parts=1, read=read, names=())


def evaluated_on(documents: Documents, others: Documents) -> Documents:
    """``documents`` with all that ``others`` train on as the ones held out.

    Raises:
        UserError: they are of another shape.
    """
    _check_same(documents.shape, others.shape, others.asked)

    def read(scratch: Path) -> Mapping[str, Dataset]:
        train, held = (
            next(iter(each.read(scratch / name).values())) for name, each in (("train", documents), ("eval", others))
        )
        return {"train": train, "eval": held}

    return replace(documents, fingerprint=digest([documents.fingerprint, others.fingerprint, "eval"]), read=read)


def stream_evaluated_on(stream: DocumentStream, others: DocumentStream) -> DocumentStream:
    """``stream`` with ``others`` as the documents held out; raises as :func:`evaluated_on`."""
    _check_same(stream.shape, others.shape, others.asked)
    return replace(stream, identity=f"{stream.identity}, evaluated on {others.identity}", heldout=others)


def _check_same(shape: Shape, other: Shape, asked: str) -> None:
    if shape != other:
        raise UserError(
            asked=f"to evaluate on {asked}",
            found=f"its records are {other.name} ({', '.join(other.required)}), and those to train on {shape.name} "
            f"({', '.join(shape.required)})",
            why="both are made into rows in one way",
            instead="an --eval_dataset whose columns are those of --dataset",
        )
