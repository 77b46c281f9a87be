"""Streamed rows: of every kind of dataset, nothing stored, held-out documents kept apart, and what ends a stream."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from shardwright.data.corpus import Corpus, DataOptions, load_corpus
from shardwright.data.records.document_stream import DocumentStream, find_stream, key_hash
from shardwright.data.rows.batches import TrainingBatches
from shardwright.data.rows.packing import Packer
from shardwright.data.rows.row_stream import StreamedRows, StreamPosition
from shardwright.data.rows.rows import StoredRows
from shardwright.data.unigram import unigram_loss
from shardwright.errors import UserError
from shardwright.objectives.objective import text_shape
from tests.support.lives import TINY
from tests.support.small_hub import COMMIT, small_hub, write_hub_cache
from tests.support.texts import (
    BAD,
    TEXTS,
    load_small,
    run_python,
    write_arrow,
    write_csv,
    write_folder,
    write_json,
    write_jsonl,
    write_parquet,
    write_record_folder,
    write_text,
    written,
)
from tests.support.training import train

TEXT = [text_shape()]


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Corpus]:
    return partial(load_small, tmp_path / "cache", streaming=True, shuffle_rows=50, heldout_fraction=0.2)


def first_epoch(rows: Any) -> list[list[int]]:
    batches = TrainingBatches(rows, 1, seed=0)
    return [b["input_ids"][0].tolist() for b in itertools.takewhile(lambda _: batches.epoch < 1, batches)]


# ---- sources ----


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (write_jsonl, "texts.jsonl"),
        (write_json, "texts.json"),
        (write_parquet, "texts.parquet"),
        (write_arrow, "texts.arrow"),
        (write_csv, "texts.csv"),
        (write_text, "texts.txt"),
        (write_folder, "folder"),
        (write_record_folder, "records"),
    ],
)
def test_every_kind_of_local_dataset_is_streamed_whole(
    load: Callable[..., Corpus], tmp_path: Path, write: Callable[[Path], Path], name: str
) -> None:
    corpus = load(write(tmp_path / name))
    assert corpus.train.tokens is None
    whole = corpus.train.first(100_000)["input_ids"]  # in the order of the documents: shuffled rows cut their text
    text = corpus.tokenizer.decode([*whole.ravel(), *itertools.chain(*corpus.heldout.dataset["input_ids"])])
    assert sum(f"Story {i}.\n" in text for i in range(300)) >= 297


def test_the_first_epoch_of_one_file_has_the_rows_that_stored_data_have(
    load: Callable[..., Corpus], tmp_path: Path
) -> None:
    folder = tmp_path / "dataset"
    write_jsonl(folder / "train.jsonl", TEXTS[:250])
    write_jsonl(folder / "validation.jsonl", TEXTS[250:])
    stored = load_small(tmp_path / "cache", folder)
    streamed = load(folder, tokenizer=stored.tokenizer)
    assert sorted(first_epoch(streamed.train)) == sorted(stored.train.dataset["input_ids"][:])
    assert streamed.heldout.dataset["input_ids"][:] == stored.heldout.dataset["input_ids"][:]
    assert streamed.heldout.dataset.features == stored.heldout.dataset.features


def test_a_hub_dataset_is_streamed_and_known_by_its_commit(tmp_path: Path) -> None:
    """Read by `datasets` itself, offline, from its cache."""
    environment = write_hub_cache(tmp_path / "hub", {"train": TEXTS[:200], "validation": TEXTS[200:]})
    script = """if True:
        from shardwright.data.records.document_stream import find_stream
        from shardwright.objectives.objective import text_shape
        stream = find_stream("someone/stories:default", [text_shape()])
        print(stream.identity, len(list(stream.documents())), len(list(stream.heldout[""].documents())), sep="|")
        print([text for key, text in stream.read(0, 197)])"""
    first, second = run_python(script, **environment).splitlines()
    assert first == f"someone/stories@{COMMIT}:default, text|200|100"
    assert second == str(TEXTS[197:200])


@pytest.mark.parametrize(
    "write", [write_jsonl, write_json, write_parquet, write_arrow, write_csv, write_text], ids=lambda f: f.__name__
)
def test_a_stream_is_read_from_any_document_on(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    """`datasets` skips exactly so many records in each kind of file, however many it reads at once."""
    stream = find_stream(str(write(tmp_path / f"texts.{write.__name__.removeprefix('write_')}")), TEXT)
    whole = list(stream.documents())
    for document in (0, 1, 9, len(whole) - 1, len(whole)):
        assert list(stream.read(0, document)) == whole[document:]


def test_nothing_of_a_stream_is_written_but_its_tokenizer(load: Callable[..., Corpus], tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "texts.jsonl")
    script = f"""if True:
        from shardwright.data.rows.batches import TrainingBatches
        from shardwright.data.corpus import DataOptions, load_corpus
        corpus = load_corpus(DataOptions({str(data)!r}, sequence_length=32, streaming=True), None, 300)
        batches = TrainingBatches(corpus.train, 4, seed=0)
        while batches.epoch < 2:
            next(batches)"""
    places = {"SHARDWRIGHT_CACHE": tmp_path / "ours", "HF_HOME": tmp_path / "theirs", "TMPDIR": tmp_path / "temporary"}
    places["TMPDIR"].mkdir()
    run_python(script, **{name: str(place) for name, place in places.items()})
    written = [path.name for place in places.values() for path in place.rglob("*") if path.is_file()]
    assert sorted(written) == ["checksums.json", "tokenizer.json"]


@pytest.mark.parametrize("kind", ["records in memory", "a file of the same size"])
def test_a_tokenizer_trained_on_a_stream_is_of_its_own_texts(tmp_path: Path, kind: str) -> None:
    found = []
    for word in ("abab", "xyxy"):
        texts = [f"{word} {word} {number}" for number in range(100, 300)]
        data: Any = write_jsonl(tmp_path / "texts.jsonl", texts)
        if kind == "records in memory":
            data = Dataset.from_dict({"text": texts}).to_iterable_dataset()
        options = DataOptions(data if kind == "records in memory" else str(data), sequence_length=32, streaming=True)
        found.append(load_corpus(replace(options, heldout_fraction=0.2), None, 300, tmp_path / "cache").tokenizer)
    assert [len(tokenizer.tokenize("xyxy xyxy")) for tokenizer in found] == [9, 2]


# ---- order ----


def endless(read_so_far: list[int]) -> DocumentStream:
    """Documents without end, each of two words; the numbers of those that were read go to ``read_so_far``."""

    def read(part: int, document: int) -> Iterator[tuple[str, str]]:
        for number in itertools.count(document):
            read_so_far.append(number)
            yield str(number), f"{number} {number}"

    return DocumentStream("an endless stream", "endless", 1, read)


def rows_of(stream: DocumentStream, corpus: Corpus, shuffle_rows: int) -> StreamedRows:
    return StreamedRows(
        stream, partial(Packer, corpus.tokenizer, 32, False), frozenset(), shuffle_rows, stream.identity
    )


def test_a_stream_without_end_is_trained_on_and_read_two_windows_ahead_at_most(
    load: Callable[..., Corpus], tmp_path: Path
) -> None:
    corpus = load(write_jsonl(tmp_path / "texts.jsonl"))
    read: list[int] = []
    batches = TrainingBatches(rows_of(endless(read), corpus, 8), 4, seed=0)
    tokens = sum(next(batches)["input_ids"].numel() for _ in range(20))
    assert batches.epoch == 0
    most = (tokens + 2 * 8 * 32) / 3 + 256  # three tokens a document at least, and one group of documents
    assert len(read) < most
    assert read == list(range(len(read)))


def test_a_stream_goes_on_with_its_next_epoch_if_one_is_left_early_also_from_a_cursor(
    load: Callable[..., Corpus], tmp_path: Path
) -> None:
    rows = load(write_jsonl(tmp_path / "texts.jsonl")).train
    batches, gone_on = TrainingBatches(rows, 4, seed=0), TrainingBatches(rows, 4, seed=0)
    for _ in range(3):
        next(batches)
    batches.skip_epoch()
    assert batches.epoch == 1
    gone_on.load_state_dict(batches.state_dict())
    for _ in range(20):  # more than a window
        assert torch.equal(next(batches)["input_ids"], next(gone_on)["input_ids"])


def test_rows_are_mixed_within_a_window_and_parts_between_epochs(load: Callable[..., Corpus], tmp_path: Path) -> None:
    rows = load(write_jsonl(tmp_path / "texts.jsonl"), shuffle_rows=20).train
    batches, read = TrainingBatches(rows, 20, seed=0), rows.first(60)["input_ids"].tolist()
    for window in (read[:20], read[20:40], read[40:]):
        drawn = next(batches)["input_ids"].tolist()
        assert drawn != window
        assert sorted(drawn) == sorted(window)

    parts = load(write_folder(tmp_path / "folder"), shuffle_rows=100_000).train
    windows = list(itertools.islice(parts.windows(0, 0, 0, StreamPosition(), 1), 2))
    first, second = ({tuple(row) for row in window.columns["input_ids"].tolist()} for window in windows)
    assert len(first & second) < len(first) / 2, "documents follow others, and rows cut them elsewhere"


@pytest.mark.slow
def test_a_run_trains_on_a_stream_from_its_command_line(tmp_path: Path) -> None:
    """400 files, read several times over in 30 steps of 8 rows, by a model of one small layer."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(TINY | {"num_hidden_layers": 1}))
    for i in range(400):
        written(tmp_path / "text" / f"{i}.txt", f"{i} and {i} makes {i + i}, {i} times {i} makes {i * i}.".encode())
    arguments = ["--recipe", "llama_fsdp", "--dataset", tmp_path / "text", "--streaming", "--shuffle_rows", 20]
    arguments += ["--model", config, "--compute", "scan=False,remat=none,attention=sdpa", "--learning_rate", 3e-3]
    sizes = ["--sequence_length", 64, "--max_steps", 30, "--warmup_steps", 2, "--output_dir", tmp_path / "out"]
    done = train(*arguments, *sizes)
    assert done.returncode == 0, done.stderr
    assert "a stream to train on" in done.stdout
    state = json.loads((tmp_path / "out" / "trainer_state.json").read_text())
    before, after = (entry["eval_loss"] for entry in state["log_history"] if "eval_loss" in entry)
    assert after < before
    assert state["epoch"] >= 1


# ---- held-out documents ----


def test_held_out_documents_are_never_trained_on_wherever_they_come_again(
    load: Callable[..., Corpus], tmp_path: Path
) -> None:
    texts = [f"number {i} " * 8 for i in range(200)]
    corpus = load(write_jsonl(tmp_path / "texts.jsonl", texts + texts))
    held = {i for i in range(200) if key_hash(texts[i]) < 0.2 * 2**63}
    assert len(held) > 20
    trained_text = corpus.tokenizer.decode(corpus.train.first(10_000)["input_ids"].ravel())
    heldout_text = corpus.tokenizer.decode(list(itertools.chain(*corpus.heldout.dataset["input_ids"])))
    trained, heldout = ({int(i) for i in re.findall(r"number (\d+) ", text)} for text in (trained_text, heldout_text))
    assert trained == set(range(200)) - held
    assert heldout == held


def test_held_out_rows_are_bounded_and_documents_beyond_them_are_trained_on(
    load: Callable[..., Corpus], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwright.data.rows.heldout_rows.HELDOUT_ROWS", 7)
    corpus = load(write_jsonl(tmp_path / "texts.jsonl"))
    assert len(corpus.heldout) == 7
    assert 0 < len(corpus.train.left_out) < 20


def test_the_unigram_model_of_a_stream_is_that_of_its_stored_rows(load: Callable[..., Corpus], tmp_path: Path) -> None:
    corpus = load(write_jsonl(tmp_path / "texts.jsonl"))
    stored = StoredRows(Dataset.from_dict({"input_ids": corpus.train.first(10_000)["input_ids"].tolist()}))
    assert len(stored) < 1024
    assert unigram_loss(corpus.train, corpus.heldout, 300) == unigram_loss(stored, corpus.heldout, 300)


# ---- bad input ----


@pytest.mark.parametrize("case", BAD)
def test_bad_streams_are_refused_with_what_was_found(load: Callable[..., Corpus], tmp_path: Path, case: str) -> None:
    dataset = BAD[case][0](tmp_path)
    with pytest.raises(UserError) as error:
        load(dataset)
    assert str(dataset) in error.value.asked
    assert all([error.value.found, error.value.why, error.value.instead])


def test_a_stream_that_ends_before_a_batch_is_refused_when_it_ends(load: Callable[..., Corpus], tmp_path: Path) -> None:
    corpus = load(write_jsonl(tmp_path / "texts.jsonl"))
    count = len(first_epoch(corpus.train))
    next(TrainingBatches(corpus.train, count, seed=0))
    batches = TrainingBatches(corpus.train, count + 1, seed=0)
    for _ in range(2):  # asked again, it does not end as if all were well
        with pytest.raises(UserError, match=f"ended after {count} rows"):
            next(batches)


def test_a_stream_that_became_shorter_is_refused_by_a_cursor_beyond_its_end(
    load: Callable[..., Corpus], tmp_path: Path
) -> None:
    corpus = load(write_jsonl(tmp_path / "texts.jsonl"))
    batches = TrainingBatches(corpus.train, 4, seed=0)
    for _ in range(50):
        next(batches)
    write_jsonl(tmp_path / "texts.jsonl", TEXTS[:30])
    again = TrainingBatches(corpus.train, 4, seed=0)
    again.load_state_dict(batches.state_dict())
    with pytest.raises(UserError, match="the stream ends before it"):
        next(again)


def test_a_folder_of_a_hub_dataset_is_read_alone(tmp_path: Path) -> None:
    with small_hub(b'{"question": "a", "answer": "b"}\n') as hub:
        hub.file = "data/rl/train.jsonl"
        script = """if True:
            from shardwright.data.records.document_stream import find_stream
            from shardwright.arguments.training import TrainingArguments
            reads = TrainingArguments(columns="instruction=question,output=answer").reads
            for stored in (False, True):
                stream = find_stream("someone/stories/data/rl", reads, stored=stored)
                print(stream.identity, *(text for _, text in stream.documents()), sep="|")"""
        first, second = run_python(script, HF_HOME=str(tmp_path), **hub.environment).splitlines()
    columns, document = "instruction=question, output=answer", '{"instruction": "a", "output": "b"}'
    assert first == f"someone/stories@{COMMIT}/data/rl, {columns}|{document}"
    assert second == f"someone/stories, {columns}|{document}"


# the two of `datasets.config` that it sets are semi-private: datasets/config.py, datasets 5.2
STEPS_OF_A_RUN = """if True:
    import hashlib, json, os, urllib.request, datasets
    from shardwright.data.rows.batches import TrainingBatches
    from shardwright.data.corpus import DataOptions, load_corpus
    from shardwright.errors import UserError
    from transformers import PreTrainedTokenizerFast
    datasets.config.STREAMING_READ_MAX_RETRIES, datasets.config.STREAMING_READ_RETRY_INTERVAL = 1, 0
    tokenizer = PreTrainedTokenizerFast.from_pretrained(TOKENIZER)
    options = DataOptions(DATASET, sequence_length=32, streaming=True, shuffle_rows=100)
    corpus = load_corpus(options, tokenizer, len(tokenizer))
    urllib.request.urlopen(os.environ["HF_ENDPOINT"] + "/limit/" + LIMIT)
    batches = TrainingBatches(corpus.train, 16, seed=0)
    if CURSOR:
        batches.load_state_dict(CURSOR)
    seen, said = [], ""
    try:
        for _ in range(STEPS):
            seen.append(hashlib.sha256(next(batches)["input_ids"].numpy()).hexdigest())
    except UserError as error:
        said = str(error)
    print(json.dumps([seen, said, batches.state_dict()]))
"""


def test_a_hub_that_is_lost_stops_the_run_with_the_cause_and_it_goes_on_later_as_if_never_stopped(
    load: Callable[..., Corpus], tmp_path: Path
) -> None:
    tokenizer = str(tmp_path / "tokenizer")
    load(write_jsonl(tmp_path / "texts.jsonl")).tokenizer.save_pretrained(tokenizer)
    # so large that it is read in several parts, though little of it is text
    records = [{"text": f"{i} {text}", "other": "x" * 10_000} for i in range(10) for text in TEXTS]
    with small_hub("".join(json.dumps(record) + "\n" for record in records).encode()) as hub:

        def steps_of_a_run(
            steps: int, cursor: dict[str, Any], dataset: str = "someone/stories", limit: int = 1 << 40
        ) -> tuple[list[str], str, dict[str, Any]]:
            hub.limit = 1 << 40
            script = f"DATASET, TOKENIZER, STEPS, CURSOR, LIMIT = {(dataset, tokenizer, steps, cursor, str(limit))}\n"
            return json.loads(run_python(script + STEPS_OF_A_RUN, HF_HOME=str(tmp_path / "hub"), **hub.environment))

        whole, said, cursor = steps_of_a_run(400, {})
        assert (len(whole), said) == (400, "")
        assert cursor["data"].startswith(f"someone/stories@{COMMIT}, text")
        seen, said, cursor = steps_of_a_run(400, {}, limit=15 << 20)
        assert 0 < len(seen) < 400
        assert "the stream broke off" in said
        rest, said, _ = steps_of_a_run(400 - len(seen), cursor, dataset=f"someone/stories@{COMMIT}")
        assert said == ""
        assert seen + rest == whole
