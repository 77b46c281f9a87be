"""Samples share rows whole, or have one each; what does not fit is cut as asked, and counted; stored and streamed."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwright.data.corpus import Corpus, DataOptions, load_corpus
from shardwright.data.rows.batches import TrainingBatches, heldout_batches
from shardwright.data.rows.packing import Columns
from shardwright.data.rows.row_stream import StreamedRows
from shardwright.data.samples.fitting import SampleOptions, SamplePacker, best_fit
from shardwright.errors import UserError
from shardwright.models.ops.labels import IGNORE
from shardwright.objectives.sft import SHAPES
from tests.support.chats import CHAT, CHATML, byte_tokenizer, chats, write_records

CHATS, GIVEN = SHAPES[0], SHAPES[-1]
TOKENIZER = byte_tokenizer(CHATML, "<|im_end|>")


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Corpus]:
    def load(records: list[Any], samples: SampleOptions = SampleOptions(), **options: Any) -> Corpus:  # noqa: B008
        path = write_records(tmp_path / "chats.jsonl", records)
        settings = {"sequence_length": 1024, "isolate_documents": True, "heldout_fraction": 0.2, **options}
        return load_corpus(DataOptions(str(path), samples=samples, **settings), TOKENIZER, 300, tmp_path / "cache")

    return load


def pieces(columns: Columns) -> list[tuple[list[int], list[int]]]:
    """The tokens and labels of every segment, row after row; asserts that positions begin anew with each."""
    found = []
    rows = zip(*(columns[name] for name in ("input_ids", "labels", "segment_ids", "position_ids")), strict=True)
    for tokens, labels, segments, positions in rows:
        last = max(segments)
        assert (np.diff(segments)[segments[1:] > 0] >= 0).all()
        for number in range(1, last + 1):
            where = segments == number
            assert positions[where].tolist() == list(range(where.sum()))
            found.append((tokens[where].tolist(), labels[where].tolist()))
        assert (labels[segments == 0] == IGNORE).all()
    return found


def given(lengths: list[int], length: int = 8, **options: Any) -> tuple[SamplePacker, list[str]]:
    """A packer, and a sample of each of these many tokens: 1, 2, … in each, the last alone scored."""
    packer = SamplePacker(TOKENIZER, GIVEN, length, SampleOptions(**options))
    records = [{"input_ids": list(range(1, n + 1)), "labels": [IGNORE] * (n - 1) + [n]} for n in lengths]
    return packer, [str(GIVEN.document(record)) for record in records]


# ---- packing ----


def test_best_fit_loses_nothing_overfills_nothing_and_leaves_little() -> None:
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(5.5, 1, 4000).astype(int), 2, 2048).tolist()
    bins = best_fit(lengths, 2048)
    assert sorted(itertools.chain(*bins)) == list(range(4000))
    assert max(sum(lengths[i] for i in numbers) for numbers in bins) <= 2048
    assert sum(lengths) / (len(bins) * 2048) > 0.995


def test_samples_share_rows_whole_with_positions_of_their_own() -> None:
    packer, documents = given([8, 5, 3, 2, 2, 2])
    columns = packer.rows(documents)
    assert columns["input_ids"].shape == (3, 8)
    assert sorted(len(tokens) for tokens, _ in pieces(columns)) == [2, 2, 2, 3, 5, 8]
    assert all(labels[-1] == len(labels) and set(labels[:-1]) <= {IGNORE} for _, labels in pieces(columns))


def test_a_sample_ends_where_it_ends_and_not_at_an_end_token_within_it() -> None:
    packer = SamplePacker(TOKENIZER, CHATS, 256, SampleOptions())
    documents = [str(CHATS.document({"messages": CHAT}))] * 2
    columns = packer.rows(documents)
    assert [int(row.max()) for row in columns["segment_ids"]] == [2]
    tokens = TOKENIZER.apply_chat_template(CHAT, return_dict=False)
    assert [found for found, _ in pieces(columns)] == [tokens, tokens]
    assert tokens.count(TOKENIZER.eos_token_id) == 4


def test_without_packing_each_sample_has_a_row() -> None:
    packer, documents = given([5, 3, 2], packing=False)
    columns = packer.rows(documents)
    assert [len(tokens) for tokens, _ in pieces(columns)] == [5, 3, 2]
    assert len(columns["input_ids"]) == 3


# ---- overflow ----


@pytest.mark.parametrize(
    ("policy", "kept", "counted"),
    [
        ("truncate_right", [[1, 2, 3]], {"truncate_right": 1, "without target": 1}),
        ("truncate_left", [[1, 2, 3], list(range(5, 13))], {"truncate_left": 1, "without target": 0}),
        ("drop", [[1, 2, 3]], {"drop": 1, "without target": 0}),
        ("split", [[1, 2, 3], [9, 10, 11, 12]], {"split": 1, "without target": 0}),
    ],
)
def test_what_does_not_fit_is_cut_as_asked_and_counted(policy: str, kept: list[Any], counted: dict[str, int]) -> None:
    """The long sample's one target is its last token: cut at its end, or in its first half, it has none."""
    packer, documents = given([3, 12], overflow=policy)
    assert sorted(tokens for tokens, _ in pieces(packer.rows(documents))) == sorted(kept)
    assert {name: packer.tally[name] for name in counted} == counted
    assert packer.tally["samples"] == 2


def test_a_sample_that_does_not_fit_can_be_an_error_that_says_where(load: Callable[..., Corpus]) -> None:
    with pytest.raises(UserError, match=r"chats\.jsonl, row 4: a sample of \d+ tokens"):
        load([*chats(3, 2), *chats(30, 200)[-1:]], SampleOptions(overflow="error"), sequence_length=256)


# ---- corpora ----


@pytest.mark.parametrize("streaming", [False, True])
def test_every_chat_comes_once_an_epoch_also_after_a_kill(load: Callable[..., Corpus], streaming: bool) -> None:
    records = chats(200)
    corpus = load(records, streaming=streaming, shuffle_rows=7)
    rows = corpus.train
    in_an_epoch = len(rows.first(1000)["input_ids"]) if isinstance(rows, StreamedRows) else len(rows)
    batches, seen = TrainingBatches(rows, 1, seed=0), []
    for _ in range(in_an_epoch):
        seen.append(next(batches))
        if len(seen) == 9:
            cursor, batches = batches.state_dict(), TrainingBatches(rows, 1, seed=0)
            batches.load_state_dict(json.loads(json.dumps(cursor)))
    columns = {name: np.concatenate([batch[name].numpy() for batch in seen]) for name in seen[0]}
    trained = [TOKENIZER.decode(tokens) for tokens, _ in pieces(columns)]
    held = [TOKENIZER.decode(t) for t, _ in pieces(corpus.heldout.dataset.with_format("numpy")[:])]
    assert 20 < len(held) < 60
    expected = [TOKENIZER.apply_chat_template(record["messages"], tokenize=False) for record in records]
    assert sorted([*trained, *held]) == sorted(expected)


def test_what_was_recognised_and_cut_is_said_also_from_the_cache(load: Callable[..., Corpus]) -> None:
    first, long = load(chats(60, 60), sequence_length=512), 0
    for record in chats(60, 60):
        long += len(TOKENIZER.apply_chat_template(record["messages"], return_dict=False)) > 512
    assert first.notes[0] == "records with messages; trained on: the assistant's turns"
    assert f"samples longer than 512 tokens, cut at their end: {long}" in first.notes
    assert load(chats(60, 60), sequence_length=512).notes == first.notes
    assert load(chats(60), SampleOptions(train_on_prompt=True)).notes[0].endswith("trained on: every token")


def test_a_bad_row_is_named_by_file_row_and_column_or_skipped_and_counted(load: Callable[..., Corpus]) -> None:
    records = chats(50)
    records[7]["messages"][1]["content"] = ""
    with pytest.raises(UserError, match=r"chats\.jsonl, row 8, column messages: message 2 \(assistant\) is empty"):
        load(records)
    notes = load(records, SampleOptions(on_bad_row="skip")).notes
    assert {"bad rows, left out: 1", "  of them 1, messages: message 2 (assistant) is empty"} <= {*notes}


def test_held_out_chats_are_scored_on_the_answers_alone(load: Callable[..., Corpus]) -> None:
    batch = next(heldout_batches(load(chats(60)).heldout, 2))
    scored = [
        TOKENIZER.decode(row[labels != IGNORE]) for row, labels in zip(batch["input_ids"], batch["labels"], strict=True)
    ]
    assert all("!" in text and "?" not in text for text in scored)


def test_chats_need_rows_that_keep_them_apart_and_a_tokenizer(load: Callable[..., Corpus], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="isolate_documents=False"):
        load(chats(9), isolate_documents=False)
    path = write_records(tmp_path / "tokens.jsonl", [{"input_ids": [1, 2, 3]}] * 9)
    options = DataOptions(str(path), 64, isolate_documents=True)
    with pytest.raises(UserError, match="without a tokenizer"):
        load_corpus(options, None, 300, tmp_path / "cache")


@pytest.mark.parametrize("streaming", [False, True])
def test_a_model_without_a_tokenizer_gets_one_of_the_chats_that_writes_them_as_chatml(
    streaming: bool, tmp_path: Path
) -> None:
    path = write_records(tmp_path / "chats.jsonl", chats(60))
    options = DataOptions(str(path), 256, isolate_documents=True, streaming=streaming)
    corpus = load_corpus(options, None, 400, tmp_path / "cache")
    assert any("template chatml" in note and "turns end with <|im_end|>" in note for note in corpus.notes)
    assert 257 < len(corpus.tokenizer) <= 400
    row = corpus.heldout.dataset[0]
    labels = np.array(row["labels"])
    answers = corpus.tokenizer.decode(labels[labels >= 0]).split("<|im_end|>")
    assert all("!" in answer for answer in answers[:-1]), "answers alone, each up to its end"
    assert corpus.tokenizer.decode(row["input_ids"]).startswith("<|im_start|>user\n")
