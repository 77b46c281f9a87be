"""The choice of held-out documents: those of the dataset's own split, else those with the lowest hashes.

A document's hash is that of its name (a record's: of its text), so that no seed changes the choice, and equal texts lie
on the same side.

Shape legend: D documents.
"""

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from datasets import Dataset

from shardwright.data.records.document_stream import DocumentStream, has_text, key_hash
from shardwright.data.rows.packing import DOCUMENTS_AT_ONCE, AnyPacker, as_table
from shardwright.data.rows.rows import StoredRows
from shardwright.errors import UserError

TRAIN, HELDOUT = "train", "heldout"  # names of splits
# characters of text read to hold out documents of a stream, and to train a tokenizer
SAMPLE_CHARACTERS = 64 << 20
HELDOUT_ROWS = 512  # most held-out rows of a stream


def split_documents(documents: DocumentStream, scratch: Path, heldout_fraction: float) -> dict[str, Dataset]:
    """Reads ``documents``; returns those with text as ``train``, and as ``heldout``, or ``heldout-NAME`` of each set.

    They may lie in the folder ``scratch``, which must outlive them. ``heldout_fraction`` is the share that is held out
    if nothing else is, 0 for none; a single text is on both sides. Raises UserError if no document has text in it, or
    they can't be read.
    """
    train = documents.stored(scratch / TRAIN)
    names = {f"{HELDOUT}-{name}" if name else HELDOUT: each for name, each in documents.heldout.items()}
    given = {name: each.stored(scratch / name) for name, each in names.items()}
    named = "name" if "name" in train.column_names else "text"
    hashes = (
        key_hash(name) if has_text(text) else -1
        for batch in train.iter(1024)
        for name, text in zip(batch[named], batch["text"], strict=True)
    )
    hashes_D = np.fromiter(hashes, dtype=np.int64, count=len(train))
    filled_D = hashes_D >= 0
    distinct = np.unique(hashes_D[filled_D])
    if not len(distinct):
        raise UserError(
            asked=documents.asked,
            found="0 documents with text in it",
            why="there is nothing to train on",
            instead="a dataset with more documents",
        )
    if not given and heldout_fraction and len(distinct) == 1:
        given = {HELDOUT: train.select(np.flatnonzero(filled_D))}  # to be learned by heart
    elif not given and heldout_fraction:
        heldout_D = filled_D & (hashes_D <= distinct[math.ceil(heldout_fraction * len(distinct)) - 1])
        given = {HELDOUT: train.select(np.flatnonzero(heldout_D))}
        filled_D &= ~heldout_D
    return {TRAIN: train.select(np.flatnonzero(filled_D)), **given}


def first_documents(stream: DocumentStream, heldout_fraction: float) -> Iterator[tuple[int, str, bool]]:
    """(hash, text, whether it is held out) of each document with text in the stream's first 64 M characters."""
    budget = SAMPLE_CHARACTERS
    for key, text in stream.documents():
        if text and has_text(text):
            number = key_hash(key)
            yield number, text, number < heldout_fraction * 2**63
            budget -= len(text)
        if budget <= 0:
            return


def heldout_of_stream(
    stream: DocumentStream, packer: AnyPacker, heldout_fraction: float
) -> tuple[StoredRows, frozenset[int]]:
    """At most 512 rows of a share of a stream, and the hashes of their documents, to leave out of training.

    Raises UserError if they don't fill one row.
    """
    pieces, count = [packer.rows([])], 0
    hashes: set[int] = set()
    at_once = 1 if packer.groups == 1 else DOCUMENTS_AT_ONCE  # samples that share rows must come together
    held_out = ((number, text) for number, text, held in first_documents(stream, heldout_fraction) if held)
    while count < HELDOUT_ROWS and (group := list(itertools.islice(held_out, at_once))):
        hashes.update(number for number, _ in group)
        pieces.append(packer.rows([text for _, text in group]))
        count += len(pieces[-1]["input_ids"])
    if not count:
        raise UserError(
            asked=f"held-out rows of {packer.length} tokens from the stream {stream.asked}",
            found=f"{len(hashes)} documents to hold out, of {len(packer.rest)} tokens in all",
            why="they don't fill one row; of a stream, a hash of each document decides",
            instead="--eval_dataset with data of their own; more data, a shorter --sequence_length, or no --streaming, "
            "which holds out a share of what there is",
        )
    rows = {name: np.concatenate([piece[name] for piece in pieces])[:HELDOUT_ROWS] for name in packer.columns}
    return StoredRows(Dataset(as_table(rows)), packer.tally), frozenset(hashes)
