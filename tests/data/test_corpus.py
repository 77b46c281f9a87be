"""A dataset becomes a tokenizer and stored rows: deterministic, complete, cached.

A tokenizer that can't serve is refused before the data are looked for.
"""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Callable
from functools import partial
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset

from shardwright.data.corpus import Corpus, DataOptions, load_corpus
from shardwright.data.tokenizer import END_OF_TEXT, open_tokenizer
from shardwright.data.unigram import unigram_loss
from shardwright.errors import UserError
from shardwright.files.cache import cached
from tests.support.chats import LLAMA, byte_tokenizer, chats, write_records
from tests.support.texts import TEXTS, documents_of, load_small, run_python, write_folder, write_jsonl

EOS = 0  # the only special token of a tokenizer that is trained here


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Corpus]:
    return partial(load_small, tmp_path / "cache")


@pytest.fixture(scope="module")
def stdlib(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    cache = tmp_path_factory.mktemp("stdlib")
    return load_corpus(DataOptions(dataset=None, sequence_length=256), None, 2048, cache)


def tokens_of(rows: Dataset) -> list[int]:
    return [token for row in rows["input_ids"] for token in row]


# ---- determinism and cache ----


def test_two_processes_make_the_same_bytes_whatever_pythons_hash_seed(tmp_path: Path) -> None:
    data = write_folder(tmp_path / "folder")
    script = f"""if True:
        import hashlib
        from shardwright.data.corpus import DataOptions, load_corpus
        from shardwright.data.rows.batches import TrainingBatches
        corpus = load_corpus(DataOptions({str(data)!r}, sequence_length=32, isolate_documents=True), None, 400)
        batches = TrainingBatches(corpus.train, 4, seed=1)
        seen = [corpus.tokenizer.backend_tokenizer.to_str(), corpus.train.dataset[:], corpus.heldout.dataset[:]]
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
    names = {"tokenizer.json", "train.arrow", "heldout.arrow", "rows.json", "checksums.json"}
    assert {path.name for path in before} == names
    assert first.train.dataset[:] == second.train.dataset[:]
    assert first.tokenizer.get_vocab() == second.tokenizer.get_vocab()


def test_cache_follows_what_it_depends_on(load: Callable[..., Corpus], tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "texts.jsonl")
    first = load(data)
    assert len(load(data, sequence_length=16).train.dataset[0]["input_ids"]) == 16
    assert len(load(data, vocab_size=310).tokenizer) > len(first.tokenizer)
    assert "segment_ids" in load(data, isolate_documents=True).train.dataset.column_names
    assert len(load(data, heldout_fraction=0.5).heldout) > len(first.heldout)
    write_jsonl(data, TEXTS[:100])
    assert len(load(data).train) < len(first.train)


def test_cached_samples_begin_with_their_own_tokenizers_words(load: Callable[..., Corpus], tmp_path: Path) -> None:
    data, tokenizer = write_records(tmp_path / "chats.jsonl", chats(40)), byte_tokenizer(LLAMA, "<|eot|>")
    for word in ("<s>", "</s>"):
        tokenizer.bos_token = word
        rows = load(data, tokenizer, len(tokenizer), sequence_length=256, isolate_documents=True).train
        assert rows.dataset[0]["input_ids"][0] == tokenizer.bos_token_id


def changed(content: bytes, damage: str) -> bytes:
    middle = len(content) // 2
    return {
        "cut": content[:middle],
        "longer": content + b"\0",
        "garbage": b"\x07" * len(content),
        "a bit": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
        "4 KB of zeros": (content[:middle] + bytes(4096) + content[middle + 4096 :])[: len(content)],
    }[damage]


@pytest.mark.parametrize("name", ["tokenizer.json", "train.arrow", "heldout.arrow", "rows.json"])
@pytest.mark.parametrize("damage", ["cut", "longer", "garbage", "a bit", "4 KB of zeros", "gone"])
def test_what_is_damaged_in_the_cache_is_named_and_made_anew(
    load: Callable[..., Corpus], tmp_path: Path, name: str, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_jsonl(tmp_path / "texts.jsonl")
    sound = load(data)
    train, heldout, vocabulary = sound.train.dataset[:], sound.heldout.dataset[:], sound.tokenizer.get_vocab()
    (path,) = (tmp_path / "cache").rglob(name)
    content = path.read_bytes()
    path.unlink()
    if damage != "gone":
        path.write_bytes(changed(content, damage))
    assert not capsys.readouterr().err
    again = load(data)
    assert (again.train.dataset[:], again.heldout.dataset[:], again.tokenizer.get_vocab()) == (
        train,
        heldout,
        vocabulary,
    )
    assert path.read_bytes() == content
    (line,) = capsys.readouterr().err.splitlines()
    assert str(path.parent) in line
    assert name in line
    assert line.endswith("it is made anew")


def test_a_cached_token_outside_the_vocabulary_is_noticed(load: Callable[..., Corpus], tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "texts.jsonl")
    sound = load(data).train.dataset[:]
    (path,) = (tmp_path / "cache").rglob("train.arrow")
    token = np.array(sound["input_ids"][3][:8], dtype="<i4")
    content = path.read_bytes()
    assert token.tobytes() in content
    path.write_bytes(content.replace(token.tobytes(), (token + 500_000).tobytes(), 1))
    assert load(data).train.dataset[:] == sound


def test_what_is_cached_lies_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scratch").mkdir()
    done: list[str] = []
    sync, rename = os.fsync, Path.rename

    def noted(file: int) -> None:
        done.append(Path(os.readlink(f"/proc/self/fd/{file}")).name)
        sync(file)

    def renamed(path: Path, target: Path) -> Path:
        done.append("renamed")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(Path, "rename", renamed)

    def build(made: Path) -> None:
        (made / "within").mkdir()
        for name in ("a", "within/b"):
            (made / name).write_text(name)

    cached(tmp_path / "rows" / "key", tmp_path / "scratch", build=build, load=lambda path: None)
    assert sorted(done[:5]) == ["a", "b", "checksums.json", "key", "within"]
    assert done[5:] == ["renamed", "rows"]


def test_cached_rows_that_are_too_few_are_packed_again(load: Callable[..., Corpus], tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "texts.jsonl")
    sound = load(data).train.dataset[:]
    (path,) = (tmp_path / "cache").rglob("train.arrow")
    table = pa.ipc.open_stream(path.read_bytes()).read_all().slice(0, 5)
    with pa.ipc.new_stream(path, table.schema) as stream:  # a whole Arrow file, as a cut between two batches leaves one
        stream.write_table(table)
    assert load(data).train.dataset[:] == sound


def test_a_process_that_was_faster_is_believed(tmp_path: Path) -> None:
    folder, scratch = tmp_path / "rows" / "key", tmp_path / "scratch"
    scratch.mkdir()

    def build(made: Path) -> None:
        (made / "rows").write_text("ours")
        folder.mkdir(parents=True)
        (folder / "rows").write_text("theirs")

    assert cached(folder, scratch, build=build, load=lambda path: (path / "rows").read_text()) == "theirs"


def test_rows_that_the_disk_does_not_take_are_no_traceback(load: Callable[..., Corpus], tmp_path: Path) -> None:
    data, before = write_jsonl(tmp_path / "texts.jsonl"), resource.getrlimit(resource.RLIMIT_FSIZE)
    load(data)  # for its tokenizer
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(UserError, match=r"File too large(.|\n)*SHARDWRIGHT_CACHE"):
            load(data, sequence_length=16)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


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
    text = stdlib.tokenizer.decode(tokens_of(stdlib.train.dataset.select(range(200))))
    assert text.count("def ") > 50
    characters = len(text) / (200 * 256)
    assert characters > 2.5, "a trained BPE writes several characters with a token"
    assert stdlib.train.tokens == len(stdlib.train) * 256
    assert 5.0 < unigram_loss(stdlib.train, stdlib.heldout, 2048) < math.log(2048)


def test_packing_keeps_every_token_in_order_but_one_partial_row(load: Callable[..., Corpus], tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "texts.jsonl", [*TEXTS, *(text.upper() for text in TEXTS)])  # more than one map batch
    corpus = load(data)
    for name, documents in documents_of(data, tmp_path / "scratch").items():
        packed = tokens_of(getattr(corpus, name).dataset)
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
    assert odd[0] + END_OF_TEXT in corpus.tokenizer.decode(tokens_of(corpus.train.dataset))


def test_trained_tokenizer_can_be_saved_and_opened(load: Callable[..., Corpus], tmp_path: Path) -> None:
    tokenizer = load(write_jsonl(tmp_path / "texts.jsonl")).tokenizer
    tokenizer.save_pretrained(tmp_path / "saved")
    again = open_tokenizer(str(tmp_path / "saved"))
    assert again.eos_token == END_OF_TEXT
    assert again.encode(TEXTS[7]) == tokenizer.encode(TEXTS[7])


def test_a_given_tokenizer_is_used(load: Callable[..., Corpus], tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "texts.jsonl")
    tokenizer = load(data, vocab_size=270).tokenizer
    corpus = load(data, tokenizer=tokenizer, vocab_size=300)
    assert corpus.tokenizer is tokenizer
    assert max(tokens_of(corpus.train.dataset)) < 270


def test_isolated_documents_number_segments_and_restart_positions(load: Callable[..., Corpus], tmp_path: Path) -> None:
    corpus = load(write_jsonl(tmp_path / "texts.jsonl"), isolate_documents=True, sequence_length=64)
    assert corpus.train.dataset.column_names == ["input_ids", "segment_ids", "position_ids"]
    for row in corpus.train.dataset:
        segment, position, previous = 1, 0, None
        for token, segment_id, position_id in zip(
            row["input_ids"], row["segment_ids"], row["position_ids"], strict=True
        ):
            if previous == EOS:
                segment, position = segment + 1, 0
            assert (segment_id, position_id) == (segment, position)
            position, previous = position + 1, token
    assert max(max(row) for row in corpus.train.dataset["segment_ids"]) > 1


# ---- tokenizers that are refused ----


@pytest.mark.parametrize("streaming", [False, True], ids=["stored", "streamed"])
@pytest.mark.parametrize(
    ("given", "vocab_size", "message"),
    [
        (None, 256, "at least 257"),
        ("without end of text", 300, "eos_token"),
        ("of 300 tokens", 299, "embedding has 299 rows"),
    ],
)
def test_an_unfit_tokenizer_is_refused_before_the_data_are_looked_for(
    load: Callable[..., Corpus], tmp_path: Path, given: str | None, vocab_size: int, message: str, streaming: bool
) -> None:
    tokenizer = load(write_jsonl(tmp_path / "texts.jsonl")).tokenizer if given else None
    if given == "without end of text":
        tokenizer.eos_token = None
    with pytest.raises(UserError, match=message):
        load(tmp_path / "nowhere.jsonl", tokenizer=tokenizer, vocab_size=vocab_size, streaming=streaming)


def test_a_name_that_gives_no_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the tokenizer of .*nothing"):
        open_tokenizer(str(tmp_path / "nothing"))
