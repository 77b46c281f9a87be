"""Documents → tokens → packed rows → batches of one fixed shape. Pure CPU.

Everything is deterministic: the tokenizer, the rows, and their order in an epoch. What is slow is cached under a key of
all that it depends on.

Shape legend: B rows in a batch, S tokens in a row (``sequence_length``).
"""

from __future__ import annotations

import functools
import itertools
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import datasets
import numpy as np
import pyarrow as pa
import tokenizers
import torch
from datasets import Dataset, Features, List, Value
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from trainer.cache import cache_root
from trainer.documents import digest, find_source, has_text, split_documents
from trainer.errors import UserError

T = TypeVar("T")

END_OF_TEXT = "<|endoftext|>"
IGNORE = -100  # a label that torch's cross entropy, and so every transformers model, leaves out
CACHE_FORMAT = 1  # part of every cache key: raise it when what is cached changes meaning
TOKENIZER_CHARACTERS = 64 << 20  # a sample of this size is as good as all of a larger text to learn merges from
DOCUMENTS_AT_ONCE = 256


@dataclass(frozen=True)
class Corpus:
    """Packed rows and the tokenizer that made them.

    Rows are ``{"input_ids": [S]}``, and with ``isolate_documents`` also ``segment_ids`` (1, 2, … in each row) and
    ``position_ids`` (from 0 in each segment), all of them [S].
    """

    train: Dataset
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
    cache_dir: Path | None = None,
) -> Corpus:
    """Tokenised and packed rows of ``dataset``: documents joined by the end-of-text token, cut every S tokens.

    Args:
        dataset: a text, JSON-lines or Parquet file, a folder of one of these kinds, or a hub id (``id:config`` where
            the dataset has several). Default: the source of this Python's standard library.
        tokenizer: default: a byte-level BPE of ``vocab_size`` tokens, trained on the training documents.
        sequence_length: S, tokens a row.
        isolate_documents: rows say which document each token belongs to.
        text_column: where JSON-lines, Parquet and hub datasets keep their text.
        heldout_fraction: of the documents, where the dataset has no validation or test split. Which ones depends on
            their names (of records: their text) alone, so that runs with other seeds are scored on the same tokens.
        seed: draws the rows that ``max_train_tokens`` leaves.
        max_train_tokens: train on at most so many tokens.
        cache_dir: default: $SHARDWRIGHT_CACHE, else $XDG_CACHE_HOME/shardwright, else ~/.cache/shardwright.

    Raises:
        UserError: no such dataset, or an unreadable or empty one, or one of mixed kinds, without a column of text or
            too small to make a row on either side of the split; a tokenizer without an end-of-text token.
    """
    root = cache_root(cache_dir)
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
                build=lambda folder: _train_tokenizer(split()["train"], vocab_size).save(
                    str(folder / "tokenizer.json")
                ),
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


def _train_tokenizer(documents: Dataset, vocab_size: int) -> Tokenizer:
    """A byte-level BPE (Sennrich et al. 2016, as in GPT-2) of at most ``vocab_size`` tokens."""

    def sample() -> Iterator[str]:
        budget = TOKENIZER_CHARACTERS
        for index in np.random.default_rng(0).permutation(len(documents)).tolist():
            if budget <= 0:
                return
            text = documents[index]["text"]
            budget -= len(text)
            yield text

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        sample(),
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return tokenizer


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


class Packer:
    """Documents → rows of S tokens; what does not fill a row waits for the next call."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, sequence_length: int, isolate_documents: bool) -> None:
        self.tokenizer, self.length, self.isolate = tokenizer, sequence_length, isolate_documents
        self.rest = np.empty(0, dtype=np.int32)

    def __call__(self, batch: Mapping[str, list[str | None]]) -> pa.Table:
        texts = [text for text in batch["text"] if has_text(text)]
        # verbose: no warning that a document is longer than the model's context; rows never are
        tokens = self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []
        end = [self.tokenizer.eos_token_id]
        flat = np.concatenate([self.rest, *(np.array(document + end, dtype=np.int32) for document in tokens)])
        count = len(flat) // self.length
        self.rest = flat[count * self.length :]
        rows_BS = flat[: count * self.length].reshape(count, self.length)
        columns = {"input_ids": rows_BS}
        if self.isolate:
            columns |= self._documents_of(rows_BS)
        return pa.table(
            {name: pa.FixedSizeListArray.from_arrays(x.ravel(), self.length) for name, x in columns.items()}
        )

    def _documents_of(self, rows_BS: np.ndarray) -> dict[str, np.ndarray]:
        """A document ends with its end-of-text token; one that a row's end cuts goes on as the next row's first."""
        starts_BS = np.ones_like(rows_BS, dtype=bool)
        starts_BS[:, 1:] = rows_BS[:, :-1] == self.tokenizer.eos_token_id
        place_S = np.arange(self.length, dtype=np.int32)
        begun_BS = np.maximum.accumulate(np.where(starts_BS, place_S, 0), axis=1)
        return {"segment_ids": starts_BS.cumsum(axis=1, dtype=np.int32), "position_ids": place_S - begun_BS}


def _write_rows(splits: Mapping[str, Dataset], folder: Path, new_packer: Callable[[], Packer], asked: str) -> None:
    """Write the rows of each split to ``folder``, and last how many they are."""
    counts = {}
    for name, documents in splits.items():
        packer = new_packer()
        columns = ["input_ids", *(["segment_ids", "position_ids"] if packer.isolate else [])]
        packed = documents.map(
            packer,
            batched=True,
            batch_size=DOCUMENTS_AT_ONCE,
            features=Features({column: List(Value("int32"), length=packer.length) for column in columns}),
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


# ---- batches: fixed shapes, int64 ----


def epoch_batches(
    dataset: Dataset, batch_size: int, *, seed: int, epoch: int, skip: int = 0
) -> Iterator[dict[str, torch.Tensor]]:
    """The batches of one epoch after the first ``skip``, in an order drawn by ``seed`` and ``epoch``.

    Each is ``input_ids``, ``labels`` and the other columns of the rows, int64 [B, S]; rows that don't fill the last
    batch are left out. Labels are the inputs (transformers shifts them by one inside the loss); where a target would be
    the first token of another document they are -100.
    """
    order = np.random.default_rng([seed, epoch]).permutation(len(dataset))
    rows = dataset.with_format("numpy")
    for start in range(skip * batch_size, len(order) - batch_size + 1, batch_size):
        yield _batch(rows[order[start : start + batch_size]])


def training_batches(
    dataset: Dataset, batch_size: int, seed: int, start_step: int = 0
) -> Iterator[dict[str, torch.Tensor]]:
    """Batches without end, epoch after epoch, from the ``start_step``-th on (0 is the first): what a resumed run needs.

    Raises:
        UserError: the rows don't fill one batch.
    """
    if len(dataset) < batch_size:
        raise UserError(
            asked=f"batches of {batch_size} rows",
            found=f"{len(dataset)} rows to train on",
            why="they don't fill one batch",
            instead="a larger dataset, a shorter --sequence_length or a smaller --per_device_train_batch_size",
        )
    epoch, skip = divmod(start_step, len(dataset) // batch_size)
    batches = (
        epoch_batches(dataset, batch_size, seed=seed, epoch=e, skip=skip if e == epoch else 0)
        for e in itertools.count(epoch)
    )
    return itertools.chain.from_iterable(batches)


class TrainingBatches:
    """Batches without end that know where they are: :func:`training_batches` with a cursor.

    Args:
        batch_size: rows of the global batch.
    """

    def __init__(
        self, rows: Dataset, batch_size: int, *, seed: int, process_index: int = 0, process_count: int = 1
    ) -> None:
        self.rows, self.batch_size, self.seed = rows, batch_size, seed
        self.load_state_dict({"step": 0})

    def __iter__(self) -> TrainingBatches:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        batch = next(self._batches)
        self.step += 1
        return batch

    def state_dict(self) -> dict[str, int]:
        """The cursor of the batch that comes next, JSON-able."""
        return {"step": self.step}

    def load_state_dict(self, cursor: Mapping[str, int]) -> None:
        """Go to where a cursor points."""
        self.step = cursor["step"]
        self._batches = training_batches(self.rows, self.batch_size, self.seed, self.step)

    @property
    def epoch(self) -> float:
        """Epochs done."""
        return self.step / (len(self.rows) // self.batch_size)


def heldout_batches(dataset: Dataset, batch_size: int) -> Iterator[dict[str, torch.Tensor]]:
    """Every row once and in order, as `epoch_batches` gives them; rows that fill up the last batch are all -100."""
    rows = dataset.with_format("numpy")
    for start in range(0, len(dataset), batch_size):
        wanted = np.arange(start, start + batch_size)
        # filled up with the last row, not with zeros: inputs that any model takes
        batch = _batch(rows[np.minimum(wanted, len(dataset) - 1)])
        batch["labels"][torch.from_numpy(wanted >= len(dataset))] = IGNORE
        yield batch


def unigram_loss(train: Dataset, heldout: Dataset, vocab_size: int) -> float:
    """Cross entropy, in nats a token, of held-out targets under add-one-smoothed counts of the training tokens.

    The targets are those that a model is scored on: all tokens of a row but the first, and with isolated documents no
    document's first. What a model gains over this it owes to context.
    """
    counts, targets = np.zeros(vocab_size), np.zeros(vocab_size)
    for batch in train.with_format("numpy").iter(1024):
        counts += np.bincount(batch["input_ids"].ravel(), minlength=vocab_size)
    for batch in heldout.with_format("numpy").iter(1024):
        labels = _batch(batch)["labels"][:, 1:].numpy()
        targets += np.bincount(labels[labels != IGNORE], minlength=vocab_size)
    log_probabilities = np.log(counts + 1) - np.log(counts.sum() + vocab_size)
    return float(-(targets * log_probabilities).sum() / targets.sum())


def _batch(columns: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    batch = {name: torch.from_numpy(values.astype(np.int64)) for name, values in columns.items()}
    labels_BS = batch["input_ids"].clone()
    if "segment_ids" in batch:
        segments_BS = batch["segment_ids"]
        labels_BS[:, 1:][segments_BS[:, 1:] != segments_BS[:, :-1]] = IGNORE
    return {**batch, "labels": labels_BS}


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
