"""No row is seen twice or missed: over epochs, kills, other batch sizes and numbers of processes, stored or streamed.

No word of these texts comes twice, so that a token says which document and which place in it it is from.
"""

from __future__ import annotations

import itertools
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from shardwright.data.corpus import Corpus, DataOptions, load_corpus
from shardwright.data.records import document_stream
from shardwright.data.rows import row_stream
from shardwright.data.rows.batches import TrainingBatches
from shardwright.data.rows.packing import Packer, as_table
from shardwright.data.rows.row_stream import StreamedRows
from shardwright.data.rows.rows import Rows, StoredRows
from shardwright.errors import UserError
from tests.support.texts import write_jsonl, write_parquet, written

WORDS, EOS = 4000, 0
KINDS = ["jsonl", "jsonl folder", "parquet folder", "text folder", "text file"]
CASES = 24  # of each of stored and streamed


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {"<|endoftext|>": EOS, **{f"w{i}": i for i in range(1, WORDS)}}
    words = Tokenizer(WordLevel(vocabulary))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|endoftext|>")


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows begin and end within groups of documents, as they do in large data."""
    monkeypatch.setattr(row_stream, "DOCUMENTS_AT_ONCE", 5)
    monkeypatch.setattr(document_stream, "DOCUMENT_BYTES", (100, 200))


def texts(rng: np.random.Generator, count: int) -> list[str]:
    """``count`` documents of at most 39 words, some of them empty. No word comes twice."""
    words = iter(range(1, WORDS))
    lengths = rng.integers(1, 40, count) * (rng.random(count) > 0.1)
    return [" ".join(f"w{next(words)}" for _ in range(length)) for length in lengths]


def write(path: Path, kind: str, written_texts: list[str]) -> Path:
    chunks = [written_texts[i::3] for i in range(3)]
    if kind == "jsonl":
        return write_jsonl(path / "texts.jsonl", written_texts)
    if kind == "text file":
        return written(path / "texts.txt", "".join(text + "\n" for text in written_texts if text).encode())
    (path / "folder").mkdir()
    for i, chunk in enumerate(chunks):
        if kind == "jsonl folder":
            write_jsonl(path / "folder" / f"{i}.jsonl", chunk)
        elif kind == "parquet folder":
            write_parquet(path / "folder" / f"{i}.parquet", chunk)
    if kind == "text folder":
        for i, text in enumerate(written_texts):
            (path / "folder" / f"{i:03}.txt").write_text(text)
    return path / "folder"


@dataclass(frozen=True)
class Leg:
    """A part of a run: a checkpoint is written after ``steps`` steps, and the run is killed ``lost`` steps later."""

    batch_size: int
    processes: int
    steps: int
    lost: int = 0


def columns(batch: dict[str, torch.Tensor]) -> np.ndarray:
    """All columns of a batch side by side, tokens first. [rows, columns x S]"""
    first = batch["input_ids"].numpy()
    return np.concatenate([first, *(batch[name].numpy() for name in sorted(batch) if name != "input_ids")], axis=1)


def train(
    rows: Rows,
    legs: list[Leg],
    seed: int,
    tamper: Callable[[dict[str, Any]], None] = lambda cursor: None,
) -> np.ndarray:
    """The rows of the steps before each leg's checkpoint, of all processes, in the order of training."""
    seen: list[np.ndarray] = []
    cursor: str | None = None
    for leg in legs:
        processes = [
            TrainingBatches(rows, leg.batch_size, seed=seed, process_index=i, process_count=leg.processes)
            for i in range(leg.processes)
        ]
        if cursor is not None:
            changed = json.loads(cursor)
            tamper(changed)
            for process in processes:
                process.load_state_dict(changed)
        for _ in range(leg.steps):
            seen += [columns(next(process)) for process in processes]
        cursors = {json.dumps(process.state_dict()) for process in processes}
        assert len(cursors) == 1, "all processes are at the same place"
        (cursor,) = cursors
        for process in processes:
            for _ in range(leg.lost):
                next(process)
    return np.concatenate(seen)


def draw_legs(rng: np.random.Generator, rows: int) -> list[Leg]:
    """A run over some epochs in 2 to 5 legs, each with a batch size and a number of processes of its own."""
    legs = []
    for _ in range(rng.integers(2, 6)):
        processes = int(rng.choice([1, 2, 4]))
        batch_size = processes * int(rng.integers(1, max(2, min(9, rows // processes + 1))))
        steps = int(rng.integers(1, max(2, 1.2 * rows // batch_size)))
        legs.append(Leg(batch_size, processes, steps, lost=int(rng.integers(0, 3))))
    return legs


def unbroken(rows: Rows, seed: int) -> Iterator[tuple[np.ndarray, float]]:
    """(row, epochs done after it) of a run of one process that takes one row at a time and is never stopped."""
    batches = TrainingBatches(rows, 1, seed=seed)
    for batch in batches:
        yield columns(batch)[0], batches.epoch


def check(rows: Rows, legs: list[Leg], seed: int) -> int:
    """Asserts that the rows of ``legs`` are those of a run that is never stopped, in its order; returns how many."""
    seen = train(rows, legs, seed)
    expected = [row for row, _ in zip((row for row, _ in unbroken(rows, seed)), range(len(seen)), strict=False)]
    np.testing.assert_array_equal(seen, np.stack(expected))
    return len(seen)


def stored(written_texts: list[str], packer: Packer) -> StoredRows:
    return StoredRows(Dataset(as_table(packer.rows([text for text in written_texts if text]))))


# ---- properties ----


def test_stored_rows_each_come_once_an_epoch_whatever_was_killed_and_changed(tokenizer) -> None:
    cases = resumes = counted = 0
    for seed in range(CASES):
        rng = np.random.default_rng(seed)
        written_texts = texts(rng, int(rng.integers(10, 50)))
        rows = stored(written_texts, Packer(tokenizer, int(rng.choice([4, 8, 16])), bool(seed % 2)))
        if len(rows) < 8:
            continue
        whole = rows.read(np.arange(len(rows)))["input_ids"]
        counted += check(rows, legs := draw_legs(rng, len(rows)), seed)
        cases, resumes = cases + 1, resumes + len(legs) - 1
        run = unbroken(rows, seed)
        for epoch in range(3):
            of_epoch = np.stack([next(run)[0][: whole.shape[1]] for _ in range(len(rows))])
            assert sorted(of_epoch.tolist()) == sorted(whole.tolist()), f"epoch {epoch}: every row once"
    print(f"stored: {cases} cases, {resumes} resumes, {counted} rows")
    assert cases > CASES / 2


def load_stream(path: Path, written_texts: list[str], tokenizer, rng, kind: str, isolate: bool) -> Corpus:
    options = DataOptions(
        dataset=str(write(path, kind, written_texts)),
        sequence_length=int(rng.choice([4, 8, 16])),
        isolate_documents=isolate,
        heldout_fraction=0.2,
        streaming=True,
        shuffle_rows=int(rng.integers(1, 25)),
    )
    return load_corpus(options, tokenizer, WORDS, path / "cache")


def test_a_streams_tokens_each_come_once_an_epoch_whatever_was_killed_and_changed(tokenizer, tmp_path) -> None:
    resumes = counted = 0
    for seed in range(CASES):
        rng = np.random.default_rng(seed)
        written_texts, kind = texts(rng, int(rng.integers(30, 70))), KINDS[seed % len(KINDS)]
        (path := tmp_path / str(seed)).mkdir()
        corpus = load_stream(path, written_texts, tokenizer, rng, kind, isolate=bool(seed % 2))
        rows, heldout = corpus.train, {t for row in corpus.heldout.dataset["input_ids"] for t in row} - {EOS}
        in_an_epoch, length = rows.first(10_000)["input_ids"].shape
        legs = draw_legs(rng, in_an_epoch)
        counted += check(rows, legs, seed)
        resumes += len(legs) - 1

        count: Counter[int] = Counter()
        for row, epoch in unbroken(rows, seed):
            if epoch == 2:
                break  # this row is the third epoch's
            count.update(row[:length].tolist())
        held_back = [token for token in set(count) - {EOS} if count[token] != 2]
        left_out = {int(w[1:]) for text in written_texts for w in text.split()} - set(count)
        assert len(held_back) < length, "less than a row waits for the third epoch"
        assert all(count[token] == 1 for token in held_back)
        assert heldout <= left_out, "no held-out token is trained on"
        if kind != "text file":  # whose documents are not ours: it is cut at line ends
            for words in ({int(w[1:]) for w in text.split()} for text in written_texts):
                assert not words & left_out or words <= left_out, "documents are held out whole"
    print(f"streamed: {CASES} cases, {resumes} resumes, {counted} rows")


# ---- wrong cursors are found out, or refused ----


@pytest.fixture(params=["stored", "streamed"])
def small(request, tokenizer, tmp_path) -> Rows:
    """60 documents in rows of 8 tokens; streamed, in windows of 7 rows."""
    written_texts = texts(np.random.default_rng(5), 60)
    if request.param == "stored":
        return stored(written_texts, Packer(tokenizer, 8, False))
    return stream(tmp_path, written_texts, tokenizer)


def stream(path: Path, written_texts: list[str], tokenizer, **options: Any) -> StreamedRows:
    settings = {"sequence_length": 8, "heldout_fraction": 0.2, "shuffle_rows": 7, "streaming": True}
    dataset = str(write(path, "jsonl folder", written_texts))
    loaded = load_corpus(
        DataOptions(dataset=dataset, **{**settings, **options}), tokenizer, WORDS, path / "cache"
    ).train
    assert isinstance(loaded, StreamedRows)
    return loaded


LEGS = [Leg(4, 1, 6), Leg(6, 2, 5), Leg(4, 1, 3)]


@pytest.mark.parametrize("by", [-1, 1])
def test_a_cursor_that_is_off_by_one_row_would_be_found_out(small: Rows, by: int) -> None:
    def tamper(cursor: dict[str, Any]) -> None:
        cursor["row"] += by

    seen = train(small, LEGS, 0)
    assert (train(small, LEGS, 0, tamper) != seen).any()


@pytest.mark.parametrize("field", ["part", "document", "skip", "rest"])
def test_each_part_of_a_streams_place_is_needed(tokenizer, tmp_path, field: str) -> None:
    rows = stream(tmp_path, texts(np.random.default_rng(5), 60), tokenizer)
    changed: list[Any] = []

    def tamper(cursor: dict[str, Any]) -> None:
        place = cursor["start"]
        changed.append(place[field])
        place[field] = [] if field == "rest" else 0

    legs = [Leg(4, 1, 3)] * 12
    seen = train(rows, legs, 0)
    assert (train(rows, legs, 0, tamper) != seen).any()
    assert any(changed)


def test_a_streams_cursor_is_the_one_that_older_checkpoints_hold(tokenizer, tmp_path, monkeypatch) -> None:
    # a tokenizer's own fingerprint changes with the version of tokenizers
    monkeypatch.setattr("shardwright.data.corpus.tokenizer_fingerprint", lambda tokenizer: "tokenizer")
    batches = TrainingBatches(stream(tmp_path, texts(np.random.default_rng(5), 60), tokenizer), 4, seed=0)
    for _ in range(3):
        next(batches)
    assert batches.state_dict() == {
        "seed": 0,
        "data": "3 json files of 6,991 bytes (120e7e0d), text, rows 9543215f",
        "epoch": 0,
        "row": 12,
        "window": 1,
        "start": {"part": 0, "document": 9, "skip": 2, "rest": [398, 399, 400, 0]},
    }


def test_another_seed_is_another_order(small: Rows) -> None:
    assert len({train(small, [Leg(1, 1, 20)], seed).tobytes() for seed in range(3)}) == 3


def test_a_reader_ahead_keeps_each_cursor_with_its_batch(small: Rows) -> None:
    ahead = TrainingBatches(small, 4, seed=0)
    pairs = [(next(ahead)["input_ids"], ahead.state_dict()) for _ in range(30)]
    for (_, cursor), (following, _) in itertools.pairwise(pairs):
        resumed = TrainingBatches(small, 4, seed=0)
        resumed.load_state_dict(cursor)
        assert resumed.state_dict() == cursor
        assert (next(resumed)["input_ids"] == following).all()


def test_a_cursor_of_another_seed_is_refused(small: Rows) -> None:
    cursor = TrainingBatches(small, 4, seed=0).state_dict()
    with pytest.raises(UserError, match="--seed 0"):
        TrainingBatches(small, 4, seed=1).load_state_dict(cursor)


def test_a_cursor_of_other_rows_is_refused(small: Rows, tokenizer, tmp_path) -> None:
    cursor = TrainingBatches(small, 4, seed=0).state_dict()
    (path := tmp_path / "other").mkdir()
    others = [
        stored(texts(np.random.default_rng(6), 60), Packer(tokenizer, 8, False)),
        stream(path, texts(np.random.default_rng(5), 60), tokenizer, shuffle_rows=8),
    ]
    for rows in others:
        with pytest.raises(UserError, match=r"cursor of the data[\s\S]*a new run with its model/ as --model"):
            TrainingBatches(rows, 4, seed=0).load_state_dict(cursor)


@pytest.mark.parametrize(
    "change",
    [
        *({"row": -1}, {"row": 10_000}, {"epoch": -1}, {"epoch": None}, {"row": "many"}, {"row": "1"}, {"row": 1.5}),
        *({"epoch": float("inf")}, {"row": float("nan")}, {"epoch": True}),
    ],
    ids=str,
)
def test_a_cursor_that_no_run_can_have_written_is_refused(small: Rows, change: dict[str, Any]) -> None:
    batches = TrainingBatches(small, 4, seed=0)
    next(batches)
    with pytest.raises(UserError, match="not what state_dict"):
        batches.load_state_dict(batches.state_dict() | change)


@pytest.mark.parametrize(
    "start",
    [
        *([], {"place": 1}, {"part": "0"}, {"part": 2}, {"document": -1}, {"skip": 0.5}, {"skip": float("inf")}),
        *({"rest": "1"}, {"rest": [2**40]}, {"rest": [-1]}, {"rest": [[]]}),
    ],
    ids=str,
)
def test_a_cursor_of_a_stream_that_no_run_can_have_written_is_refused(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, start: Any
) -> None:
    path = write(tmp_path, "jsonl", texts(np.random.default_rng(0), 60))
    options = DataOptions(dataset=str(path), sequence_length=8, streaming=True, shuffle_rows=4)
    batches = TrainingBatches(load_corpus(options, tokenizer, WORDS, tmp_path / "cache").train, 2, seed=0)
    for _ in range(4):
        next(batches)
    cursor = batches.state_dict()
    wicked = {**cursor["start"], **start} if isinstance(start, dict) else start
    with pytest.raises(UserError, match="not what state_dict"):
        batches.load_state_dict({**cursor, "start": wicked})


def test_the_same_data_on_another_machine_are_the_same_data(tokenizer, tmp_path) -> None:
    written_texts = texts(np.random.default_rng(5), 60)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    here, there = (stream(tmp_path / name, written_texts, tokenizer) for name in ("a", "b"))
    os.utime(tmp_path / "b" / "folder" / "0.jsonl", (0, 0))
    batches = TrainingBatches(here, 4, seed=0)
    next(batches)
    moved = TrainingBatches(there, 4, seed=0)
    moved.load_state_dict(batches.state_dict())
    assert (next(moved)["input_ids"] == next(batches)["input_ids"]).all()
