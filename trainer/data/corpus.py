"""A dataset → its tokenizer, its rows to train on, stored or streamed, and its held-out rows. Pure CPU.

Everything is deterministic: the tokenizer, the rows, and their order in an epoch. What is slow to make is cached under
a key of all that it depends on: tokenizer and rows; of a stream the tokenizer alone.

Shape legend: S tokens in a row (``sequence_length``).
"""

from __future__ import annotations

import functools
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import tokenizers
import transformers
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from trainer.cache import cache_root, cached, digest
from trainer.data.chat import Template
from trainer.data.document_stream import find_stream
from trainer.data.documents import find_documents
from trainer.data.fitting import SampleOptions, SamplePacker
from trainer.data.heldout import SAMPLE_CHARACTERS, first_documents, heldout_of_stream, split_documents
from trainer.data.packing import CHARACTERS_AT_ONCE, DOCUMENTS_AT_ONCE, AnyPacker, Packer
from trainer.data.row_stream import StreamedRows
from trainer.data.rows import Rows, StoredRows, load_rows, write_rows
from trainer.data.selection import evaluated_on, first_of, first_of_stream, stream_evaluated_on
from trainer.data.shapes import Shape
from trainer.data.tally import notes
from trainer.data.tokenizer import check_tokenizer, check_vocabulary, tokenizer_fingerprint, trained_tokenizer
from trainer.errors import UserError

CACHE_FORMAT = 2  # part of every cache key: raise it when what is cached changes meaning


@dataclass(frozen=True)
class DataOptions:
    """Which text is trained on, and how it becomes rows.

    Args:
        dataset: a text, JSON-lines, Parquet, Arrow or CSV file, a folder of one of these kinds, or a hub id
            (``id:config`` where the dataset has several, ``id@commit`` for one that does not change). None: the source
            of this Python's standard library.
        sequence_length: S, tokens a row.
        text_column: where records keep their text; None: their columns say of what shape they are.
        isolate_documents: rows say which document each token belongs to. Samples that share rows need it.
        streaming: rows are made as training asks for them and never stored.
        shuffle_rows: rows of a stream that are mixed with one another; 2048 take 32 MiB at 4096 tokens a row.
        heldout_fraction: the share of the documents that is held out where the dataset has no validation or test split.
            A hash of a document's name (of a record: its text) decides, so that runs with other seeds are scored on the
            same tokens. Of a stream they are documents of the first 64 M characters, and fill 512 rows at most.
        eval_dataset: documents to hold out instead, of which none is trained on; as ``dataset``.
        max_samples: train on so many documents alone, the first; None: all. A share of them is held out where nothing
            else is.
        samples: how records of other shapes than text become rows, and texts that do not share any.
    """

    dataset: str | None
    sequence_length: int
    text_column: str | None = None
    isolate_documents: bool = False
    streaming: bool = False
    shuffle_rows: int = 2048
    heldout_fraction: float = 0.05
    eval_dataset: str | None = None
    max_samples: int | None = None
    samples: SampleOptions = SampleOptions()  # noqa: RUF009  (it is frozen)

    def makes_samples(self, shape: Shape) -> bool:
        """Whether records of ``shape`` become samples, each whole; texts are joined, and rows cut from them."""
        return not shape.is_text or not self.samples.packing


@dataclass(frozen=True)
class Corpus:
    """Packed rows and the tokenizer that made them.

    Each row has ``input_ids``, and with ``isolate_documents`` also ``segment_ids`` (1, 2, … in each row, 0 for padding)
    and ``position_ids`` (from 0 in each segment), all of them [S]. Rows of samples have ``labels`` too. ``notes`` are
    lines for a person: what was recognised, and what became of it.
    """

    train: Rows
    heldout: StoredRows
    tokenizer: PreTrainedTokenizerBase
    notes: tuple[str, ...] = ()

    def check_fits(self, length: int, vocab_size: int) -> None:
        """Refuse a corpus that a job with rows of ``length`` tokens and a vocabulary of ``vocab_size`` can't train on.

        Of rows that are stored the first is looked at.

        Raises:
            UserError: names both numbers.
        """
        check_vocabulary(self.tokenizer, vocab_size)
        for rows in (self.train, self.heldout):
            if isinstance(rows, StoredRows) and len(rows) and (found := len(rows.dataset[0]["input_ids"])) != length:
                raise UserError(
                    asked=f"a job with rows of {length} tokens",
                    found=f"a corpus with rows of {found}",
                    why="positions, slots of experts and memory were checked for the job's",
                    instead=f"sequence_length={found} in the job's arguments, or DataOptions(sequence_length={length})",
                )


def load_corpus(
    options: DataOptions,
    tokenizer: PreTrainedTokenizerBase | None,
    vocab_size: int,
    cache_dir: Path | None = None,
) -> Corpus:
    """Tokenised and packed rows: texts joined by the end-of-text token, cut every S tokens; or samples, whole.

    The tokenizer is checked before the dataset is looked for.

    Args:
        options: which text, and how it becomes rows.
        tokenizer: None: a byte-level BPE of ``vocab_size`` tokens is trained on the training documents.
        vocab_size: tokens that the model knows.
        cache_dir: None: $SHARDWRIGHT_CACHE, else $XDG_CACHE_HOME/shardwright, else ~/.cache/shardwright.

    Raises:
        UserError: the tokenizer has no end-of-text token or too many tokens, or ``vocab_size`` is too small to train
            one; there is no such dataset, or it is unreadable, empty, of mixed kinds, of no known shape, or too small
            to make a row on either side of the split; chats without a template; a bad row.
    """
    check_tokenizer(tokenizer, vocab_size)
    load = _streamed_corpus if options.streaming else _stored_corpus
    return load(options, tokenizer, vocab_size, cache_root(cache_dir))


def _stored_corpus(
    options: DataOptions, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, root: Path
) -> Corpus:
    """Tokenizer and rows from the cache, made if they are not there."""
    pairs = bool(options.samples.pairs)
    documents = find_documents(options.dataset, options.text_column, pairs)
    if options.max_samples is not None:
        documents = first_of(documents, options.max_samples)
    if options.eval_dataset is not None:
        documents = evaluated_on(documents, find_documents(options.eval_dataset, options.text_column, pairs))
    _check_samples(options, documents.shape, tokenizer)
    key = [CACHE_FORMAT, documents.fingerprint, options.heldout_fraction]
    with _no_progress_bars(), tempfile.TemporaryDirectory(dir=root, prefix="scratch-") as temporary:
        scratch = Path(temporary)

        @functools.cache  # the documents are read once, and only if something is not in the cache
        def split() -> dict[str, Dataset]:
            return split_documents(documents, scratch / "documents", options.heldout_fraction)

        if tokenizer is None:
            folder = root / "tokenizers" / digest([*key, vocab_size, tokenizers.__version__])
            tokenizer = trained_tokenizer(folder, scratch, lambda: _sample(split()["train"]), vocab_size)
        packing = _packing_key(options, documents.shape, tokenizer)
        new_packer = _packers(options, documents.shape, tokenizer)
        rows = cached(
            root / "rows" / digest([*key, *packing]),
            scratch,
            build=lambda folder: write_rows(split(), folder, new_packer, documents.asked),
            load=load_rows,
        )
    tally = sum((Counter(split.tally) for split in rows.values()), Counter())
    return Corpus(rows["train"], rows["heldout"], tokenizer, _notes(options, documents.shape, tally))


def _packers(options: DataOptions, shape: Shape, tokenizer: PreTrainedTokenizerBase) -> Callable[[], AnyPacker]:
    """Makes the packer of documents of ``shape``."""
    if not options.makes_samples(shape):
        return functools.partial(Packer, tokenizer, options.sequence_length, options.isolate_documents)

    def place_of(document: str) -> str:
        datasets = [options.dataset, *([options.eval_dataset] if options.eval_dataset else [])]
        found = (find_stream(each, options.text_column, shape.is_pair).place_of(document) for each in datasets)
        return next(filter(None, found), "a record")

    return functools.partial(
        SamplePacker,
        tokenizer,
        shape,
        options.sequence_length,
        options.samples,
        isolate=options.isolate_documents,
        place_of=place_of,
    )


def _packing_key(options: DataOptions, shape: Shape, tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    """What rows depend on besides the documents."""
    key: list[Any] = [tokenizer_fingerprint(tokenizer), options.sequence_length, options.isolate_documents]
    if options.makes_samples(shape):
        samples = options.samples
        key += [shape.name, tokenizer.chat_template, tokenizer.pad_token_id, transformers.__version__]
        key += [samples.train_on_prompt, samples.overflow, samples.packing, samples.on_bad_row, sorted(samples.stops)]
        key += [samples.pairs] if samples.pairs else []
    return key


def _check_samples(options: DataOptions, shape: Shape, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Refuse samples that can't be made, before more of them is read than their columns."""
    if not options.makes_samples(shape):
        return
    if tokenizer is None and not shape.is_text:
        raise UserError(
            asked=f"{options.dataset}: records of {shape.name}, without a tokenizer",
            found="one would have to be trained on them",
            why="one is trained on texts alone",
            instead="--tokenizer with a hub id or a folder, or a --model that brings its own",
        )
    if options.samples.packing and not options.isolate_documents:
        raise UserError(
            asked=f"{options.dataset}: samples of {shape.name} that share rows",
            found="isolate_documents=False",
            why="a sample would see the ones before it in its row",
            instead="isolate_documents=True, or SampleOptions(packing=False)",
        )
    if shape.is_chat and tokenizer is not None:
        Template(tokenizer, frozenset())


def _notes(options: DataOptions, shape: Shape, tally: Mapping[str, int]) -> tuple[str, ...]:
    if not options.makes_samples(shape):
        return ()
    trained = "every token" if options.samples.train_on_prompt else shape.trained
    words = f"records with {', '.join(shape.required)}; trained on: {trained}"
    return words, *notes(shape, tally, options.sequence_length)


def _sample(documents: Dataset) -> Iterator[str]:
    """Texts of documents drawn at random, about 64 M characters: a tokenizer learns no more from a larger text."""
    budget = SAMPLE_CHARACTERS
    for index in np.random.default_rng(0).permutation(len(documents)).tolist():
        if budget <= 0:
            return
        text = documents[index]["text"]
        budget -= len(text)
        yield text


def _streamed_corpus(
    options: DataOptions, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, root: Path
) -> Corpus:
    """Rows of a stream, of which nothing is written but a tokenizer that was trained on it."""
    pairs = bool(options.samples.pairs)
    stream = find_stream(options.dataset, options.text_column, pairs)
    if options.max_samples is not None:
        stream = first_of_stream(stream, options.max_samples)
    if options.eval_dataset is not None:
        stream = stream_evaluated_on(stream, find_stream(options.eval_dataset, options.text_column, pairs))
    _check_samples(options, stream.shape, tokenizer)
    fraction = 0.0 if stream.heldout else options.heldout_fraction
    if tokenizer is None:
        folder = root / "tokenizers" / digest([CACHE_FORMAT, stream.identity, fraction, vocab_size, "stream"])
        texts = (text for _, text, held in first_documents(stream, fraction) if not held)
        with tempfile.TemporaryDirectory(dir=root, prefix="scratch-") as scratch:
            tokenizer = trained_tokenizer(folder, Path(scratch), lambda: texts, vocab_size)
    new_packer = _packers(options, stream.shape, tokenizer)
    heldout, left_out = heldout_of_stream(stream, new_packer(), fraction)
    first, length, _, *samples = _packing_key(options, stream.shape, tokenizer)
    packing = [first, length, new_packer().columns, *samples]
    # the last two: a place in a stream counts rows of documents that were packed together
    key = [CACHE_FORMAT, *packing, options.shuffle_rows, sorted(left_out), DOCUMENTS_AT_ONCE, CHARACTERS_AT_ONCE]
    fingerprint = f"{stream.identity}, rows {digest(key)[:8]}"
    rows = StreamedRows(stream, new_packer, left_out, options.shuffle_rows, fingerprint)
    return Corpus(rows, heldout, tokenizer, _notes(options, stream.shape, heldout.tally))


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Switches off the bars of `datasets`, which flash by for small data and break the console's own live line."""
    # semi-private, one switch for the whole process: datasets/utils/tqdm.py, datasets 5.2
    if datasets.are_progress_bars_disabled():
        yield
        return
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()
