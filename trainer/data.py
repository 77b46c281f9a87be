"""A dataset → its tokenizer, its rows to train on, stored or streamed, and its held-out rows. Pure CPU.

Everything is deterministic: the tokenizer, the rows, and their order in an epoch. What is slow is cached under a key of
all that it depends on; of a stream that is its tokenizer alone.

Shape legend: S tokens in a row (``sequence_length``).
"""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import datasets
import numpy as np
import tokenizers
from datasets import Dataset, Features, List, Value
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from trainer.batches import IGNORE, TrainingBatches, as_batch, heldout_batches
from trainer.cache import cache_root
from trainer.documents import digest, find_source, has_text, key_hash, split_documents
from trainer.errors import UserError
from trainer.packing import Packer, as_table
from trainer.streaming import CHARACTERS_AT_ONCE, DOCUMENTS_AT_ONCE, RowStream
from trainer.streams import Stream, find_stream

__all__ = ["Corpus", "TrainingBatches", "heldout_batches", "load_corpus", "unigram_loss"]

T = TypeVar("T")

END_OF_TEXT = "<|endoftext|>"
CACHE_FORMAT = 1  # part of every cache key: raise it when what is cached changes meaning
SAMPLE_CHARACTERS = 64 << 20  # a sample of this size is as good as all of a larger text to learn merges from
SHUFFLE_ROWS = 2048  # 32 MiB at 4096 tokens a row
HELDOUT_ROWS = 512  # of a stream
UNIGRAM_ROWS = 1024  # of a stream


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
    source = find_source(dataset, text_column)
    key = [CACHE_FORMAT, source.fingerprint, heldout_fraction]
    with _no_progress_bars(), tempfile.TemporaryDirectory(dir=root, prefix="scratch-") as temporary:
        scratch = Path(temporary)
        # documents are read only if something is not cached, and once
        split = functools.cache(lambda: split_documents(source, scratch / "documents", heldout_fraction))
        if tokenizer is None:
            _check_vocab_size(vocab_size)
            tokenizer = _cached(
                root / "tokenizers" / digest([*key, vocab_size, tokenizers.__version__]),
                scratch,
                build=lambda folder: _write_tokenizer(folder, _sample(split()["train"]), vocab_size),
                load=_load_tokenizer,
            )
        _check_end_of_text(tokenizer)
        packer = functools.partial(Packer, tokenizer, sequence_length, isolate_documents)
        rows = _cached(
            root / "rows" / digest([*key, _fingerprint(tokenizer), sequence_length, isolate_documents]),
            scratch,
            build=lambda folder: _write_rows(split(), folder, packer, source.asked),
            load=_load_rows,
        )
    train = rows["train"]
    if max_train_tokens is not None and max_train_tokens // sequence_length < len(train):
        drawn = np.random.default_rng(seed).permutation(len(train))[: max_train_tokens // sequence_length]
        train = train.select(np.sort(drawn))
    return Corpus(train, rows["heldout"], tokenizer)


# ---- tokens ----


def _check_vocab_size(vocab_size: int) -> None:
    least = len(pre_tokenizers.ByteLevel.alphabet()) + 1
    if vocab_size < least:
        raise UserError(
            asked=f"a tokenizer of {vocab_size} tokens",
            found=f"{least - 1} bytes and the end-of-text token, {least} tokens before any is learnt",
            why="a byte without a token could not be written",
            instead=f"a model whose vocab_size is at least {least}, or its own tokenizer with --tokenizer",
        )


def _check_end_of_text(tokenizer: PreTrainedTokenizerBase) -> None:
    if tokenizer.eos_token_id is None:
        raise UserError(
            asked=f"the tokenizer {tokenizer.name_or_path or type(tokenizer).__name__}",
            found="it has no end-of-text token (eos_token)",
            why="packed documents are joined by it; without it the model never learns where a text ends",
            instead="set eos_token in its tokenizer_config.json, or leave --tokenizer out to train one",
        )


def _sample(documents: Dataset) -> Iterator[str]:
    budget = SAMPLE_CHARACTERS
    for index in np.random.default_rng(0).permutation(len(documents)).tolist():
        if budget <= 0:
            return
        text = documents[index]["text"]
        budget -= len(text)
        yield text


def _write_tokenizer(folder: Path, texts: Iterable[str], vocab_size: int) -> None:
    """A byte-level BPE (Sennrich et al. 2016, as in GPT-2) of at most ``vocab_size`` tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.save(str(folder / "tokenizer.json"))


def _load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )


def _fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = backend.to_str() if backend is not None else datasets.fingerprint.Hasher.hash(tokenizer)
    return digest([content, tokenizer.eos_token_id])


# ---- rows ----


def _write_rows(splits: Mapping[str, Dataset], folder: Path, new_packer: Callable[[], Packer], asked: str) -> None:
    """Write the rows of each split to ``folder``, and last how many they are."""
    counts = {}
    for name, documents in splits.items():
        packer = new_packer()
        packed = documents.map(
            packer,
            batched=True,
            batch_size=DOCUMENTS_AT_ONCE,
            features=Features({column: List(Value("int32"), length=packer.length) for column in packer.columns}),
            cache_file_name=str(folder / f"{name}.arrow"),
            new_fingerprint=digest([folder.name, name]),
        )
        counts[name] = len(packed)
        if not counts[name]:
            raise UserError(
                asked=f"{asked} in rows of {packer.length} tokens",
                found=f"{len(documents)} {name} documents of {len(packer.rest)} tokens in all",
                why="they don't fill one row",
                instead="a larger dataset, or a shorter --sequence_length",
            )
    (folder / "rows.json").write_text(json.dumps(counts))


def _load_rows(folder: Path) -> dict[str, Dataset]:
    counts = json.loads((folder / "rows.json").read_text())
    rows = {name: Dataset.from_file(str(folder / f"{name}.arrow")) for name in counts}
    if counts != {name: len(split) for name, split in rows.items()}:
        raise ValueError(f"rows are missing from {folder}")
    return rows


# ---- streams ----


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
        _check_vocab_size(vocab_size)
        texts = (text for _, text, held in _first_documents(stream, fraction) if not held)
        with tempfile.TemporaryDirectory(dir=root, prefix="scratch-") as scratch:
            tokenizer = _cached(
                root / "tokenizers" / digest([CACHE_FORMAT, stream.identity, fraction, vocab_size, "stream"]),
                Path(scratch),
                build=lambda folder: _write_tokenizer(folder, texts, vocab_size),
                load=_load_tokenizer,
            )
    _check_end_of_text(tokenizer)
    new_packer = functools.partial(packer, tokenizer)
    heldout, left_out = _heldout_of_stream(stream, new_packer(), fraction)
    rows = [_fingerprint(tokenizer), new_packer().length, new_packer().columns, shuffle_rows, sorted(left_out)]
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


# ---- unigram ----


def unigram_loss(train: Dataset | RowStream, heldout: Dataset, vocab_size: int) -> float:
    """Cross entropy, in nats a token, of held-out targets under add-one-smoothed counts of the training tokens.

    Of a stream the first 1024 rows are counted. The targets are those that a model is scored on: all tokens of a row
    but the first, and with isolated documents no document's first. What a model gains over this it owes to context.
    """
    counts, targets = np.zeros(vocab_size), np.zeros(vocab_size)
    counted = [train.first(UNIGRAM_ROWS)] if isinstance(train, RowStream) else train.with_format("numpy").iter(1024)
    for batch in counted:
        counts += np.bincount(batch["input_ids"].ravel(), minlength=vocab_size)
    for batch in heldout.with_format("numpy").iter(1024):
        labels = as_batch(batch)["labels"][:, 1:].numpy()
        targets += np.bincount(labels[labels != IGNORE], minlength=vocab_size)
    log_probabilities = np.log(counts + 1) - np.log(counts.sum() + vocab_size)
    return float(-(targets * log_probabilities).sum() / targets.sum())


# ---- cache ----


def _cached(folder: Path, scratch: Path, *, build: Callable[[Path], None], load: Callable[[Path], T]) -> T:
    """What ``load`` makes of ``folder``; if it can't, ``build`` makes the folder anew, and it appears in one piece."""
    try:
        return load(folder)
    except Exception:  # absent or corrupt, of as many types as there are file formats
        shutil.rmtree(folder, ignore_errors=True)
    made = scratch / folder.name
    made.mkdir()
    build(made)
    folder.parent.mkdir(exist_ok=True)
    try:
        made.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another process was faster; what it made is the same
            raise
    return load(folder)


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
