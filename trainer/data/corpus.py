"""A dataset → its tokenizer, its rows to train on, stored or streamed, and its held-out rows. Pure CPU.

Everything is deterministic: the tokenizer, the rows, and their order in an epoch. Tokenizer and rows (for a stream only
the tokenizer) are cached under a key of all that they depend on.

Shape legend: S tokens in a row (``sequence_length``).
"""

from __future__ import annotations

import functools
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import datasets
import numpy as np
import tokenizers
import transformers
from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase

from shardwright.data.records.document_stream import find_stream
from shardwright.data.records.documents import find_documents
from shardwright.data.rows.heldout_rows import SAMPLE_CHARACTERS, first_documents, heldout_of_stream, split_documents
from shardwright.data.rows.mixture import MixedRows, mixture_notes, no_tokenizer, shapes_of, shares, sources_of
from shardwright.data.rows.packing import CHARACTERS_AT_ONCE, DOCUMENTS_AT_ONCE, AnyPacker, Packer
from shardwright.data.rows.row_stream import StreamedRows
from shardwright.data.rows.rows import Rows, StoredRows, load_rows, write_rows
from shardwright.data.rows.selection import evaluated_on, first_of, first_of_stream, stream_evaluated_on
from shardwright.data.samples.chat import Template
from shardwright.data.samples.fitting import SampleOptions, SamplePacker
from shardwright.data.samples.tally import notes, unread_notes
from shardwright.data.tokenizer import check_tokenizer, check_vocabulary, tokenizer_fingerprint, trained_tokenizer
from shardwright.errors import UserError
from shardwright.files.cache import cache_root, cached, digest
from shardwright.objectives.objective import RecordShape
from shardwright.objectives.sft import SHAPES

Found = TypeVar("Found")
CACHE_FORMAT = 2  # part of every cache key: raise it when cached data changes meaning


@dataclass(frozen=True)
class DataOptions:
    """The text to train on, and how it becomes rows.

    Args:
        dataset: a text, JSON-lines, Parquet, Arrow or CSV file, a folder of one of these kinds, or a hub id
            (``id:config`` where the dataset has several, ``id@commit`` for one that does not change); or several, each
            with its share of the rows: ``a.jsonl:0.7,b.jsonl:0.3``; or records of the library `datasets`, stored or
            streamed. None: the source of this Python's standard library.
        sequence_length: S, tokens a row.
        reads: the shapes that records may have, in the order in which they are tried.
        isolate_documents: rows say which document each token belongs to. Samples that share rows need it.
        streaming: rows are made as training asks for them and never stored.
        shuffle_rows: size of a stream's shuffle buffer in rows; 2048 take 32 MiB at 4096 tokens a row.
        heldout_fraction: the share of the documents that is held out if the dataset has no validation or test split.
            A hash of a document's name (of a record's text) decides, so that runs with other seeds are scored on the
            same tokens. A stream's lie in its first 64 M characters and fill 512 rows at most.
        eval_dataset: set name → documents to hold out instead, none of them trained on, each as ``dataset``. An unnamed
            set has the empty name.
        max_samples: train on the first so many documents; None: all. A share of them is held out if nothing else is.
        samples: how unpacked texts and records of other shapes become rows, and the policy for unreadable rows.
        labels: rows of text get labels too, to be mixed with rows of samples.
    """

    dataset: str | Dataset | IterableDataset | None
    sequence_length: int
    reads: Sequence[RecordShape] = SHAPES
    isolate_documents: bool = False
    streaming: bool = False
    shuffle_rows: int = 2048
    heldout_fraction: float = 0.05
    eval_dataset: Mapping[str, str | Dataset | IterableDataset] = field(default_factory=dict)
    max_samples: int | None = None
    samples: SampleOptions = SampleOptions()  # noqa: RUF009  (it is frozen)
    labels: bool = False

    def makes_samples(self, shape: RecordShape) -> bool:
        """Whether each record of ``shape`` becomes a whole sample; otherwise texts are joined and cut into rows."""
        return not shape.is_text or not self.samples.packing


@dataclass(frozen=True)
class Corpus:
    """Packed rows and the tokenizer that made them.

    Each row has ``input_ids``, and with ``isolate_documents`` also ``segment_ids`` (1, 2, … in each row, 0 for padding)
    and ``position_ids`` (from 0 in each segment), all of them [S]. Rows of samples have ``labels`` too. ``notes`` tell
    a person what was recognised and what became of it.

    ``named`` has the held-out rows of each named set; ``heldout`` is then the first of them.
    """

    train: Rows
    heldout: StoredRows
    tokenizer: PreTrainedTokenizerBase
    notes: tuple[str, ...] = ()
    named: Mapping[str, StoredRows] = field(default_factory=dict)

    @property
    def heldout_sets(self) -> Mapping[str, StoredRows]:
        """Set name → held-out rows; the name of an only set is empty."""
        return self.named or {"": self.heldout}

    def check_fits(self, length: int, vocab_size: int) -> None:
        """Refuse a corpus that a job with rows of ``length`` tokens and a vocabulary of ``vocab_size`` can't train on.

        Raises:
            UserError: names both numbers; the first stored row shows the corpus's length.
        """
        check_vocabulary(self.tokenizer, vocab_size)
        mixed = self.train.sources if isinstance(self.train, MixedRows) else [self.train]
        for rows in (*mixed, *self.heldout_sets.values()):
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
    """Tokenised and packed rows: texts joined by the end-of-text token and cut every S tokens, or whole samples.

    The tokenizer is checked before the dataset is searched for.

    Args:
        tokenizer: None: a byte-level BPE of ``vocab_size`` tokens is trained on the training documents.
        vocab_size: tokens that the model knows.
        cache_dir: None: $SHARDWRIGHT_CACHE, else $XDG_CACHE_HOME/shardwright, else ~/.cache/shardwright.

    Raises:
        UserError: the tokenizer has no end-of-text token or too many tokens, or ``vocab_size`` is too small to train
            one; there is no such dataset, or it is unreadable, empty, of mixed kinds, of no known shape, or too small
            to make a row on either side of the split; chats without a template; a bad row.
    """
    check_tokenizer(tokenizer, vocab_size)
    sources, root = sources_of(options.dataset), cache_root(cache_dir)
    load = _streamed_corpus if options.streaming else _stored_corpus
    if len(sources) == 1:
        return load(options, tokenizer, vocab_size, root)
    if tokenizer is None:
        raise no_tokenizer(options.dataset)
    shapes = shapes_of(options.dataset, options.reads)
    labels = any(map(options.makes_samples, shapes))
    corpora = [
        load(replace(options, dataset=source.dataset, labels=labels), tokenizer, vocab_size, root) for source in sources
    ]
    train = MixedRows([corpus.train for corpus in corpora], shares([source.weight for source in sources]))
    held = [corpus.heldout for corpus in (corpora[:1] if options.eval_dataset else corpora)]
    heldout = StoredRows(datasets.concatenate_datasets([rows.dataset for rows in held]))
    notes = mixture_notes(sources, train, [corpus.notes for corpus in corpora])
    return Corpus(train, heldout, tokenizer, notes, corpora[0].named)


def _stored_corpus(
    options: DataOptions, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, root: Path
) -> Corpus:
    find = _finder(find_documents, options)
    found, others = find(options.dataset), {name: find(each) for name, each in options.eval_dataset.items()}
    documents = found if options.max_samples is None else first_of(found, options.max_samples)
    if others:
        documents = evaluated_on(documents, others)
    check_samples(options, documents.shape, tokenizer)
    key = [CACHE_FORMAT, documents.fingerprint, options.heldout_fraction]
    with _no_progress_bars(), tempfile.TemporaryDirectory(dir=root, prefix="scratch-") as temporary:
        scratch = Path(temporary)

        @functools.cache  # the documents are read once, and only if something is not in the cache
        def split() -> dict[str, Dataset]:
            return split_documents(documents, scratch / "documents", options.heldout_fraction)

        if tokenizer is None:
            folder = root / "tokenizers" / digest([*key, vocab_size, tokenizers.__version__])
            tokenizer = trained_tokenizer(folder, scratch, lambda: _sample(split()["train"]), vocab_size)

        def unread() -> Counter[str]:
            return sum((each.unread.tally for each in (found, *others.values())), Counter())

        packing = _packing_key(options, documents.shape, tokenizer)
        new_packer = _packers(options, documents.shape, tokenizer)
        rows = cached(
            root / "rows" / digest([*key, *packing]),
            scratch,
            build=lambda folder: write_rows(split(), folder, new_packer, documents.asked, unread),
            load=load_rows,
        )
    tally = sum((Counter(split.tally) for split in rows.values()), Counter())
    train, *held = rows.values()
    return Corpus(train, held[0], tokenizer, _notes(options, documents.shape, tally), _named(options, held))


def _finder(find: Callable[..., Found], options: DataOptions) -> Callable[[Any], Found]:
    """``find`` as a function of the dataset alone, its other arguments taken from ``options``."""
    return functools.partial(find, reads=options.reads, on_bad_row=options.samples.on_bad_row)


def _named(options: DataOptions, held: Sequence[StoredRows]) -> dict[str, StoredRows]:
    return {name: rows for name, rows in zip(options.eval_dataset, held, strict=False) if name}


def load_rows_of(
    dataset: str | Dataset | IterableDataset, options: DataOptions, tokenizer: PreTrainedTokenizerBase
) -> StoredRows:
    """Rows of a dataset given to ``evaluate``: all of it, in order, one sample a row.

    ``options`` are the corpus's. Raises as :func:`load_corpus`.
    """
    options = replace(options, dataset=dataset, eval_dataset={}, samples=replace(options.samples, packing=False))
    documents = _finder(find_documents, options)(dataset)
    check_samples(options, documents.shape, tokenizer)
    packing = _packing_key(options, documents.shape, tokenizer)
    new_packer = _packers(options, documents.shape, tokenizer)
    root = cache_root(None)
    with _no_progress_bars(), tempfile.TemporaryDirectory(dir=root, prefix="scratch-") as temporary:
        scratch = Path(temporary)
        rows = cached(
            root / "rows" / digest([CACHE_FORMAT, documents.fingerprint, "alone", *packing]),
            scratch,
            build=lambda folder: write_rows(
                {"test": next(iter(documents.read(scratch / "documents").values()))},
                folder,
                new_packer,
                documents.asked,
            ),
            load=load_rows,
        )
    return rows["test"]


def _packers(options: DataOptions, shape: RecordShape, tokenizer: PreTrainedTokenizerBase) -> Callable[[], AnyPacker]:
    """A function that makes the packer of documents of ``shape``."""
    if not options.makes_samples(shape):
        return functools.partial(Packer, tokenizer, options.sequence_length, options.isolate_documents, options.labels)

    def place_of(document: str) -> str:
        find, datasets = _finder(find_stream, options), [options.dataset, *options.eval_dataset.values()]
        found = (find(each).place_of(document) for each in datasets)
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


def _packing_key(options: DataOptions, shape: RecordShape, tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    """The part of the rows' cache key that is not about the documents."""
    key: list[Any] = [tokenizer_fingerprint(tokenizer), options.sequence_length, options.isolate_documents]
    if options.makes_samples(shape):
        samples = options.samples
        key += [shape.name, tokenizer.chat_template, tokenizer.pad_token_id, transformers.__version__]
        key += [samples.train_on_prompt, samples.overflow, samples.packing, samples.on_bad_row, sorted(samples.stops)]
        key += [samples.groups] if samples.groups else []
    elif options.labels:
        key += ["labels"]
    return key


def check_samples(options: DataOptions, shape: RecordShape, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Refuse samples that can't be made, when no more than their columns has been read."""
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


def _notes(options: DataOptions, shape: RecordShape, tally: Mapping[str, int]) -> tuple[str, ...]:
    if not options.makes_samples(shape):
        return tuple(unread_notes(tally))
    trained = "every token" if options.samples.train_on_prompt else shape.trained
    words = f"records with {', '.join(shape.required)}; trained on: {trained}"
    return words, *notes(shape, tally, options.sequence_length)


def _sample(documents: Dataset) -> Iterator[str]:
    """Random documents' texts, about 64 M characters: a tokenizer learns no more from a larger sample."""
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
    """Rows of a stream. Nothing is written but a tokenizer trained on it."""
    find = _finder(find_stream, options)
    stream = find(options.dataset)
    if options.max_samples is not None:
        stream = first_of_stream(stream, options.max_samples)
    sets = {name: stream_evaluated_on(stream, find(each)) for name, each in options.eval_dataset.items()}
    if sets:
        stream = replace(next(iter(sets.values())), identity="; ".join(each.identity for each in sets.values()))
    check_samples(options, stream.shape, tokenizer)
    fraction = 0.0 if stream.heldout else options.heldout_fraction
    if tokenizer is None:
        folder = root / "tokenizers" / digest([CACHE_FORMAT, stream.identity, fraction, vocab_size, "stream"])
        texts = (text for _, text, held in first_documents(stream, fraction) if not held)
        with tempfile.TemporaryDirectory(dir=root, prefix="scratch-") as scratch:
            tokenizer = trained_tokenizer(folder, Path(scratch), lambda: texts, vocab_size)
    new_packer = _packers(options, stream.shape, tokenizer)
    heldout, left_out = heldout_of_stream(stream, new_packer(), fraction)
    held = [heldout, *(heldout_of_stream(each, new_packer(), 0.0)[0] for each in [*sets.values()][1:])]
    first, length, _, *samples = _packing_key(options, stream.shape, tokenizer)
    packing = [first, length, new_packer().columns, *samples]
    # the last two are part of the key, as a place in a stream counts rows of documents that were packed together
    key = [CACHE_FORMAT, *packing, options.shuffle_rows, sorted(left_out), DOCUMENTS_AT_ONCE, CHARACTERS_AT_ONCE]
    fingerprint = f"{stream.identity}, rows {digest(key)[:8]}"
    rows = StreamedRows(stream, new_packer, left_out, options.shuffle_rows, fingerprint)
    notes_of = _notes(options, stream.shape, heldout.tally)
    return Corpus(rows, heldout, tokenizer, notes_of, _named(options, held))


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Switch off the bars of `datasets`, which flash by for small data and break the console's own live line."""
    # semi-private, one switch for the whole process: datasets/utils/tqdm.py, datasets 5.2
    if datasets.are_progress_bars_disabled():
        yield
        return
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()
