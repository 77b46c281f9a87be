"""--max_samples and --eval_dataset: the first documents alone, and others held out, stored and streamed."""

from __future__ import annotations

from pathlib import Path

import pytest
from datasets import Dataset

from shardwright.data.corpus import Corpus, DataOptions, load_corpus
from shardwright.data.rows.row_stream import StreamedRows
from shardwright.errors import UserError
from tests.support.chats import CHATML, byte_tokenizer, chats, write_records
from tests.support.texts import TEXTS, write_jsonl

TOKENIZER = byte_tokenizer(CHATML)
pytestmark = pytest.mark.parametrize("streaming", [False, True])


def load(path: Path, dataset: Path, streaming: bool, **options) -> Corpus:
    settings = {"sequence_length": 64, "heldout_fraction": 0.2, "streaming": streaming, **options}
    return load_corpus(DataOptions(str(dataset), **settings), TOKENIZER, 300, path / "cache")


def texts_of(corpus: Corpus) -> tuple[str, str]:
    """What is trained on, and what is held out."""
    rows = corpus.train
    train = rows.first(10_000)["input_ids"] if isinstance(rows, StreamedRows) else rows.dataset["input_ids"][:]
    return tuple(
        TOKENIZER.decode([int(t) for row in x for t in row]) for x in (train, corpus.heldout.dataset["input_ids"])
    )


def stories(text: str) -> set[int]:
    return {i for i in range(300) if f"Story {i}." in text}


def test_the_first_documents_alone_are_read(tmp_path: Path, streaming: bool) -> None:
    folder = tmp_path / "folder"
    write_jsonl(folder / "a.jsonl", TEXTS[:30])
    write_jsonl(folder / "b.jsonl", TEXTS[30:])
    train, held = texts_of(load(tmp_path, folder, streaming, max_samples=50))
    found = stories(train + held)
    assert found <= set(range(50))
    assert len(found) >= 48, "at most an unfinished row of either is lost"
    assert stories(held)


def test_what_is_evaluated_is_the_other_dataset_and_all_of_this_is_trained_on(tmp_path: Path, streaming: bool) -> None:
    other = write_jsonl(tmp_path / "other.jsonl", TEXTS[200:])
    dataset = write_jsonl(tmp_path / "texts.jsonl", TEXTS[:200])
    train, held = texts_of(load(tmp_path, dataset, streaming, eval_dataset={"": str(other)}))
    assert stories(train) >= set(range(199))
    assert not stories(train) & set(range(200, 300))
    assert stories(held) >= set(range(200, 299))
    limited = load(tmp_path, dataset, streaming, eval_dataset={"": str(other)}, max_samples=20)
    assert [stories(text) & {0, 150, 250} for text in texts_of(limited)] == [{0}, {250}]


def test_sets_that_have_names_are_held_out_each_by_itself(tmp_path: Path, streaming: bool) -> None:
    dataset = write_jsonl(tmp_path / "texts.jsonl", TEXTS[:200])
    sets = {"b": write_jsonl(tmp_path / "b.jsonl", TEXTS[200:250]), "a": write_jsonl(tmp_path / "a.jsonl", TEXTS[250:])}
    corpus = load(tmp_path, dataset, streaming, eval_dataset={name: str(path) for name, path in sets.items()})
    held = {
        name: stories(TOKENIZER.decode([t for row in rows.dataset["input_ids"] for t in row]))
        for name, rows in corpus.heldout_sets.items()
    }
    assert list(held) == ["b", "a"], "in the order in which they are named"
    assert held["b"] >= set(range(200, 249))
    assert held["a"] >= set(range(250, 299))
    assert not (held["a"] & held["b"]) | ((held["a"] | held["b"]) & stories(texts_of(corpus)[0]))
    assert corpus.heldout is corpus.heldout_sets["b"]


def test_records_that_python_holds_become_the_rows_that_a_file_of_them_becomes(tmp_path: Path, streaming: bool) -> None:
    records = chats(60)
    path = write_records(tmp_path / "chats.jsonl", records)
    held, options = Dataset.from_list(records), {"isolate_documents": True, "sequence_length": 512}
    ours = load_corpus(DataOptions(held, 512, streaming=streaming, isolate_documents=True), TOKENIZER, 300, tmp_path)
    theirs = load(tmp_path, path, streaming, **{**options, "heldout_fraction": 0.05})
    assert texts_of(ours) == texts_of(theirs)
    again = load_corpus(DataOptions(held, 512, streaming=streaming, isolate_documents=True), TOKENIZER, 300, tmp_path)
    assert again.train.fingerprint == ours.train.fingerprint, "a run goes on with it"
    stream = DataOptions(held.to_iterable_dataset(), 512, streaming=streaming, isolate_documents=True)
    if streaming:
        assert texts_of(load_corpus(stream, TOKENIZER, 300, tmp_path)) == texts_of(ours)
    else:
        with pytest.raises(UserError, match="streaming=True, or a Dataset"):
            load_corpus(stream, TOKENIZER, 300, tmp_path)


def test_an_evaluation_of_another_shape_is_refused(tmp_path: Path, streaming: bool) -> None:
    other = write_records(tmp_path / "chats.jsonl", chats(9))
    with pytest.raises(UserError, match=r"its records are messages \(messages\)"):
        load(tmp_path, write_jsonl(tmp_path / "texts.jsonl"), streaming, eval_dataset={"": str(other)})


def test_a_bad_row_to_evaluate_on_is_named_by_its_file(tmp_path: Path, streaming: bool) -> None:
    records = chats(9)
    records[4]["messages"] = []
    other, dataset = (write_records(tmp_path / f"{n}.jsonl", r) for n, r in (("other", records), ("chats", chats(20))))
    with pytest.raises(UserError, match=r"other\.jsonl, row 5, column messages: nothing"):
        load(tmp_path, dataset, streaming, eval_dataset={"": str(other)}, isolate_documents=True, sequence_length=512)
