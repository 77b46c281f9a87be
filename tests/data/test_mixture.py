"""Mixtures: each dataset gives its share, its rows come once before any comes again, and a run goes on exactly."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwright.data.audit import audit
from shardwright.data.corpus import Corpus, DataOptions, load_corpus
from shardwright.data.rows.batches import TrainingBatches
from shardwright.data.rows.mixture import MixedRows, shares, sources_of
from shardwright.data.samples.samples import SampleOptions
from shardwright.errors import UserError
from shardwright.models.ops.labels import IGNORE
from tests.support.chats import CHATML, byte_tokenizer, chats, write_records
from tests.support.texts import TEXTS, write_jsonl

TOKENIZER = byte_tokenizer(CHATML, "<|im_end|>")


def load(path: Path, weights: tuple[float, float] = (0.7, 0.3), **options: Any) -> Corpus:
    """Texts and chats, mixed."""
    texts = write_jsonl(path / "texts.jsonl", TEXTS[:120])
    talks = write_records(path / "chats.jsonl", chats(90, 10))
    settings = {"sequence_length": 256, "isolate_documents": True, "heldout_fraction": 0.2, **options}
    dataset = f"{texts}:{weights[0]},{talks}:{weights[1]}"
    return load_corpus(DataOptions(dataset, **settings), TOKENIZER, 300, path / "cache")


def row_of(batch: Any) -> bytes:
    return batch["input_ids"][0].numpy().tobytes()


def is_chat(batch: Any) -> bool:
    return bool((batch["labels"] == IGNORE).sum() > 20)


# ---- what is asked for ----


def test_a_mixture_is_told_from_paths_and_from_configurations(tmp_path: Path) -> None:
    both = sources_of("a.jsonl:0.7,some/id@main:configuration:3")
    assert [(source.dataset, source.share) for source in both] == [
        ("a.jsonl", 189),
        ("some/id@main:configuration", 811),
    ]
    for whole in ("some/id:0.7", "some/id:configuration", "x.jsonl"):
        assert [source.dataset for source in sources_of(whole)] == [whole]
    odd = write_jsonl(tmp_path / "a:0.5,b:0.5")
    assert [source.dataset for source in sources_of(str(odd))] == [str(odd)]
    colon = write_jsonl(tmp_path / "c:d.jsonl")
    assert sources_of(f"{colon}:1,x.jsonl:2")[0].dataset == str(colon)


@pytest.mark.parametrize(
    ("dataset", "found"),
    [
        ("a.jsonl,b.jsonl:1", "without a weight: a.jsonl"),
        ("a:0,b:1", "weights 0.0, 1.0"),
        ("a:0,b:0", "weights 0.0, 0.0"),
        ("a:1e400,b:1", "weights inf, 1.0"),
        ("a:1,b:9999", "would give"),
    ],
)
def test_a_mixture_that_can_not_be_is_refused(dataset: str, found: str) -> None:
    with pytest.raises(UserError, match=found):
        sources_of(dataset)


def test_a_mixture_with_some_weights_offers_one_for_each() -> None:
    with pytest.raises(UserError) as refused:
        sources_of("a.jsonl,b.jsonl:1")
    assert refused.value.instead == "--dataset b.jsonl:1,a.jsonl:0.5"


def test_without_weights_each_dataset_is_taken_once_in_an_epoch_and_streams_need_some(tmp_path: Path) -> None:
    both = [write_jsonl(tmp_path / "texts.jsonl", TEXTS[:120]), write_records(tmp_path / "chats.jsonl", chats(30, 10))]
    options = DataOptions(",".join(map(str, both)), sequence_length=256, isolate_documents=True, heldout_fraction=0.2)
    corpus = load_corpus(options, TOKENIZER, 300, tmp_path / "cache")
    assert isinstance(corpus.train, MixedRows)
    counts = [len(rows.dataset) for rows in corpus.train.sources]
    assert corpus.train.shares == shares(counts)
    assert corpus.train.rows == pytest.approx(sum(counts), rel=0.02)
    assert sum("taken 1.0" in note for note in corpus.notes) == 2
    with pytest.raises(UserError, match=r"(?s)without|no weights.*:1,.*:1; or no --streaming"):
        load_corpus(replace(options, streaming=True), TOKENIZER, 300, tmp_path / "cache")
    assert [source.share for source in audit(options, TOKENIZER).sources if not source.heldout] == pytest.approx(
        [count / sum(counts) for count in counts], abs=0.02
    )


def test_shares_are_the_nearest_thousandths() -> None:
    assert shares([0.7, 0.3]) == [700, 300]
    assert shares([1, 1, 1]) == [334, 333, 333]
    assert shares([5, 0.01]) == [998, 2]


# ---- what is drawn ----


@pytest.mark.parametrize("streaming", [False, True])
def test_each_source_gives_its_share_and_no_row_comes_again_before_all_of_its_source_came(
    tmp_path: Path, streaming: bool
) -> None:
    corpus = load(tmp_path, streaming=streaming, shuffle_rows=16)
    batches = TrainingBatches(corpus.train, 1, seed=0)
    drawn = list(itertools.islice(batches, 1000))
    assert abs(sum(map(is_chat, drawn)) - 300) <= 2, "a row of chats may be scored almost whole"
    for kind in (True, False):
        rows = [row_of(batch) for batch in drawn if is_chat(batch) == kind]
        size = len({*rows})
        assert size > 10
        # streamed texts are joined across epochs, so that their rows are cut elsewhere in the second
        times = [Counter(rows[n : n + size]) for n in range(0, 1 if streaming else len(rows) - size, size)]
        assert all(set(counts.values()) == {1} for counts in times) or streaming
        if not streaming:
            assert all(counts.keys() == set(rows) for counts in times)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_mixture_goes_on_exactly_and_draws_as_the_seed_says(tmp_path: Path, streaming: bool) -> None:
    corpus = load(tmp_path, streaming=streaming, shuffle_rows=16)
    batches, other = (TrainingBatches(corpus.train, 4, seed=seed) for seed in (0, 1))
    drawn, cursors, again = [], [], []
    for _ in range(40):
        cursors.append(json.loads(json.dumps(batches.state_dict())))
        drawn.append(next(batches))
    assert [row_of(next(other)) for _ in range(8)] != [row_of(batch) for batch in drawn[:8]]
    for start, batch_size in ((0, 4), (13, 4), (26, 2)):
        again = TrainingBatches(corpus.train, batch_size, seed=0)
        again.load_state_dict(cursors[start])
        rows = np.concatenate([next(again)["input_ids"].numpy() for _ in range((40 - start) * 4 // batch_size)])
        assert (rows == np.concatenate([batch["input_ids"].numpy() for batch in drawn[start:]])).all()
    assert batches.epoch >= 1


def test_an_epoch_is_over_when_the_last_source_was_gone_through(tmp_path: Path) -> None:
    corpus = load(tmp_path, (0.2, 0.8))
    rows = corpus.train
    assert isinstance(rows, MixedRows)
    batches = TrainingBatches(rows, 1, seed=0)
    epoch = [row_of(batch) for batch in itertools.takewhile(lambda _: batches.epoch < 1, batches)]
    texts = {np.array(row, dtype=np.int64).tobytes() for row in rows.sources[0].dataset["input_ids"]}
    assert len(texts - set(epoch)) <= 1, "the row that ends the epoch is not in it"
    assert rows.tokens is not None
    assert abs(len(epoch) - rows.tokens / 256) < 60, "as long as it says, but for the order within a thousand rows"


# ---- beside it ----


def test_what_is_held_out_is_each_sources_own_and_the_notes_say_what_each_gives(tmp_path: Path) -> None:
    corpus = load(tmp_path)
    text = TOKENIZER.decode(list(itertools.chain(*corpus.heldout.dataset["input_ids"])))
    assert "Story" in text
    assert "<|im_start|>assistant" in text
    first = next(note for note in corpus.notes if "texts.jsonl" in note)
    assert "texts.jsonl: 70.0% of the rows" in first
    assert "times in an epoch" in first
    corpus.check_fits(256, 300)
    with pytest.raises(UserError, match="rows of 256"):
        corpus.check_fits(128, 300)


@pytest.mark.parametrize("streaming", [False, True])
def test_held_out_sets_are_made_into_rows_as_the_source_of_their_kind_and_others_are_refused(
    tmp_path: Path, streaming: bool
) -> None:
    """A mixture of texts and chats holds out sets of both kinds, or of one; the other source then holds out nothing."""
    more = {"talk": str(write_records(tmp_path / "talk.jsonl", chats(20, 5))), "word": str(tmp_path / "word.jsonl")}
    write_jsonl(tmp_path / "word.jsonl", TEXTS[200:])
    both = load(tmp_path, streaming=streaming, eval_dataset=more)
    alone = {
        name: load_corpus(replace(_of(path), isolate_documents=True), TOKENIZER, 300) for name, path in more.items()
    }
    assert list(both.heldout_sets) == ["talk", "word"]
    assert "labels" in both.heldout_sets["word"].dataset.column_names, "all rows have the same columns"
    for name, corpus in alone.items():
        wanted = corpus.heldout.dataset["input_ids"]
        assert list(both.heldout_sets[name].dataset["input_ids"]) == list(wanted)
    one = load(tmp_path, streaming=streaming, eval_dataset={"": more["word"]})
    assert list(one.heldout_sets) == [""]
    assert list(one.heldout.dataset["input_ids"]) == list(both.heldout_sets["word"].dataset["input_ids"])
    if not streaming:  # nothing of the chats is held out
        assert [len(rows) for rows in one.train.sources] == [len(rows) for rows in both.train.sources]
    asked = write_records(tmp_path / "asked.jsonl", [{"prompt": "1?", "completion": "2"}] * 9)
    for refusing in (
        lambda: load(tmp_path, streaming=streaming, eval_dataset={"": str(asked)}),
        lambda: audit(_of(tmp_path / "chats.jsonl", eval_dataset={"": str(asked)}), TOKENIZER),
    ):
        with pytest.raises(UserError, match=r"prompt/completion .*, and those to train on .*messages"):
            refusing()


def _of(path: object, **options: Any) -> DataOptions:
    """A dataset that is evaluated on itself."""
    return DataOptions(str(path), sequence_length=256, **{"eval_dataset": {"": str(path)}, **options})


def test_options_without_effect_on_a_source_are_told_beside_it(tmp_path: Path) -> None:
    notes = load(tmp_path, samples=SampleOptions(overflow="drop", train_on="last")).notes
    idle = [note.strip() for note in notes if "has no effect" in note]
    assert idle == [
        "--overflow drop has no effect on texts that share rows: these are cut from them",
        "--train_on last has no effect: records of text have no turns",
    ]
    assert notes.index(f"  {idle[0]}") < next(i for i, note in enumerate(notes) if "chats.jsonl" in note)
    tokens = write_records(tmp_path / "tokens.jsonl", [{"input_ids": [*range(20, 60)]}] * 30)
    samples = SampleOptions(overflow="drop", split_special_tokens=True)
    told = load_corpus(_of(tokens, samples=samples, isolate_documents=True), TOKENIZER, 300, tmp_path / "cache").notes
    assert [note for note in told if "has no effect" in note] == [
        "--split_special_tokens has no effect: the records are tokens already"
    ]


def test_a_mixture_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl")
    with pytest.raises(UserError, match="without a tokenizer"):
        load_corpus(DataOptions(f"{path}:1,{path}:1", 64), None, 300, tmp_path / "cache")


def test_the_audit_of_a_mixture_names_the_dataset_of_each_place(tmp_path: Path) -> None:
    one, two = (
        write_records(tmp_path / name / "x.jsonl", chats(5))
        for name in ("one", "two")
        if (tmp_path / name).mkdir() is None
    )
    found = audit(DataOptions(f"{one}:1,{two}:3", 512, isolate_documents=True), TOKENIZER)
    assert [source.share for source in found.sources] == [0.25, 0.75]
    assert found.findings["duplicate"].places[0] == (f"{two}: x.jsonl, row 1", f"as {one}: x.jsonl, row 1")
