"""Stored documents: found, read whole, split by their names or texts, and refused with a reason."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from shardwright.data.corpus import Corpus
from shardwright.data.records.document_stream import find_stream
from shardwright.data.records.record_sources import locate
from shardwright.errors import UserError
from shardwright.files.folder import StorageError
from shardwright.objectives.objective import text_shape
from tests.support.faults import ERRORS
from tests.support.small_hub import write_hub_cache
from tests.support.texts import (
    BAD,
    TEXTS,
    documents_of,
    load_small,
    run_python,
    write_arrow,
    write_csv,
    write_folder,
    write_json,
    write_jsonl,
    write_parquet,
    write_record_folder,
    write_saved_dataset,
    write_text,
)

TEXT = [text_shape()]


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Corpus]:
    return partial(load_small, tmp_path / "cache")


def test_standard_library_is_split_by_file_and_leaves_tests_out(tmp_path: Path) -> None:
    splits = documents_of(None, tmp_path)
    train, heldout = (set(splits[name]["name"]) for name in ("train", "heldout"))
    assert not train & heldout
    assert {"ast.py", "json/decoder.py"} <= train | heldout
    assert not any({"test", "tests", "idle_test", "site-packages"} & set(name.split("/")) for name in train | heldout)
    assert len(heldout) == math.ceil(0.05 * (len(heldout) + len(train)))
    assert splits["train"]["name"][:] == sorted(train)


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (write_jsonl, "texts.jsonl"),
        (write_json, "texts.json"),
        (write_parquet, "texts.parquet"),
        (write_arrow, "texts.arrow"),
        (write_csv, "texts.csv"),
        (write_saved_dataset, "saved"),
        (write_text, "texts.txt"),
        (write_text, "without_suffix"),
        (write_folder, "folder"),
        (write_record_folder, "records"),
    ],
)
def test_every_kind_of_local_dataset_is_read_whole(
    load: Callable[..., Corpus], tmp_path: Path, write: Callable[[Path], Path], name: str
) -> None:
    corpus = load(write(tmp_path / name), heldout_fraction=0.2)
    both = [token for rows in (corpus.train, corpus.heldout) for row in rows.dataset["input_ids"] for token in row]
    text = corpus.tokenizer.decode(both)
    # at most one unfinished row of each split is lost, and a document may begin in it
    assert sum(f"Story {i}.\n" in text for i in range(300)) >= 297
    assert {len(row) for rows in (corpus.train, corpus.heldout) for row in rows.dataset["input_ids"]} == {32}
    assert len(corpus.heldout) < len(corpus.train)


def test_a_cell_of_a_table_is_the_text_that_stands_in_it(tmp_path: Path) -> None:
    cells = ["NA", "null", 'a "quoted", word', "two\nlines", "", *TEXTS]
    path = write_csv(tmp_path / "x.csv", cells)
    splits = documents_of(path, tmp_path / "scratch")
    found = [*splits["train"]["text"], *splits["heldout"]["text"]]
    assert sorted(found) == sorted(filter(None, cells))
    assert [text for _, text in find_stream(str(path), TEXT).documents()] == cells
    path.write_text(",text\n0,one\n1,two\n")  # as pandas' to_csv leaves it, with its index
    assert [text for _, text in find_stream(str(path), TEXT).documents()] == ["one", "two"]


def test_same_text_is_never_on_both_sides(tmp_path: Path) -> None:
    splits = documents_of(write_jsonl(tmp_path / "twice.jsonl", TEXTS + TEXTS), tmp_path / "scratch", 0.3)
    assert not set(splits["train"]["text"]) & set(splits["heldout"]["text"])
    assert len(splits["train"]) + len(splits["heldout"]) == 600


def test_a_held_out_file_stays_held_out_when_its_text_changes(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "folder")
    before = documents_of(folder, tmp_path / "before")["heldout"]
    for name in before["name"]:
        (folder / name).write_text("another text")
    after = documents_of(folder, tmp_path / "after")["heldout"]
    assert after["name"][:] == before["name"][:]
    assert set(after["text"]) == {"another text"}


def test_documents_without_text_are_left_out(tmp_path: Path) -> None:
    splits = documents_of(write_jsonl(tmp_path / "holes.jsonl", ["", "  \n", *TEXTS, ""]), tmp_path / "scratch")
    assert sorted([*splits["train"]["text"], *splits["heldout"]["text"]]) == sorted(TEXTS)


def test_a_folder_that_holds_a_validation_split_keeps_it_and_leaves_test_alone(tmp_path: Path) -> None:
    folder = tmp_path / "dataset"
    write_jsonl(folder / "train-00000-of-00001.jsonl", TEXTS[:200])
    write_jsonl(folder / "validation.jsonl", TEXTS[200:250])
    write_jsonl(folder / "test" / "part.jsonl", TEXTS[250:])
    splits = documents_of(folder, tmp_path / "scratch")
    assert splits["train"]["text"][:] == TEXTS[:200]
    assert splits["heldout"]["text"][:] == TEXTS[200:250]


def test_a_hub_dataset_is_loaded_with_its_own_validation_split(tmp_path: Path) -> None:
    """Read by `datasets` itself, offline, from its cache."""
    environment = write_hub_cache(tmp_path / "hub", {"train": TEXTS[:200], "validation": TEXTS[200:]})
    script = f"""if True:
        import pathlib
        from shardwright.data.records.document_stream import find_stream
        from shardwright.objectives.objective import text_shape
        from shardwright.data.rows.heldout_rows import split_documents
        documents = find_stream("someone/stories:default", [text_shape()], stored=True)
        splits = split_documents(documents, pathlib.Path({str(tmp_path)!r}), 0.05)
        print(documents.fingerprint, *(len(splits[name]) for name in ("train", "heldout")))"""
    first, second = (run_python(script, **environment).split() for _ in range(2))
    assert first[1:] == ["200", "100"]
    assert first == second


ABOUT = {
    "README.md": "# Stories",
    "LICENSE": "Do what you like.",
    "LICENSE-2.txt": "Or not.",
    ".gitattributes": "*.jsonl text",
    "dataset_infos.json": '{"default": {}}',
    "checksums.txt": "0 a.jsonl",
}


@pytest.mark.parametrize("write", [write_jsonl, write_parquet], ids=["json", "parquet"])
def test_what_is_written_about_a_dataset_is_not_read_as_its_data(tmp_path: Path, write: Callable[..., Path]) -> None:
    folder = tmp_path / "snapshot"
    write_jsonl(folder / "a.jsonl", []).unlink()  # makes the folder
    write(folder / f"a.{'jsonl' if write is write_jsonl else 'parquet'}", TEXTS)
    for name, text in ABOUT.items():
        (folder / name).write_text(text)
    splits = documents_of(folder, tmp_path / "scratch")
    assert sorted([*splits["train"]["text"], *splits["heldout"]["text"]]) == sorted(TEXTS)
    assert [text for _, text in find_stream(str(folder), TEXT).documents()] == TEXTS


def test_a_folder_of_texts_keeps_its_readme(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "folder")
    (folder / "README.md").write_text("# About these stories")
    splits = documents_of(folder, tmp_path / "scratch")
    assert "README.md" in {*splits["train"]["name"], *splits["heldout"]["name"]}


def test_files_behind_links_and_of_any_name_are_read_and_each_once(tmp_path: Path) -> None:
    folder, beside = write_folder(tmp_path / "folder"), write_folder(tmp_path / "beside")
    Path(os.fsdecode(os.fsencode(folder) + b"/caf\xe9.txt")).write_text("A name of Latin-1.")
    (folder / "linked").symlink_to(beside)
    (folder / "again").symlink_to(folder)  # a circle
    (beside / "back").symlink_to(folder)
    splits = documents_of(folder, tmp_path / "scratch")
    names = sorted([*splits["train"]["name"], *splits["heldout"]["name"]])
    own = [path.relative_to(beside).as_posix() for path in beside.rglob("*.md")]
    assert names == sorted([*own, *(f"linked/{name}" for name in own), "caf\\xe9.txt"])


@pytest.mark.parametrize("name", ["a[1]", "b*c", "q?", "[!a]", "x**y", "c[", "{x,y}", "50% off"])
def test_no_character_of_a_path_is_a_wildcard(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    write_jsonl(folder / "a" / f"{name}.jsonl")
    write_jsonl(folder / "b1c" / "other.jsonl", ["another text"])  # what such a pattern would find
    (folder / "p").mkdir()
    for dataset in (
        folder / "a",
        folder / "a" / f"{name}.jsonl",
        write_parquet(folder / "p" / f"{name}.parquet"),
        write_text(folder / "p" / f"{name}.txt"),
    ):
        stored = documents_of(dataset, tmp_path / "scratch" / dataset.suffix / dataset.name)
        streamed = [text for _, text in find_stream(str(dataset), TEXT).documents()]
        found = [*stored["train"]["text"], *stored["heldout"]["text"]]
        assert sorted(found) == sorted(filter(str.strip, map(str, streamed)))
        assert len(found) >= 20 if dataset.suffix == ".txt" else sorted(found) == sorted(TEXTS)


# ---- bad input ----


def test_a_null_within_a_record_of_several_lines_is_no_line_that_is_null(tmp_path):
    records = [{"text": text, "tags": [None, None]} for text in TEXTS]
    path = tmp_path / "x.json"
    path.write_text(json.dumps(records, indent=1))
    assert len(documents_of(path, tmp_path / "scratch")["train"]) > 200


@pytest.mark.parametrize("case", BAD)
def test_bad_dataset_is_refused_with_what_was_found(load: Callable[..., Corpus], tmp_path: Path, case: str) -> None:
    make, found = BAD[case]
    dataset = make(tmp_path)
    with pytest.raises(UserError, match=found) as error:
        load(dataset)
    assert str(dataset) in error.value.asked
    assert all([error.value.found, error.value.why, error.value.instead])
    assert {path.name for path in (tmp_path / "cache").iterdir()} <= {"tokenizers"}, "no rows and no scratch are left"


def test_column_that_is_no_text_is_refused_and_the_named_one_read(load: Callable[..., Corpus], tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "texts.jsonl", column="body")
    with pytest.raises(UserError, match="number"):
        load(data, reads=[text_shape("number")])
    assert len(load(data, reads=[text_shape("body")]).train) > 100


def test_a_folder_that_changes_while_it_is_looked_through_is_no_error(tmp_path, monkeypatch):
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.txt").write_text("text")
    real = Path.stat

    def vanishing(path, **options):
        found = real(path, **options)
        for name in ("a", "b", "c"):
            if path.name == "x.txt" and path.parent.name != name:
                shutil.rmtree(tmp_path / name, ignore_errors=True)
        return found

    monkeypatch.setattr(Path, "stat", vanishing)
    assert len(locate(str(tmp_path)).files) == 1


@pytest.mark.parametrize("call", ["stat", "scandir"])
@pytest.mark.parametrize("fault", ERRORS.values(), ids=ERRORS)
def test_a_part_of_a_folder_that_can_not_be_looked_at_is_an_error_and_never_left_out(
    tmp_path, monkeypatch, call, fault
):
    for name in ("a.txt", "inner/b.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    real, fails = getattr(os, call), {"stat": "a.txt", "scandir": "inner"}[call]

    def failing(path=".", *args, **options):
        if str(path).endswith(fails):
            raise OSError(fault, os.strerror(fault), str(path))
        return real(path, *args, **options)

    assert sorted(locate(str(tmp_path)).files) == ["a.txt", "inner/b.txt"]
    monkeypatch.setattr(os, call, failing)
    with pytest.raises(StorageError, match=os.strerror(fault)):
        locate(str(tmp_path))
