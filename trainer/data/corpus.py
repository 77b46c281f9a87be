"""A dataset → its tokenizer, its rows to train on, stored or streamed, and its held-out rows. Pure CPU.

Everything is deterministic: the tokenizer, the rows, and their order in an epoch. What is slow is cached under a key of
all that it depends on; of a stream that is its tokenizer alone.

Shape legend: S tokens in a row (``sequence_length``).
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import datasets
import numpy as np
import tokenizers
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from trainer.cache import cache_root, cached, digest
from trainer.data.batches import TrainingBatches, heldout_batches
from trainer.data.document_stream import Stream, find_stream
from trainer.data.documents import find_documents, has_text, key_hash, split_documents
from trainer.data.packing import Packer, as_table
from trainer.data.row_stream import CHARACTERS_AT_ONCE, DOCUMENTS_AT_ONCE, RowStream
from trainer.data.rows import load_rows, write_rows
from trainer.data.tokenizer import (
    check_end_of_text,
    check_vocab_size,
    load_tokenizer,
    tokenizer_fingerprint,
    write_tokenizer,
)
from trainer.data.unigram import unigram_loss
from trainer.errors import UserError

__all__ = ["Corpus", "TrainingBatches", "heldout_batches", "load_corpus", "unigram_loss"]
CACHE_FORMAT = 1  # part of every cache key: raise it when what is cached changes meaning
SAMPLE_CHARACTERS = 64 << 20  # a sample of this size is as good as all of a larger text to learn merges from
SHUFFLE_ROWS = 2048  # 32 MiB at 4096 tokens a row
HELDOUT_ROWS = 512  # of a stream


@dataclass(frozen=True)
class Corpus:
    """Packed rows and the tokenizer that made them.

    Rows are ``{"input_ids": [S]}``, and with ``isolate_documents`` also ``segment_ids`` (1, 2, … in each row) and
    ``position_ids`` (from 0 in each segment), all of them [S].
    """

    train: Dataset | RowStream
    heldout: Dataset
    tokenizer: PreTrainedTokenizerBase


def load_corpus(
    dataset: str | None,
    *,
    tokenizer: PreTrainedTokenizerBase | None,
    sequence_length: int,
    vocab_size: int = 2048,
    isolate_documents: bool = False,
    text_column: str = "text",
    heldout_fraction: float = 0.05,
    seed: int = 0,
    max_train_tokens: int | None = None,
    streaming: bool = False,
    shuffle_rows: int = SHUFFLE_ROWS,
    cache_dir: Path | None = None,
) -> Corpus:
    """Tokenised and packed rows of ``dataset``: documents joined by the end-of-text token, cut every S tokens.

    Args:
        dataset: a text, JSON-lines or Parquet file, a folder of one of these kinds, or a hub id (``id:config`` where
            the dataset has several, ``id@commit`` for one that does not change). Default:
            the source of this Python's standard library.
        tokenizer: default: a byte-level BPE of ``vocab_size`` tokens, trained on the training documents.
        sequence_length: S, tokens a row.
        isolate_documents: rows say which document each token belongs to.
        text_column: where JSON-lines, Parquet and hub datasets keep their text.
        heldout_fraction: of the documents, where the dataset has no validation or test split. Which ones depends on
            their names (of records: their text) alone, so that runs with other seeds are scored on the same tokens.
        seed: draws the rows that ``max_train_tokens`` leaves.
        max_train_tokens: train on at most so many tokens; not of a stream.
        streaming: rows are made as training asks for them and never stored. Held out are then documents whose hash
            says so among the first 64 M characters, 512 rows at most, wherever they come again.
        shuffle_rows: rows of a stream that are mixed with one another.
        cache_dir: default: $SHARDWRIGHT_CACHE, else $XDG_CACHE_HOME/shardwright, else ~/.cache/shardwright.

    Raises:
        UserError: no such dataset, or an unreadable or empty one, or one of mixed kinds, without a column of text or
            too small to make a row on either side of the split; a tokenizer without an end-of-text token.
    """
    root = cache_root(cache_dir)
    if streaming and max_train_tokens is not None:
        raise UserError(
            asked=f"a stream of at most {max_train_tokens} tokens",
            found="a stream, of which no rows are known to draw from",
            why="the rows that are left are drawn from all of them",
            instead="fewer steps",
        )
    if streaming:
        return _stream_corpus(
            find_stream(dataset, text_column),
            root,
            tokenizer,
            functools.partial(Packer, sequence_length=sequence_length, isolate_documents=isolate_documents),
            vocab_size=vocab_size,
            heldout_fraction=heldout_fraction,
            shuffle_rows=shuffle_rows,
        )
    source = find_documents(dataset, text_column)
    key = [CACHE_FORMAT, source.fingerprint, heldout_fraction]
    with _no_progress_bars(), tempfile.TemporaryDirectory(dir=root, prefix="scratch-") as temporary:
        scratch = Path(temporary)
        # documents are read only if something is not cached, and once
        split = functools.cache(lambda: split_documents(source, scratch / "documents", heldout_fraction))
        if tokenizer is None:
            check_vocab_size(vocab_size)
            tokenizer = cached(
                root / "tokenizers" / digest([*key, vocab_size, tokenizers.__version__]),
                scratch,
                build=lambda folder: write_tokenizer(folder, _sample(split()["train"]), vocab_size),
                load=load_tokenizer,
            )
        check_end_of_text(tokenizer)
        packer = functools.partial(Packer, tokenizer, sequence_length, isolate_documents)
        rows = cached(
            root / "rows" / digest([*key, tokenizer_fingerprint(tokenizer), sequence_length, isolate_documents]),
            scratch,
            build=lambda folder: write_rows(split(), folder, packer, source.asked),
            load=load_rows,
        )
    train = rows["train"]
    if max_train_tokens is not None and max_train_tokens // sequence_length < len(train):
        drawn = np.random.default_rng(seed).permutation(len(train))[: max_train_tokens // sequence_length]
        train = train.select(np.sort(drawn))
    return Corpus(train, rows["heldout"], tokenizer)


def _sample(documents: Dataset) -> Iterator[str]:
    budget = SAMPLE_CHARACTERS
    for index in np.random.default_rng(0).permutation(len(documents)).tolist():
        if budget <= 0:
            return
        text = documents[index]["text"]
        budget -= len(text)
        yield text


def _stream_corpus(
    stream: Stream,
    root: Path,
    tokenizer: PreTrainedTokenizerBase | None,
    packer: Callable[[PreTrainedTokenizerBase], Packer],
    *,
    vocab_size: int,
    heldout_fraction: float,
    shuffle_rows: int,
) -> Corpus:
    """Nothing of it is written but a tokenizer that was trained on it."""
    fraction = 0.0 if stream.heldout else heldout_fraction
    if tokenizer is None:
        check_vocab_size(vocab_size)
        texts = (text for _, text, held in _first_documents(stream, fraction) if not held)
        with tempfile.TemporaryDirectory(dir=root, prefix="scratch-") as scratch:
            tokenizer = cached(
                root / "tokenizers" / digest([CACHE_FORMAT, stream.identity, fraction, vocab_size, "stream"]),
                Path(scratch),
                build=lambda folder: write_tokenizer(folder, texts, vocab_size),
                load=load_tokenizer,
            )
    check_end_of_text(tokenizer)
    new_packer = functools.partial(packer, tokenizer)
    heldout, left_out = _heldout_of_stream(stream, new_packer(), fraction)
    rows = [tokenizer_fingerprint(tokenizer), new_packer().length, new_packer().columns, shuffle_rows, sorted(left_out)]
    # the last two: a place in a stream counts rows of documents that were packed together
    made = digest([CACHE_FORMAT, *rows, DOCUMENTS_AT_ONCE, CHARACTERS_AT_ONCE])
    train = RowStream(stream, new_packer, left_out, shuffle_rows, f"{stream.identity}, rows {made[:8]}")
    return Corpus(train, heldout, tokenizer)


def _first_documents(stream: Stream, heldout_fraction: float) -> Iterator[tuple[int, str, bool]]:
    """(hash, text, whether the hash is one to hold out) of the documents of the first 64 M characters."""
    budget = SAMPLE_CHARACTERS
    for key, text in stream.documents():
        if text and has_text(text):
            number = key_hash(key)
            yield number, text, number < heldout_fraction * 2**63
            budget -= len(text)
        if budget <= 0:
            return


def _heldout_of_stream(stream: Stream, packer: Packer, heldout_fraction: float) -> tuple[Dataset, frozenset[int]]:
    """512 rows at most, and the hashes of their documents, none of which may be trained on."""
    given = stream.heldout
    documents = _first_documents(given, 1.0) if given else _first_documents(stream, heldout_fraction)
    pieces, count, hashes = [packer.rows([])], 0, set()
    for number, text, held in documents:
        if held:
            hashes.add(number)
            pieces.append(packer.rows([text]))
            count += len(pieces[-1]["input_ids"])
        if count >= HELDOUT_ROWS:
            break
    if not count:
        raise UserError(
            asked=f"held-out rows of {packer.length} tokens from the stream {stream.asked}",
            found=f"{len(hashes)} documents to hold out, of {len(packer.rest)} tokens in all",
            why="they don't fill one row; of a stream, a hash of each document decides",
            instead="more data, a shorter --sequence_length, or no --streaming: it holds out a share of what there is",
        )
    rows = {name: np.concatenate([piece[name] for piece in pieces])[:HELDOUT_ROWS] for name in packer.columns}
    return Dataset(as_table(rows)), frozenset() if given else frozenset(hashes)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """`datasets` without its bars, which flash by for small data and break the console's own live line."""
    if datasets.are_progress_bars_disabled():
        yield
        return
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()
