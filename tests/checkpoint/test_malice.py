"""A checkpoint is data, whoever made it: what is not as a save leaves it is refused by name, and runs nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwright.checkpoint import manifest
from shardwright.checkpoint.host_state import check_random_state, random_state
from shardwright.checkpoint.manifest import INDEX
from shardwright.checkpoint.tensors import tiles
from shardwright.errors import UserError
from shardwright.files.folder import Folder, StorageError
from tests.support.fuzz import checkpoints
from tests.support.fuzz.checkpoints import TENSORS, copied, opened, read_all

STACK, HEAD = "model.layers.*.mlp.up_proj.weight", "lm_head.weight"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write_checkpoint(tmp_path_factory.mktemp("base"))


def test_what_nothing_was_done_to_is_read(base, tmp_path):
    read_all(opened(copied(base, tmp_path, {})), written=True)


# ---- what a manifest names ----


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("/dev/zero", "no name of a checkpoint's file"),
        ("../checkpoint-1/host.json", "no name of a checkpoint's file"),
        ("tokenizer/../host.json", "no name of a checkpoint's file"),
        ("tokenizer/more/../../host.json", "no name of a checkpoint's file"),
        ("tokenizer//host.json", "no name of a checkpoint's file"),
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


def _twice(index: Any) -> None:
    index[STACK]["pieces"].append(index[STACK]["pieces"][0])


def _overlap(index: Any) -> None:
    next(piece for piece in index[STACK]["pieces"] if piece["offsets"] == [0, 2, 0])["offsets"] = [0, 1, 0]


def _missing(index: Any) -> None:
    index[STACK]["pieces"].pop()


def _larger(index: Any) -> None:
    index[HEAD]["shape"] = [10**9, 10**9]


def _piece(**changes: Any) -> Any:
    return lambda index: index[HEAD]["pieces"][0].update(changes)


def _larger_piece(index: Any) -> None:
    index[HEAD].update(shape=[10**9, 10**9], pieces=index[HEAD]["pieces"][:1])
    _piece(shape=[10**9, 10**9])(index)


def _endless_stack(index: Any) -> None:
    piece = {**index[HEAD]["pieces"][0], "length": 0, "offsets": [0, 0], "shape": [10**15, 0]}
    index["a.*.b"] = {"dtype": "F32", "shape": [10**15, 0], "pieces": [piece]}


def _other_layers(index: Any) -> None:
    index[STACK.replace("*", "0:3")] = index.pop(STACK)


def _shared(index: Any) -> None:
    first, second = index[HEAD]["pieces"]
    second.update(begin=first["begin"], file=first["file"])


def _entry(**changes: Any) -> Any:
    return lambda index: index[HEAD].update(changes)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (_twice, "do not tile its shape"),
        (_overlap, "do not tile its shape"),
        (_missing, "do not tile its shape"),
        (_larger, "do not tile its shape"),
        (_larger_piece, "of shape .* has 32 bytes"),
        (_endless_stack, "other layers than its name says"),
        (_other_layers, "other layers than its name says"),
        (_piece(file="/etc/passwd"), "a piece lies in '/etc/passwd'"),
        (_piece(file="host.json"), "a piece lies in 'host.json'"),
        (_piece(begin=10**18), "overlap, or leave out bytes between them"),
        (_piece(begin=0), "overlap, or leave out bytes between them"),
        (_piece(begin=-1), "in the place of a list of counts"),
        (_piece(offsets=[0.0, 0]), "in the place of a list of counts"),
        (_piece(length=31), "has 31 bytes"),
        (_shared, "overlap, or leave out bytes"),
        (_entry(dtype="F32"), "has 32 bytes"),
        (_entry(dtype="OBJECT"), "KeyError: 'OBJECT'"),
        (_entry(shape=[10**40]), "in the place of a list of counts"),
        (_entry(pieces=None), "is no list of tensors .TypeError"),
    ],
)
def test_pieces_that_do_not_make_whole_tensors_are_refused(base, tmp_path, change, found):
    index = json.loads((base / INDEX).read_bytes())
    change(index)
    with pytest.raises(UserError, match=found):
        read_all(opened(copied(base, tmp_path, {INDEX: json.dumps(index).encode()})), written=True)


@pytest.mark.parametrize(
    ("data", "found"), [(b"[]", "AttributeError"), (b"[" * 100_000, "RecursionError"), (b"\xff", "UnicodeDecodeError")]
)
def test_a_list_of_tensors_that_is_none_is_refused(base, tmp_path, data, found):
    with pytest.raises(UserError, match=rf"tensors\.json is no list of tensors .{found}"):
        opened(copied(base, tmp_path, {INDEX: data}))


def test_a_file_of_tensors_that_is_cut_short_is_refused_though_its_manifest_says_so(base, tmp_path):
    short = (base / TENSORS).read_bytes()[:-1]
    with pytest.raises(UserError, match=rf"the pieces in '{TENSORS}' end at"):
        opened(copied(base, tmp_path, {TENSORS: short}))


def test_what_a_file_of_tensors_says_of_itself_is_for_others_and_claims_nothing_here(base, tmp_path):
    data = (base / TENSORS).read_bytes()
    huge = (2**63).to_bytes(8, "little") + data[8:]
    read_all(opened(copied(base, tmp_path, {TENSORS: huge})), written=True)


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
