"""A dataset → its tokenizer, its rows to train on, stored or streamed, and its held-out rows. Pure CPU.

Everything is deterministic: the tokenizer, the rows, and their order in an epoch. Tokenizer and rows (for a stream only
the tokenizer) are cached under a key of all that they depend on.

Shape legend: S tokens in a row (``sequence_length``).
"""

import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import transformers
from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase

from shardwright.data.chat_template import DEFAULT, template_note, tokenizer_of_records
from shardwright.data.records.document_stream import DocumentStream, find_stream, has_text
from shardwright.data.records.fields import counted
from shardwright.data.records.record_sources import AnyDataset
from shardwright.data.records.records import LOOKED_AT
from shardwright.data.rows import mixture
from shardwright.data.rows.heldout_rows import (
    HELDOUT,
    SAMPLE_CHARACTERS,
    TRAIN,
    first_documents,
    heldout_of_stream,
    split_documents,
)
from shardwright.data.rows.packing import CHARACTERS_AT_ONCE, DOCUMENTS_AT_ONCE, AnyPacker, Packer
from shardwright.data.rows.row_stream import StreamedRows
from shardwright.data.rows.rows import Rows, StoredRows, load_rows, quiet_scratch, write_rows
from shardwright.data.samples.fitting import SamplePacker
from shardwright.data.samples.samples import SampleOptions
from shardwright.data.samples.tally import idle_notes, notes, unread_notes
from shardwright.data.samples.template import Template
from shardwright.data.tokenizer import (
    check_tokenizer,
    check_vocabulary,
    fix_date,
    special_name,
    today,
    tokenizer_fingerprint,
)
from shardwright.errors import UserError
from shardwright.files.cache import cache_root, cached, digest
from shardwright.objectives.objective import RecordShape
from shardwright.objectives.sft import SHAPES

CACHE_FORMAT = 4  # part of every cache key: raise it when cached data changes meaning
STREAM_FORMAT = 2  # part of a streamed text's name in cursors, so that older checkpoints go on; samples have the above


@dataclass(frozen=True)
class DataOptions:
    """The text to train on, and how it becomes rows.

    Args:
        dataset: a text, JSON-lines, Parquet, Arrow or CSV file, a folder of one of these kinds, or a hub id
            (``id:config`` where the dataset has several, ``id@commit`` for one that does not change); or several, each
            with its share of the rows: ``a.jsonl:0.7,b.jsonl:0.3``; or records of the library `datasets`, stored or
            streamed. None: the source of this Python's standard library.
        heldout_fraction: the share of the documents that is held out if the dataset has no validation or test split.
            A hash of a document's name (of a record's text) decides, so that runs with other seeds are scored on the
            same tokens. A stream's lie in its first 64 M characters and fill 512 rows at most.
        eval_dataset: set name (empty: unnamed) → documents to hold out instead, not trained on, each as ``dataset``.
        max_samples: train on the first so many documents; None: all. A share of them is held out if nothing else is.
        date: the day that chat templates take for today's, in ISO's form; None: today.
        samples: how unpacked texts and records of other shapes become rows, and the policy for unreadable rows.
    """

    dataset: AnyDataset
    sequence_length: int  # S
    reads: Sequence[RecordShape] = SHAPES  # the shapes that records may have, in the order in which they are tried
    isolate_documents: bool = False  # rows say which document each token belongs to; samples that share rows need it
    streaming: bool = False  # rows are made as training asks for them and never stored
    shuffle_rows: int = 2048  # size of a stream's shuffle buffer; so many take 32 MiB at 4096 tokens a row
    heldout_fraction: float = 0.05
    eval_dataset: Mapping[str, str | Dataset | IterableDataset] = field(default_factory=dict)
    max_samples: int | None = None
    date: str | None = None
    samples: SampleOptions = SampleOptions()  # noqa: RUF009  (it is frozen)
    labels: bool = False  # rows of text get labels too, to be mixed with rows of samples
    chat_template: str | None = None  # the tokenizer's, by the name that it was asked for; None: its own

    @property
    def reading(self) -> tuple[Sequence[RecordShape], str]:
        """The shapes to recognise, and the policy for unreadable rows, as `find_stream` takes them."""
        return self.reads, self.samples.on_bad_row

    def makes_samples(self, shape: RecordShape) -> bool:
        """Whether each record of ``shape`` becomes a whole sample; otherwise texts are joined and cut into rows."""
        return not shape.is_text or not self.samples.packing


@dataclass(frozen=True)
class Corpus:
    """Packed rows and the tokenizer that made them.

    Each row has ``input_ids``, and with ``isolate_documents`` also ``segment_ids`` (1, 2, … in each row, 0 for padding)
    and ``position_ids`` (from 0 in each segment), all of them [S]. Rows of samples have ``labels`` too. ``notes`` tell
    a person what was recognised and what became of it.

    ``heldout_sets`` have the held-out rows by the names of their sets; an only one's is empty. ``date`` is the one that
    a chat template wrote into them, if it writes any.
    """

    train: Rows
    heldout_sets: Mapping[str, StoredRows]
    tokenizer: PreTrainedTokenizerBase
    notes: tuple[str, ...] = ()
    date: str | None = None

    @property
    def heldout(self) -> StoredRows:
        """The first set."""
        return next(iter(self.heldout_sets.values()))

    @property
    def said(self) -> tuple[str, ...]:
        """Lines for a person: the tokens to train on, and the notes."""
        tokens = "a stream" if self.train.tokens is None else f"{self.train.tokens:,} tokens to train on"
        return tokens, *self.notes

    def check_fits(self, length: int, vocab_size: int) -> None:
        """Refuse a corpus that a job with rows of ``length`` tokens and a vocabulary of ``vocab_size`` can't train on.

        The first stored row shows the corpus's length.
        """
        check_vocabulary(self.tokenizer, vocab_size)
        mixed = self.train.sources if isinstance(self.train, mixture.MixedRows) else [self.train]
        for rows in (*mixed, *self.heldout_sets.values()):
            if isinstance(rows, StoredRows) and len(rows) and (found := len(rows.dataset[0]["input_ids"])) != length:
                raise UserError(
                    asked=f"a job with rows of {length} tokens",
                    found=f"a corpus with rows of {found}",
                    why="positions, slots of experts and memory were checked for the job's",
                    instead=f"sequence_length={found} in the job's arguments, or DataOptions(sequence_length={length})",
                )


def load_corpus(
    options: DataOptions, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, cache_dir: Path | None = None
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
    sources, root = mixture.sources_of(options.dataset), cache_root(cache_dir)
    load = _streamed_corpus if options.streaming else _stored_corpus
    # all sources have the same date, and a tokenizer that is trained on chats needs a template
    template = options.chat_template or (DEFAULT if tokenizer is None else None)
    options = replace(options, date=options.date or today(), chat_template=template)
    if len(sources) == 1:
        return load(options, tokenizer, vocab_size, root)
    if tokenizer is None:
        raise mixture.no_tokenizer(options.dataset)
    shapes = mixture.shapes_of(options.dataset, options.reads)
    labels = any(map(options.makes_samples, shapes))
    parts = mixture.parts_of(sources, shapes, options.eval_dataset, options.reading)
    corpora = [load(replace(options, labels=labels, **part), tokenizer, vocab_size, root) for part in parts]
    rows = [corpus.train for corpus in corpora]
    train = mixture.MixedRows(rows, mixture.shares_of(sources, rows))
    made = {name: rows for corpus in reversed(corpora) for name, rows in corpus.heldout_sets.items()}
    sets = {name: made[name] for name in options.eval_dataset}
    if not sets:
        sets = {"": StoredRows(datasets.concatenate_datasets([corpus.heldout.dataset for corpus in corpora]))}
    notes = mixture.mixture_notes(sources, train, [corpus.notes for corpus in corpora])
    return Corpus(train, sets, tokenizer, notes, corpora[0].date)


def _stored_corpus(
    options: DataOptions, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, root: Path
) -> Corpus:
    documents = _documents(options, tokenizer)
    key = [CACHE_FORMAT, documents.fingerprint, options.heldout_fraction]
    with quiet_scratch(root) as scratch:

        @functools.cache  # the documents are read once, and only if something is not in the cache
        def split() -> dict[str, Dataset]:
            check_special_names(options, documents, tokenizer)
            return split_documents(documents, scratch, options.heldout_fraction)

        if tokenizer is None:
            template = str(options.chat_template)
            tokenizer = tokenizer_of_records(
                documents.shape, lambda: _sample(split()[TRAIN]), template, key, vocab_size, root, scratch
            )
        packing = _packing(options, documents.shape, tokenizer)
        rows = cached(
            root / "rows" / digest([*key, *packing.key]),
            scratch,
            build=lambda folder: write_rows(split(), folder, packing.new_packer, documents),
            load=load_rows,
        )
    tally = sum((Counter(split.tally) for split in rows.values()), Counter())
    train = rows.pop(TRAIN)
    sets = {name.removeprefix(HELDOUT).removeprefix("-"): own for name, own in rows.items()}
    notes = packing.notes(tally)
    if [each.fingerprint for each in sets.values()][:1] == [train.fingerprint]:
        notes += ("the only text there is: it is trained on and evaluated on",)
    return Corpus(train, sets, tokenizer, notes, packing.options.date)


def load_rows_of(
    dataset: str | Dataset | IterableDataset, options: DataOptions, tokenizer: PreTrainedTokenizerBase
) -> StoredRows:
    """Rows of a dataset given to ``evaluate``: all of it, in order, one sample a row.

    ``options`` are the corpus's. Raises as :func:`load_corpus`.
    """
    options = replace(options, dataset=dataset, eval_dataset={}, samples=replace(options.samples, packing=False))
    documents = find_stream(dataset, *options.reading, stored=True)
    check_samples(options, documents.shape, tokenizer)
    packing, root = _packing(options, documents.shape, tokenizer), cache_root()
    folder = root / "rows" / digest([CACHE_FORMAT, documents.fingerprint, "alone", *packing.key])
    with quiet_scratch(root) as scratch:

        def build(folder: Path) -> None:
            write_rows({"test": documents.stored(scratch / "documents")}, folder, packing.new_packer, documents)

        return cached(folder, scratch, build=build, load=load_rows)["test"]


def _streamed_corpus(
    options: DataOptions, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, root: Path
) -> Corpus:
    """Rows of a stream. Nothing is written but a tokenizer trained on it."""
    stream = _documents(options, tokenizer)
    check_special_names(options, stream, tokenizer)
    fraction = 0.0 if stream.heldout else options.heldout_fraction
    if tokenizer is None:

        def texts() -> Iterator[str]:
            return (text for _, text, held in first_documents(stream, fraction) if not held)

        key, template = [CACHE_FORMAT, "stream", stream.fingerprint, fraction], str(options.chat_template)
        if isinstance(options.dataset, IterableDataset):  # nothing else tells it from another with the same columns
            key.append(functools.reduce(lambda before, text: digest([before, text]), texts(), ""))
        with quiet_scratch(root) as scratch:
            tokenizer = tokenizer_of_records(stream.shape, texts, template, key, vocab_size, root, scratch)
    packing = _packing(options, stream.shape, tokenizer)
    sets = {name: heldout_of_stream(own, packing.new_packer(), 1.0)[0] for name, own in stream.heldout.items()}
    left_out = frozenset[int]()
    if not sets and fraction:
        sets[""], left_out = heldout_of_stream(stream, packing.new_packer(), fraction)
    first, length, _, *samples = packing.key
    # the last two are part of the key, as a place in a stream counts rows of documents that were packed together
    key = [STREAM_FORMAT, first, length, packing.new_packer().columns, *samples]
    key += [options.shuffle_rows, sorted(left_out), DOCUMENTS_AT_ONCE, CHARACTERS_AT_ONCE]
    fingerprint = f"{stream.identity}, rows {digest(key)[:8]}"
    rows = StreamedRows(stream, packing.new_packer, left_out, options.shuffle_rows, fingerprint)
    next(stream.documents(), None)  # its columns, if all that was read so far are held out
    tally = Counter(next(iter(sets.values())).tally if sets else {}) + counted(stream.unread.columns)
    return Corpus(rows, sets, tokenizer, packing.notes(tally), packing.options.date)


def _documents(options: DataOptions, tokenizer: PreTrainedTokenizerBase | None) -> DocumentStream:
    """The documents to train on and to evaluate; raises UserError for those that no rows can be made of."""
    reading = options.reads, options.samples.on_bad_row, not options.streaming
    found = find_stream(options.dataset, *reading)
    others = {name: find_stream(each, *reading, "eval_dataset") for name, each in options.eval_dataset.items()}
    if options.max_samples is not None:
        found = found.first(options.max_samples)
    if others:
        found = found.evaluated_on(others)
    check_samples(options, found.shape, tokenizer)
    return found


def _sample(documents: Dataset) -> Iterator[str]:
    """Random documents' texts, about 64 M characters: a tokenizer learns no more from a larger sample."""
    budget = SAMPLE_CHARACTERS
    for index in np.random.default_rng(0).permutation(len(documents)).tolist():
        if budget <= 0:
            return
        text = documents[index]["text"]
        budget -= len(text)
        yield text


@dataclass(frozen=True)
class _Packing:
    """How documents of ``shape`` become rows."""

    options: DataOptions
    shape: RecordShape
    tokenizer: PreTrainedTokenizerBase

    def new_packer(self) -> AnyPacker:
        options = self.options
        length, isolate = options.sequence_length, options.isolate_documents
        if options.makes_samples(self.shape):
            return SamplePacker(self.tokenizer, self.shape, length, options.samples, isolate, self._place_of)
        parse = options.samples.split_special_tokens is False
        return Packer(self.tokenizer, length, isolate, options.labels, parse)

    def _place_of(self, document: str) -> str:
        asked = [self.options.dataset, *self.options.eval_dataset.values()]
        found = (find_stream(each, *self.options.reading).place_of(document) for each in asked)
        return next(filter(None, found), "a record")

    @property
    def key(self) -> list[Any]:
        """The part of the rows' cache key that is not about the documents."""
        options, samples, tokenizer = self.options, self.options.samples, self.tokenizer
        key: list[Any] = [tokenizer_fingerprint(tokenizer), options.sequence_length, options.isolate_documents]
        if options.makes_samples(self.shape):
            key[-1] = [key[-1], tokenizer.special_tokens_map]  # which templates write
            key += [
                self.shape.name,
                CACHE_FORMAT,
                tokenizer.chat_template,
                tokenizer.pad_token_id,
                transformers.__version__,
            ]
            key += [samples.train_on_prompt, samples.overflow, samples.packing, samples.on_bad_row]
            key += [sorted(samples.stops), *([samples.groups] if samples.groups else [])]
            key += [samples.train_on, *samples.segments]
            key += [f"taught {samples.taught} of {samples.vocabulary}"] if samples.taught else []
            key += [options.date] if options.date else []
        elif options.labels:
            key += ["labels"]
        return [*key, "parsed"] if samples.split_special_tokens is False else key

    def notes(self, tally: Mapping[str, int]) -> tuple[str, ...]:
        whole = self.options.makes_samples(self.shape)
        idle = idle_notes(self.options.samples, self.shape, whole)
        if not whole:
            return *idle, *unread_notes(tally)
        trained = "every token" if self.options.samples.train_on_prompt else self.shape.trained
        words = [f"records with {self.shape.read_as}; trained on: {trained}"]
        if self.options.chat_template and self.tokenizer.chat_template:
            words.append(template_note(self.tokenizer, self.options.chat_template))
        if self.options.date:
            words.append(f"the chat template writes the date of the run's first start: {self.options.date}")
        return *words, *idle, *notes(self.shape, tally, self.options.sequence_length)


def _packing(options: DataOptions, shape: RecordShape, tokenizer: PreTrainedTokenizerBase) -> _Packing:
    """The packing, whose date the tokenizer's chat templates write from now on; it has none if they write none."""
    date = options.date or today()
    return _Packing(replace(options, date=date if fix_date(tokenizer, date) else None), shape, tokenizer)


def check_samples(options: DataOptions, shape: RecordShape, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Refuse samples that can't be made, when no more than their columns has been read."""
    if not options.makes_samples(shape):
        return
    if tokenizer is None and shape.name == "input_ids":
        raise UserError(
            asked=f"{options.dataset}: records of {shape.name}, without a tokenizer",
            found="tokens of another one",
            why="one is trained on texts alone, or on the texts in chats",
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


def check_special_names(
    options: DataOptions, stream: DocumentStream, tokenizer: PreTrainedTokenizerBase | None
) -> None:
    """Refuse texts of which most hold a special token's name, unless the options say what it shall be."""
    if tokenizer is None or not stream.shape.is_text or options.samples.split_special_tokens is not None:
        return
    filled = [text for _, text in itertools.islice(stream.documents(), LOOKED_AT) if text and has_text(text)]
    found = [match for text in filled if (match := special_name(tokenizer, text))]
    if 2 * len(found) > len(filled):
        raise UserError(
            asked=f"{' '.join(str(options.dataset).split())}: the texts in its column {stream.shape.read_as!r}",
            found=f"{len(found)} of the first {len(filled)} hold the name of a special token, such as {found[0]!r}",
            why="they may be chats that a template wrote, or texts about tokens, in which names are letters",
            instead="--split_special_tokens false, where each name shall be that token; --split_special_tokens true, "
            "where it shall be letters; or the chats themselves, as `messages`, of which the answers alone are trained",
        )
