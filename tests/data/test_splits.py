"""A split that is not called train: named behind the dataset, with the held-out split that goes with it."""

from __future__ import annotations

import json
from pathlib import Path

import fsspec
import pytest

from shardwright.data.records.document_stream import find_stream
from shardwright.data.records.record_sources import Files, HubDataset, locate, pick_splits
from shardwright.errors import UserError

NAMED = {"train_sft": 12, "test_sft": 3, "train_gen": 5, "test_gen": 2}  # of ultrachat_200k, and rows of each here


def write_splits(folder: Path) -> str:
    for name, count in NAMED.items():
        path = folder / "data" / f"{name}-00000-of-00001.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps({"text": f"{name} {n}"}) + "\n" for n in range(count)))
    return str(folder)


def test_a_split_is_named_behind_the_dataset_and_what_is_held_out_follows(tmp_path: Path) -> None:
    folder = write_splits(tmp_path / "dataset")
    documents = find_stream(f"{folder}#train_sft")
    heldout = documents.heldout[""].stored(tmp_path / "heldout")
    assert (len(documents.stored(tmp_path / "train")), len(heldout)) == (12, 3)
    assert {text.split()[0] for text in heldout["text"]} == {"test_sft"}
    stream = find_stream(f"{folder}#train_gen")
    assert [text for _, text in stream.heldout[""].documents()] == ["test_gen 0", "test_gen 1"]
    assert find_stream(f"{folder}#train_gen").fingerprint != documents.fingerprint
    assert locate("some/id@main:config#train_sft") == HubDataset(
        "--dataset some/id@main:config#train_sft", "some/id", "main", "config", "train_sft"
    )
    for split, found in [
        ("train_pft", "no file of that split"),
        ("train_sft[:10%]", "a part of the split train_sft"),
    ]:
        with pytest.raises(UserError, match=found):
            find_stream(f"{folder}#{split}")
    (tmp_path / "dataset" / "data" / "test-0.jsonl").write_text("{}\n")  # a split, but not the one that is asked for
    with pytest.raises(UserError, match="no file of that split"):
        find_stream(f"{folder}#train_pft")


def test_a_dataset_without_a_split_called_train_offers_those_that_it_has() -> None:
    assert pick_splits(NAMED, "--dataset id", "train_sft") == ["train_sft", "test_sft"]
    assert pick_splits(["train_sft", "test"], "--dataset id", "train_sft") == ["train_sft", "test"]
    with pytest.raises(UserError) as refused:
        pick_splits(NAMED, "--dataset id")
    assert refused.value.instead == "--dataset id#train_gen, or --dataset id#train_sft, or --dataset id#test_gen"


def test_what_the_hub_holds_out_by_its_names_is_held_out_of_a_folder_too() -> None:
    heldout = {"data/test-00000-of-00001.parquet": "test", "valid.jsonl": "validation", "val/1.jsonl": "validation"}
    heldout |= {"a/dev.json": "validation", "eval_2.jsonl": "test", "Testing/1.csv": "test", "evaluation.csv": "test"}
    trained = ["data/train-00000-of-00001.parquet", "device.jsonl", "evaluate/1.json", "contest.csv", "a/latest.json"]
    splits = Files("", dict.fromkeys([*heldout, *trained], Path("x")), "json").by_split()
    assert {name: split for split in splits for name in splits[split]} == heldout | dict.fromkeys(trained, "train")


def test_files_in_a_bucket_are_copied_once_and_read_as_those_on_a_disk(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path / "cache"))
    url = f"memory://{tmp_path.name}"
    store, root = fsspec.core.url_to_fs(url)
    for place, text in {"train.jsonl": '{"text": "one"}\n', "test/1.jsonl": '{"text": "two"}\n', "x.bin": "-"}.items():
        store.pipe_file(f"{root}/{place}", text.encode())
    assert locate(url).by_split() == {"test": ["test/1.jsonl"], "train": ["train.jsonl"]}
    assert find_stream(f"{url}/train.jsonl").asked == f"--dataset {url}/train.jsonl"
    (copy,) = locate(f"{url}/train.jsonl#train").files.values()
    assert copy.read_text() == '{"text": "one"}\n'
    store.pipe_file(f"{root}/out/../../1.jsonl", b"{}")
    refusals = {"absent.jsonl": "no such file", "out": "leads out of it"}
    refusals = {f"{url}/{name}": said for name, said in refusals.items()} | {"nowhere://b/x.jsonl": "nowhere"}
    for wrong, said in refusals.items():
        with pytest.raises(UserError, match=said):
            locate(wrong)
