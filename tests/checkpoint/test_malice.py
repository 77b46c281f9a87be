"""A checkpoint is data, whoever made it: what is not as a save leaves it is refused by name, and runs nothing."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

from shardwright.checkpoint import dcp_metadata, manifest
from shardwright.checkpoint.dcp_metadata import tiles
from shardwright.checkpoint.host_state import check_random_state, random_state
from shardwright.checkpoint.plain_pickle import read_pickle
from shardwright.errors import UserError
from shardwright.files.folder import Folder, StorageError
from tests.support.fuzz import checkpoints
from tests.support.fuzz.checkpoints import TENSORS, copied, opened, read_all
from tests.support.fuzz.pickles import as_pickle, as_tree

STACK = "model.layers.*.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write_checkpoint(tmp_path_factory.mktemp("base"))


@pytest.fixture
def metadata(base: Path) -> Any:
    return pickle.loads((base / ".metadata").read_bytes())


def test_what_nothing_was_done_to_is_read(base, tmp_path):
    read_all(opened(copied(base, tmp_path, {})), written=True)


# ---- what a manifest names ----


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("/dev/zero", "no name of a checkpoint's file"),
        ("../checkpoint-1/host.json", "no name of a checkpoint's file"),
        ("tokenizer/../host.json", "no name of a checkpoint's file"),
        ("folder/host.json", "no name of a checkpoint's file"),
        ("..", "no name of a checkpoint's file"),
        ("", "no name of a checkpoint's file"),
        ("host\0.json", "no name of a checkpoint's file"),
        ("manifest.json", "no name of a checkpoint's file"),
        ("\ud800", "no name of a checkpoint's file"),
        ("fifo", "fifo is no file of its own"),
        ("link", "link is no file of its own"),
        ("folder", "folder is no file of its own"),
        ("absent", "absent is missing"),
    ],
)
def test_a_manifest_that_names_another_than_a_file_beside_it_is_refused(base, tmp_path, name, found):
    files = {**manifest.read_manifest(Folder(base)), name: {"bytes": 0, "xxh3": "0" * 16}}
    with pytest.raises(UserError, match=found):
        opened(copied(base, tmp_path, {}, files))


@pytest.mark.parametrize("name", ["manifest.json", "host.json", TENSORS])
@pytest.mark.parametrize("kind", ["fifo", "link", "device", "folder", "huge"])
def test_what_lies_in_the_place_of_a_file_is_not_waited_for_nor_followed(base, tmp_path, name, kind):
    folder = copied(base, tmp_path, {})
    checkpoints._replace(folder / name, kind, base)
    with pytest.raises(
        UserError, match=name.replace(".", r"\.") + " (is no file of its own|has 4,398,046,511,104 bytes)"
    ):
        opened(folder)


def test_a_folder_reads_no_pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StorageError, match="no regular file"):
        Folder(tmp_path).read("pipe")


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ([], "lists no files"),
        ({"host.json": 3}, "or not its size and checksum"),
        ({"host.json": {"bytes": -1, "xxh3": "0" * 16}}, "or not its size and checksum"),
        ({"host.json": {"bytes": 1.0, "xxh3": "0" * 16}}, "or not its size and checksum"),
        ({"host.json": {"bytes": 1, "xxh3": None}}, "or not its size and checksum"),
        ({}, "host.json is not in its manifest.json"),
        (b"[" * 100_000, "can't be read .RecursionError"),
    ],
    ids=str,
)
def test_a_manifest_of_wrong_types_is_refused(base, tmp_path, files, found):
    with pytest.raises(UserError, match=found):
        opened(copied(base, tmp_path, {}, files))


# ---- what a list of tensors says ----


def with_metadata(base: Path, scratch: Path, data: bytes) -> Path:
    return copied(base, scratch, {".metadata": data})


def test_a_pickle_that_would_replace_a_class_s_method_changes_nothing(base, tmp_path):
    before, name = Metadata.__init__, "torch.distributed.checkpoint.metadata.Metadata"
    evil = as_pickle({"!": name, "args": None, "state": {"()": [None, {"{}": [["__init__", 1]]}]}})
    with pytest.raises(UserError, match=r"\.metadata is no list of tensors"):
        opened(with_metadata(base, tmp_path, evil))
    assert Metadata.__init__ is before
    pickle.loads(evil)  # the attack is a real one
    broken, Metadata.__init__ = Metadata.__init__, before
    assert broken == 1


@pytest.mark.parametrize(
    "code",
    ["4e72ffffff7f2e", "8d00000000000000102e", "9500000000000000102e", "8e00000000000000102e", "8bffffff7f2e"],
    ids=["memo", "text", "frame", "bytes", "number"],
)
def test_a_pickle_that_claims_to_be_huge_is_read_or_refused_by_what_is_there(code):
    """The reader in C makes room for what is claimed: 64 GiB for the memo's."""
    tracemalloc.start()
    with contextlib.suppress(ValueError):
        assert read_pickle(bytes.fromhex("8004" + code), ()) is None
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def _twice(metadata: Metadata) -> None:
    metadata.state_dict_metadata[STACK].chunks.append(metadata.state_dict_metadata[STACK].chunks[0])


def _overlap(metadata: Metadata) -> None:
    index = next(index for index in metadata.storage_data if index.offset == (0, 2, 0))
    metadata.storage_data[type(index)(STACK, (0, 1, 0))] = metadata.storage_data.pop(index)
    metadata.state_dict_metadata[STACK].chunks[2 * 2].offsets = torch.Size((0, 1, 0))


def _missing(metadata: Metadata) -> None:
    chunk = metadata.state_dict_metadata[STACK].chunks.pop()
    del metadata.storage_data[next(i for i in metadata.storage_data if (i.fqn, i.offset) == (STACK, chunk.offsets))]


def _unlisted(metadata: Metadata) -> None:
    index = next(iter(metadata.storage_data))
    metadata.storage_data[type(index)("other", (0,))] = metadata.storage_data[index]


def _larger(metadata: Metadata) -> None:
    metadata.state_dict_metadata["lm_head.weight"].size = torch.Size((10**9, 10**9))


def _larger_chunk(metadata: Metadata) -> None:
    _larger(metadata)
    metadata.state_dict_metadata["lm_head.weight"].chunks[0].sizes = torch.Size((10**9, 10**9))


def _endless_stack(metadata: Metadata) -> None:
    entry = metadata.state_dict_metadata.pop("lm_head.weight")
    for index in [index for index in metadata.storage_data if index.fqn == "lm_head.weight"]:
        place = metadata.storage_data.pop(index)
    entry.size, entry.chunks = torch.Size((10**15, 0)), entry.chunks[:1]
    entry.chunks[0].offsets, entry.chunks[0].sizes = torch.Size((0, 0)), torch.Size((10**15, 0))
    metadata.state_dict_metadata["a.*.b"] = entry
    metadata.storage_data[type(index)("a.*.b", (0, 0))] = place


def _elsewhere(path: str) -> Any:
    def change(metadata: Metadata) -> None:
        next(iter(metadata.storage_data.values())).relative_path = path

    return change


def _beyond(metadata: Metadata) -> None:
    next(iter(metadata.storage_data.values())).offset = 10**18


def _shared(metadata: Metadata) -> None:
    first, second, *_ = metadata.storage_data.values()
    second.offset = first.offset


def _other_dtype(metadata: Metadata) -> None:
    metadata.state_dict_metadata["lm_head.weight"].properties.dtype = torch.float16


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (_twice, "without a record of its own"),
        (_overlap, "do not tile its shape"),
        (_missing, "do not tile its shape"),
        (_unlisted, "1 records of no tensor"),
        (_larger, "do not tile its shape"),
        (_larger_chunk, "in a record of"),
        (_endless_stack, "fewer chunks than layers"),
        (_elsewhere("/etc/passwd"), "no file of tensors that the manifest names"),
        (_elsewhere("host.json"), "no file of tensors that the manifest names"),
        (_beyond, "a record lies beyond"),
        (_shared, "two records share bytes"),
        (_other_dtype, "lm_head.weight in __0_0.distcp can't be read .*torch.BFloat16Storage"),
    ],
)
def test_chunks_and_records_that_do_not_make_whole_tensors_are_refused(base, tmp_path, metadata, change, found):
    change(metadata)
    with pytest.raises(UserError, match=found):
        read_all(opened(with_metadata(base, tmp_path, pickle.dumps(metadata))), written=True)


@pytest.mark.parametrize(
    ("shape", "boxes", "whole"),
    [
        ((), [((), ())], True),
        ((), [], False),
        ((0,), [((0,), (0,))], True),
        ((4,), [((0,), (2,)), ((2,), (2,))], True),
        ((4,), [((2,), (2,)), ((0,), (2,))], True),
        ((5,), [((0,), (3,)), ((3,), (2,))], True),
        ((4,), [((0,), (2,)), ((0,), (2,))], False),
        ((4,), [((0,), (2,)), ((1,), (2,)), ((3,), (1,))], False),
        ((4,), [((0,), (2,))], False),
        ((4,), [((0,), (2,)), ((2,), (3,))], False),
        ((2, 2), [((0, 0), (1, 1)), ((0, 1), (1, 1)), ((1, 0), (1, 1)), ((1, 1), (1, 1))], True),
        ((2, 2), [((0, 0), (1, 1)), ((0, 1), (1, 1)), ((1, 0), (1, 1)), ((1, 0), (1, 1))], False),
        ((2, 2), [((0, 0), (1, 1)), ((1, 1), (1, 1))], False),
        ((4,), [((0, 0), (4, 1))], False),
    ],
)
def test_boxes_tile_a_shape_if_each_element_lies_in_one(shape, boxes, whole):
    assert tiles(shape, boxes) is whole


# ---- what a record holds ----


def _stride(tree: Any) -> Any:
    tree["args"]["()"][3] = {"()": [10**9, 1]}
    return tree


def _count(tree: Any) -> Any:
    tree["args"]["()"][0]["@"]["()"][4] = 10**15
    return tree


def _hooks(tree: Any) -> Any:
    tree["args"]["()"][5] = {"!": "os.mkdir", "args": {"()": ["pwned"]}, "state": None}
    return tree


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (_stride, "larger than its storage"),
        (_count, "another shape or dtype"),
        (_hooks, "'os.mkdir'"),
        (None, "is compressed"),
    ],
)
def test_a_record_of_another_tensor_than_is_listed_is_refused(tmp_path, monkeypatch, change, found):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").mkdir()
    base, data, places = checkpoints.prepare_records(tmp_path / "base")
    begin, length = places[-1]
    record = checkpoints._rewritten(data[begin : begin + length], change or (lambda tree: tree), change is None)
    changed = data[:begin] + record.ljust(length, b" ") + data[begin + length :]
    with pytest.raises(UserError, match=rf"lm_head\.weight in __0_0\.distcp can't be read .*{found}"):
        read_all(opened(copied(base, tmp_path, {TENSORS: changed})), written=False)
    assert not Path("pwned").exists()


# ---- what the texts hold ----


@pytest.mark.parametrize(
    ("name", "change", "found"),
    [
        ("host.json", {"step": "1"}, "host.json can't be read .ValueError: step is '1'"),
        ("host.json", {"step": -1}, "step is -1"),
        ("host.json", {"step": None}, "step is None"),
        ("host.json", {"learning_rate": float("nan")}, "learning_rate is nan"),
        ("host.json", {"metrics_read": 1}, "metrics_read is 1"),
        ("host.json", {"data": []}, r"data is \[\]"),
        ("host.json", {"random": {}}, "host.json can't be read .KeyError"),
        ("trainer_state.json", {"global_step": 1e300}, r"global_step is 1e\+300"),
        ("trainer_state.json", {"epoch": float("nan")}, "epoch is nan"),
        ("trainer_state.json", {"log_history": False}, "log_history is False"),
        ("trainer_state.json", {"epoch": ""}, "epoch is ''"),
        ("trainer_state.json", {"log_history": [{"loss": "low", "step": 1}]}, "log_history is "),
        ("trainer_state.json", {"unheard_of": 1}, "unheard_of"),
        ("training_args.json", {"model": {}}, "model is {}"),
        ("config.json", {"num_hidden_layers": 10**18}, "1,000 layers are the most"),
        ("config.json", {"hidden_size": "wide"}, "config.json can't be read"),
        ("tokenizer/tokenizer.json", {"model": 3}, "tokenizer can't be read"),
        ("tokenizer/tokenizer_config.json", {"model_max_length": "far"}, "tokenizer can't be read"),
    ],
)
def test_a_text_of_wrong_types_is_refused_by_its_name_and_what_is_wrong(base, tmp_path, name, change, found):
    data = json.dumps({**json.loads((base / name).read_bytes()), **change}).encode()
    folder = copied(base, tmp_path, {name: data})
    with pytest.raises(UserError, match=found):
        _read_texts(folder)


def _read_texts(folder: Path) -> None:
    found = opened(folder)
    assert found.config.model_type == "llama"
    assert found.tokenizer.eos_token == "w1"


def test_a_text_that_nests_without_end_is_refused(base, tmp_path):
    with pytest.raises(UserError, match=r"host\.json can't be read .RecursionError"):
        opened(copied(base, tmp_path, {"host.json": b"[" * 100_000}))


@pytest.mark.parametrize("at", [-1, 625, 10**6, 1.5, "1", True])
def test_a_state_of_numpy_s_generator_that_would_read_beyond_its_key_is_refused(at):
    state = random_state()
    state["numpy"]["state"]["pos"] = at
    with pytest.raises(ValueError, match="numpy"):
        check_random_state(state)


def test_states_of_the_generators_are_checked_and_not_set():
    state, before = random_state(), np.random.get_state()[1].copy()
    state["python"][2], state["torch"] = None, random_state()["torch"]
    np.random.rand(3)
    check_random_state(state)
    with pytest.raises(RuntimeError):
        check_random_state({**state, "torch": "AAAA"})
    assert not np.array_equal(np.random.get_state()[1], before) or np.random.get_state()[2] != 624


def test_the_list_of_tensors_that_is_read_is_what_dcp_wrote(base, metadata):
    data = (base / ".metadata").read_bytes()
    assert as_pickle(as_tree(read_pickle(data, dcp_metadata._NAMES)))[:2] == data[:2]
    entries = dcp_metadata.read_listing(data, {TENSORS: (base / TENSORS).stat().st_size})
    for name, entry in metadata.state_dict_metadata.items():
        found = [(chunk.offsets, chunk.sizes) for chunk in entries[name].chunks]
        assert found == [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
