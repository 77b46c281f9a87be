"""Tokenizer, rows and batches: deterministic, complete, cached and resumable."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import datasets
import pyarrow as pa
import pytest
import torch
from datasets import Dataset

from tests.support.texts import TEXTS, documents_of, load_small, run_python, write_folder, write_jsonl
from trainer.cache import cached
from trainer.data.batches import TrainingBatches, heldout_batches
from trainer.data.corpus import Corpus, load_corpus
from trainer.data.tokenizer import END_OF_TEXT
from trainer.data.unigram import unigram_loss
from trainer.errors import UserError

EOS = 0  # the only special token of a tokenizer that is trained here


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Corpus]:
    return partial(load_small, tmp_path / "cache")


@pytest.fixture(scope="module")
def stdlib(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    cache = tmp_path_factory.mktemp("stdlib")
    return load_corpus(None, tokenizer=None, sequence_length=256, cache_dir=cache)


@pytest.fixture
def rows() -> Dataset:
    """23 rows of 4 tokens, no two tokens equal."""
    return Dataset.from_dict({"input_ids": torch.arange(23 * 4).view(23, 4).tolist()})


def tokens_of(split: Dataset) -> list[int]:
    return [token for row in split["input_ids"] for token in row]


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=0)


# ---- determinism and cache ----


def test_two_processes_make_the_same_bytes_whatever_pythons_hash_seed(tmp_path: Path) -> None:
    data = write_folder(tmp_path / "folder")
    script = f"""if True:
        import hashlib
        from trainer.data.corpus import load_corpus
        from trainer.data.batches import TrainingBatches
        corpus = load_corpus({str(data)!r}, tokenizer=None, sequence_length=32, vocab_size=400, isolate_documents=True)
        batches = TrainingBatches(corpus.train, 4, seed=1)
        seen = [corpus.tokenizer.backend_tokenizer.to_str(), corpus.train[:], corpus.heldout[:]]
        seen += [next(batches)["input_ids"].tolist() for _ in range(50)]
        print(hashlib.sha256(repr(seen).encode()).hexdigest())"""
    digests = {
        run_python(script, PYTHONHASHSEED=seed, SHARDWRIGHT_CACHE=str(tmp_path / f"cache{seed}")) for seed in "12"
    }
    assert len(digests) == 1
    assert (tmp_path / "cache1" / "rows").is_dir()


def cached_files(cache: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in cache.rglob("*") if path.is_file()}


def test_second_load_writes_nothing_and_gives_the_same(load: Callable[..., Corpus], tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "texts.jsonl")
    first, before = load(data), cached_files(tmp_path / "cache")
    second = load(data)
    assert cached_files(tmp_path / "cache") == before
    assert {path.name for path in before} == {"tokenizer.json", "train.arrow", "heldout.arrow", "rows.json"}
    assert first.train[:] == second.train[:]
    assert first.tokenizer.get_vocab() == second.tokenizer.get_vocab()


def test_cache_follows_what_it_depends_on(load: Callable[..., Corpus], tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "texts.jsonl")
    first = load(data)
    assert len(load(data, sequence_length=16).train[0]["input_ids"]) == 16
    assert len(load(data, vocab_size=310).tokenizer) > len(first.tokenizer)
    assert "segment_ids" in load(data, isolate_documents=True).train.column_names
    assert len(load(data, heldout_fraction=0.5).heldout) > len(first.heldout)
    write_jsonl(data, TEXTS[:100])
    assert len(load(data).train) < len(first.train)


@pytest.mark.parametrize("name", ["tokenizer.json", "train.arrow", "heldout.arrow", "rows.json"])
@pytest.mark.parametrize("damage", ["cut", "garbage", "gone"])
def test_corrupt_cache_is_rebuilt(load: Callable[..., Corpus], tmp_path: Path, name: str, damage: str) -> None:
    data = write_jsonl(tmp_path / "texts.jsonl")
    sound = load(data)
    train, heldout, vocabulary = sound.train[:], sound.heldout[:], sound.tokenizer.get_vocab()
    (path,) = (tmp_path / "cache").rglob(name)
    content = path.read_bytes()
    path.unlink()
    if damage != "gone":
        path.write_bytes(content[: len(content) // 2] if damage == "cut" else b"\x07" * len(content))
    again = load(data)
    assert (again.train[:], again.heldout[:], again.tokenizer.get_vocab()) == (train, heldout, vocabulary)
    assert path.read_bytes() == content


def test_cached_rows_that_are_too_few_are_packed_again(load: Callable[..., Corpus], tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "texts.jsonl")
    sound = load(data).train[:]
    (path,) = (tmp_path / "cache").rglob("train.arrow")
    table = pa.ipc.open_stream(path.read_bytes()).read_all().slice(0, 5)
    with pa.ipc.new_stream(path, table.schema) as stream:  # a whole Arrow file, as a cut between two batches leaves one
        stream.write_table(table)
    assert load(data).train[:] == sound


def test_a_process_that_was_faster_is_believed(tmp_path: Path) -> None:
    folder, scratch = tmp_path / "rows" / "key", tmp_path / "scratch"
    scratch.mkdir()

    def build(made: Path) -> None:
        (made / "rows").write_text("ours")
        folder.mkdir(parents=True)
        (folder / "rows").write_text("theirs")

    assert cached(folder, scratch, build=build, load=lambda path: (path / "rows").read_text()) == "theirs"


def test_cache_that_cannot_be_written_names_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="SHARDWRIGHT_CACHE"):
        load_small(tmp_path / "file" / "cache", write_jsonl(tmp_path / "texts.jsonl"))


def test_cache_folder_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_jsonl(tmp_path / "texts.jsonl")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("SHARDWRIGHT_CACHE", raising=False)
    load_small(None, data)
    assert (tmp_path / "xdg" / "shardwright" / "rows").is_dir()
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path / "ours"))
    load_small(None, data)
    assert (tmp_path / "ours" / "rows").is_dir()


def test_progress_bars_of_datasets_are_left_as_they_were(load: Callable[..., Corpus], tmp_path: Path) -> None:
    assert not datasets.are_progress_bars_disabled()
    with pytest.raises(UserError):
        load(write_jsonl(tmp_path / "one.jsonl", ["a single text"]))
    assert not datasets.are_progress_bars_disabled()


# ---- tokens and rows ----


def test_standard_library_makes_rows_of_python_source(stdlib: Corpus) -> None:
    assert len(stdlib.train) > 5_000
    assert len(stdlib.heldout) > 100
    assert len(stdlib.tokenizer) == 2048
    text = stdlib.tokenizer.decode(tokens_of(stdlib.train.select(range(200))))
    assert text.count("def ") > 50
    characters = len(text) / (200 * 256)
    assert characters > 2.5, "a trained BPE writes several characters with a token"


def test_packing_keeps_every_token_in_order_but_one_partial_row(load: Callable[..., Corpus], tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "texts.jsonl", [*TEXTS, *(text.upper() for text in TEXTS)])  # more than one map batch
    corpus = load(data)
    for name, documents in documents_of(data, tmp_path / "scratch").items():
        packed = tokens_of(getattr(corpus, name))
        expected = [
            token
            for text in documents["text"]
            for token in [*corpus.tokenizer.encode(text, add_special_tokens=False), corpus.tokenizer.eos_token_id]
        ]
        assert packed == expected[: len(packed)]
        assert 0 <= len(expected) - len(packed) < 32


def test_decoded_rows_are_the_text(load: Callable[..., Corpus], tmp_path: Path) -> None:
    odd = ["naïve café — 東京 🙂\r\n\ttabs  and   spaces , kept !", *TEXTS]
    corpus = load(write_jsonl(tmp_path / "odd.jsonl", odd), heldout_fraction=0.01, sequence_length=8)
    assert odd[0] + END_OF_TEXT in corpus.tokenizer.decode(tokens_of(corpus.train))


def test_trained_tokenizer_can_be_saved_and_loaded(load: Callable[..., Corpus], tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = load(write_jsonl(tmp_path / "texts.jsonl")).tokenizer
    tokenizer.save_pretrained(tmp_path / "saved")
    again = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert again.eos_token == END_OF_TEXT
    assert again.encode(TEXTS[7]) == tokenizer.encode(TEXTS[7])


def test_a_given_tokenizer_is_used(load: Callable[..., Corpus], tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "texts.jsonl")
    tokenizer = load(data, vocab_size=270).tokenizer
    corpus = load(data, tokenizer=tokenizer, vocab_size=300)
    assert corpus.tokenizer is tokenizer
    assert max(tokens_of(corpus.train)) < 270


def test_isolated_documents_number_segments_and_restart_positions(load: Callable[..., Corpus], tmp_path: Path) -> None:
    corpus = load(write_jsonl(tmp_path / "texts.jsonl"), isolate_documents=True, sequence_length=64)
    assert corpus.train.column_names == ["input_ids", "segment_ids", "position_ids"]
    for row in corpus.train:
        segment, position, previous = 1, 0, None
        for token, segment_id, position_id in zip(
            row["input_ids"], row["segment_ids"], row["position_ids"], strict=True
        ):
            if previous == EOS:
                segment, position = segment + 1, 0
            assert (segment_id, position_id) == (segment, position)
            position, previous = position + 1, token
    assert max(max(row) for row in corpus.train["segment_ids"]) > 1


def test_max_train_tokens_draws_rows_by_seed_and_leaves_the_heldout_rows(
    load: Callable[..., Corpus], tmp_path: Path
) -> None:
    data = write_jsonl(tmp_path / "texts.jsonl")
    whole, few, other = load(data), load(data, max_train_tokens=330), load(data, max_train_tokens=330, seed=1)
    assert len(few.train) == 10
    rows = whole.train["input_ids"][:]
    assert all(row in rows for row in few.train["input_ids"])
    assert few.train["input_ids"][:] != other.train["input_ids"][:]
    assert few.heldout[:] == other.heldout[:] == whole.heldout[:]


# ---- batches ----


def drawn(batches: TrainingBatches, count: int) -> torch.Tensor:
    return torch.cat([next(batches)["input_ids"] for _ in range(count)])


def test_an_epoch_gives_every_row_once_and_what_fills_no_batch_begins_the_next(rows: Dataset) -> None:
    batches = TrainingBatches(rows, 4, seed=0)
    seen = drawn(batches, 23)  # four epochs
    assert seen.dtype == torch.int64
    assert (seen == seen[:, :1] + torch.arange(4)).all(), "rows stay whole"
    for epoch in range(4):
        of_epoch = seen[epoch * 23 : (epoch + 1) * 23, 0].tolist()
        assert sorted(of_epoch) == list(range(0, 92, 4))
        assert of_epoch != sorted(of_epoch)
    assert batches.epoch == 4


def test_the_epoch_is_the_part_of_the_rows_that_were_taken(rows: Dataset) -> None:
    batches = TrainingBatches(rows, 4, seed=0)
    assert batches.epoch == 0
    drawn(batches, 8)
    assert batches.epoch == pytest.approx(32 / 23)


def test_order_depends_on_seed_and_epoch_alone(rows: Dataset) -> None:
    def order(seed: int, batch_size: int) -> list[int]:
        return drawn(TrainingBatches(rows, batch_size, seed=seed), 69 // batch_size)[:, 0].tolist()

    assert order(0, 1) == order(0, 3) == order(0, 23)
    assert len({tuple(order(seed, 1)[epoch * 23 : (epoch + 1) * 23]) for seed in range(3) for epoch in range(3)}) == 9


def test_processes_share_each_global_batch_in_order(rows: Dataset) -> None:
    one = TrainingBatches(rows, 8, seed=3)
    four = [TrainingBatches(rows, 8, seed=3, process_index=i, process_count=4) for i in range(4)]
    for _ in range(7):
        together = [next(share) for share in four]
        assert {tuple(share["labels"].shape) for share in together} == {(2, 4)}
        assert_equal(next(one), {name: torch.cat([share[name] for share in together]) for name in together[0]})


def test_heldout_batches_count_every_row_exactly_once_in_one_shape(rows: Dataset) -> None:
    batches = list(heldout_batches(rows, 5))
    assert {batch["input_ids"].shape for batch in batches} == {(5, 4)}
    labels = torch.cat([batch["labels"] for batch in batches])
    counted = labels[(labels != -100).all(dim=1)]
    torch.testing.assert_close(counted, torch.arange(23 * 4).view(23, 4))
    assert (labels[23:] == -100).all()
    assert len(labels) == 25


def test_labels_are_the_inputs(rows: Dataset) -> None:
    batch = next(TrainingBatches(rows, 4, seed=0))
    assert_equal({"x": batch["labels"]}, {"x": batch["input_ids"]})


def test_first_token_of_an_isolated_document_is_no_target() -> None:
    columns = {
        "input_ids": [5, 6, 0, 7, 8, 0, 9],
        "segment_ids": [1, 1, 1, 2, 2, 2, 3],
        "position_ids": [0, 1, 2, 0, 1, 2, 0],
    }
    rows = Dataset.from_dict({name: [values] for name, values in columns.items()})
    (batch,) = heldout_batches(rows, 1)
    assert batch["labels"].tolist() == [[5, 6, 0, -100, 8, 0, -100]]
    assert {name: batch[name].tolist()[0] for name in columns} == columns
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


# ---- unigram ----


def test_unigram_loss_is_the_one_computed_by_hand() -> None:
    train = Dataset.from_dict({"input_ids": [[0, 1, 1], [1, 2, 0]]})  # counts 2, 3, 1, 0: smoothed 3, 4, 2, 1 of 10
    heldout = Dataset.from_dict({"input_ids": [[2, 0, 1], [0, 3, 3]]})  # targets 0, 1, 3, 3
    expected = -(math.log(0.3) + math.log(0.4) + 2 * math.log(0.1)) / 4
    assert unigram_loss(train, heldout, 4) == pytest.approx(expected, rel=1e-12)


def test_unigram_loss_leaves_out_what_the_model_is_not_scored_on() -> None:
    train = Dataset.from_dict({"input_ids": [[0, 1]]})  # smoothed 2, 2, 1 of 5
    heldout = Dataset.from_dict({"input_ids": [[1, 0, 2, 1]], "segment_ids": [[1, 1, 2, 2]]})  # targets 0, 1
    assert unigram_loss(train, heldout, 3) == pytest.approx(-math.log(0.4), rel=1e-12)


def test_unigram_loss_of_the_standard_library_lies_between_none_and_uniform(stdlib: Corpus) -> None:
    assert 5.0 < unigram_loss(stdlib.train, stdlib.heldout, 2048) < math.log(2048)


# ---- bad input ----


def test_tokenizer_without_end_of_text_is_refused(load: Callable[..., Corpus], tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "texts.jsonl")
    tokenizer = load(data).tokenizer
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="eos_token"):
        load(data, tokenizer=tokenizer)


def test_vocabulary_smaller_than_the_bytes_is_refused(load: Callable[..., Corpus], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="at least 257"):
        load(write_jsonl(tmp_path / "texts.jsonl"), vocab_size=256)


def test_fewer_rows_than_a_batch_are_refused(rows: Dataset) -> None:
    with pytest.raises(UserError, match="23 rows"):
        TrainingBatches(rows, 24, seed=0)


def test_a_batch_that_processes_cannot_share_is_refused(rows: Dataset) -> None:
    with pytest.raises(UserError, match="3 processes"):
        TrainingBatches(rows, 8, seed=0, process_count=3)
