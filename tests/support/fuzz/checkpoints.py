"""Checkpoints: mutated manifests, lists of tensors, records and texts, read as a run and an export read them."""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from hypothesis import strategies as st
from rich.console import Console
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.distributed.checkpoint.metadata import Metadata
from transformers import LlamaConfig, PreTrainedTokenizerFast, TrainerState

from shardwright.checkpoint import dcp_metadata, manifest, tensor_records
from shardwright.checkpoint.host_state import random_state, set_random_state
from shardwright.checkpoint.plain_pickle import read_pickle
from shardwright.checkpoint.read import RunCheckpoint, find_checkpoint, open_checked
from shardwright.checkpoint.tensors import write_listing, write_part
from shardwright.checkpoint.write import run_texts
from shardwright.data.rows.batches import TrainingBatches
from shardwright.data.rows.rows import StoredRows
from shardwright.files.folder import Folder, as_json
from shardwright.model.meta_model import meta_model
from shardwright.report.pictures import loss_curve
from tests.support.fuzz.edits import MILD, as_text, byte_edits, edited, edited_bytes, tree_edits
from tests.support.fuzz.kind import Kind
from tests.support.fuzz.pickles import EVIL, as_pickle, as_tree
from tests.support.lives import TINY

TENSORS = "__0_0.distcp"
SPECIAL = ("fifo", "link", "folder")  # what every folder holds beside the checkpoint's own files
_INIT = Metadata.__init__


def rows() -> StoredRows:
    """Twelve rows of eight tokens."""
    return StoredRows(Dataset.from_dict({"input_ids": np.arange(96).reshape(12, 8).tolist()}))


def write_checkpoint(folder: Path) -> Path:
    """A whole checkpoint, whose numbers all lie in [1, 2); the tensors are cut as a mesh cuts them."""
    whole = {"model.layers.*.mlp.up_proj.weight": 1 + torch.rand(2, 4, 6), "lm_head.weight": 1 + torch.rand(8, 4)}
    whole["lm_head.weight"] = whole["lm_head.weight"].clamp(max=1.99).bfloat16()
    halves = [(slice(0, 2), slice(i, i + 2), slice(j, j + 3)) for i in (0, 2) for j in (0, 3)]
    rows_of_head = [(slice(0, 4), slice(0, 4)), (slice(4, 8), slice(0, 4))]
    boxes = {"model.layers.*.mlp.up_proj.weight": halves, "lm_head.weight": rows_of_head}
    snapshot = {name: [(box, whole[name][box].clone()) for box in boxes[name]] for name in whole}
    shapes = {name: tuple(values.shape) for name, values in whole.items()}
    files = write_listing(Folder(folder), [write_part(Folder(folder), snapshot)], shapes)
    batches = TrainingBatches(rows(), 2, seed=1)
    next(batches)
    history = [{"loss": 5.0, "grad_norm": 1.0, "step": 1, "epoch": 0.1}, {"eval_loss": 5.0, "step": 1, "epoch": 0.1}]
    host = {
        "step": 1,
        "learning_rate": 1e-3,
        "data": batches.state_dict(),
        "metrics_read": True,
        "random": random_state(),
        "mesh": {"fsdp": 8},
        "versions": {"torch": "2.9.0"},
    }
    texts = {"training_args.json": {"model": None, "max_steps": 9}, "recipe.json": {"name": "r"}, "host.json": host}
    texts["trainer_state.json"] = asdict(TrainerState(global_step=1, epoch=0.1, log_history=history))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({f"w{i}": i for i in range(20)}, unk_token="w0")), eos_token="w1"
    )
    for name, data in run_texts(texts, LlamaConfig(**{**TINY, "num_hidden_layers": 1}), tokenizer).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
        files[name] = manifest.checksum(data)
    manifest.write_manifest(Folder(folder), files)
    return folder


def copied(base: Path, scratch: Path, changed: dict[str, bytes], files: Any = None) -> Path:
    """The checkpoint with other contents of some files, and a manifest that holds their checksums (or ``files``)."""
    folder = scratch / "run" / "checkpoint-1"
    (folder / manifest.TOKENIZER).mkdir(parents=True)
    for path in base.rglob("*"):
        name = str(path.relative_to(base))
        if path.is_file() and name not in changed:
            os.link(path, folder / name)
    os.mkfifo(folder / "fifo")
    (folder / "link").symlink_to("/etc/passwd")
    (folder / "folder").mkdir()
    for name, data in changed.items():
        (folder / name).write_bytes(data)
    if changed or files is not None:
        known = manifest.read_manifest(Folder(base)) if files is None else files
        known = known | {name: manifest.checksum(data) for name, data in changed.items()} if files is None else known
        (folder / manifest.MANIFEST).unlink()
        (folder / manifest.MANIFEST).write_bytes(known if isinstance(known, bytes) else manifest._as_bytes(known))
    return folder


def read_all(found: RunCheckpoint, written: bool) -> None:
    """Reads all tensors, whole and in part. ``written``: none of their values can be another than in [1, 2)."""
    for name in found._tensors.names():
        array = found(name)
        for where in (tuple(slice(None) for _ in array.shape), tuple(slice(0, size // 2) for size in array.shape)):
            values = array[where]
            assert not written or bool(((values >= 1) & (values < 2)).all()), f"{name} holds memory never written"
    assert Metadata.__init__ is _INIT
    assert not Path("pwned").exists()


def opened(folder: Path) -> RunCheckpoint:
    return open_checked(Folder(folder), Console(file=io.StringIO()))


# ---- manifests, and what lies in the folder ----


def run_manifest(base: Path, case: Any, scratch: Path) -> None:
    edits, edits_of_bytes, version, replaced, latest = case
    known = edited(manifest.read_manifest(Folder(base)), edits)
    text = edited_bytes(manifest._as_bytes(known, version), edits_of_bytes)
    folder = copied(base, scratch, {}, text)
    if replaced is not None:
        name, kind = replaced
        _replace(folder / name, kind, base)
    if not latest:
        return read_all(opened(folder), True)
    find_checkpoint("latest", Folder(folder.parent), Console(file=io.StringIO()), lambda found: None)


def _replace(path: Path, kind: str, base: Path) -> None:
    """Puts something else in the place of a file."""
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(base / path.name)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    elif kind == "huge":
        with path.open("wb") as file:
            file.truncate(1 << 42)
    elif kind == "deep":
        path.write_bytes(as_text(None, deep=True))


_FILES = [TENSORS, ".metadata", "manifest.json", "host.json", "trainer_state.json", "tokenizer/tokenizer.json"]
_KINDS = ["fifo", "link", "device", "folder", "huge", "deep", "gone"]
MANIFESTS = Kind(
    write_checkpoint,
    st.tuples(
        tree_edits(least=0),
        st.one_of(st.just([]), st.just([]), byte_edits()),
        st.sampled_from([1, 1, 1, 1, 1, 2, None, "1", [], True, 1.0]),
        st.one_of(st.none(), st.tuples(st.sampled_from(_FILES), st.sampled_from(_KINDS))),
        st.booleans(),
    ),
    run_manifest,
    weight=20,
)


# ---- lists of tensors ----


def prepare_metadata(folder: Path) -> Any:
    write_checkpoint(folder)
    data = (folder / ".metadata").read_bytes()
    return folder, as_tree(read_pickle(data, dcp_metadata._NAMES)), data


def run_metadata(made: Any, case: Any, scratch: Path) -> None:
    (base, tree, data), (edits, edits_of_bytes) = made, case
    if edits:
        data = as_pickle(edited(tree, edits))
    folder = copied(base, scratch, {".metadata": edited_bytes(data, edits_of_bytes)})
    read_all(opened(folder), True)


METADATA = Kind(
    prepare_metadata,
    st.one_of(
        st.tuples(tree_edits(values=EVIL), st.just([])),
        st.tuples(tree_edits(values=EVIL, most=2, actions=MILD), st.just([])),
        st.tuples(st.just([]), byte_edits()),
    ),
    run_metadata,
    weight=22,
)


# ---- records ----


def prepare_records(folder: Path) -> Any:
    write_checkpoint(folder)
    places = pickle.loads((folder / ".metadata").read_bytes()).storage_data.values()
    return folder, (folder / TENSORS).read_bytes(), [(place.offset, place.length) for place in places]


def run_records(made: Any, case: Any, scratch: Path) -> None:
    (base, data, places), (number, edits, edits_of_bytes, compress) = made, case
    begin, length = places[number % len(places)]
    record = data[begin : begin + length]
    if edits or compress:
        record = _rewritten(record, lambda tree: edited(tree, edits), compress)
    record = edited_bytes(record, edits_of_bytes)
    folder = copied(base, scratch, {TENSORS: data[:begin] + record + data[begin + length :]})
    read_all(opened(folder), False)


def _rewritten(record: bytes, edit: Callable[[Any], Any], compress: bool) -> bytes:
    """The record as another archive: its pickle is what ``edit`` returns, and its entries perhaps compressed."""
    made, out = zipfile.ZipFile(io.BytesIO(record)), io.BytesIO()
    storages = set(tensor_records._STORAGES.values())
    tree = as_tree(
        read_pickle(made.read("archive/data.pkl"), {tensor_records._REBUILD, tensor_records._NO_HOOKS, *storages})
    )
    tree["args"]["()"][0] = {"@": tree["args"]["()"][0]}
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED) as archive:
        for name in made.namelist():
            archive.writestr(name, as_pickle(edit(tree)) if name.endswith(".pkl") else made.read(name))
        written = out.tell() + sum(46 + len(name) for name in made.namelist()) + 22
        archive.comment = b" " * max(0, len(record) - written)  # so that the others stay where the list says
    return out.getvalue()


RECORDS = Kind(
    prepare_records,
    st.tuples(
        st.integers(0, 100),
        st.one_of(st.just([]), tree_edits(values=EVIL)),
        st.one_of(st.just([]), byte_edits()),
        st.booleans(),
    ),
    run_records,
    weight=12,
)


# ---- texts ----


def run_texts_case(base: Path, case: Any, scratch: Path) -> None:
    name, edits, edits_of_bytes, deep = case
    tree = json.loads((base / name).read_bytes())
    data = edited_bytes(as_text(edited(tree, edits), deep), edits_of_bytes)
    found = opened(copied(base, scratch, {name: data}))
    kept = random_state()
    set_random_state(found.host["random"])
    torch.rand(3), np.random.rand(3)
    set_random_state(kept)
    batches = TrainingBatches(rows(), 2, seed=1)
    batches.load_state_dict(found.host["data"])
    next(batches)
    state = found.trainer_state
    as_json(asdict(state))
    int(state.epoch or 0)
    if name == "trainer_state.json":
        loss_curve(state.log_history, None)
    found.other_options({"max_steps": 3, "model": None})
    if name == "config.json":
        meta_model(found.config)
    if name.startswith("tokenizer"):
        assert isinstance(found.tokenizer("w1 w2")["input_ids"], list)


_TEXTS = ["host.json", "host.json", "host.json", "trainer_state.json", "training_args.json", "recipe.json"]
_TEXTS += ["config.json", "config.json", "tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json"]
TEXTS = Kind(
    write_checkpoint,
    st.tuples(
        st.sampled_from(_TEXTS),
        tree_edits(least=0),
        st.one_of(st.just([]), st.just([]), st.just([]), byte_edits()),
        st.sampled_from([False] * 19 + [True]),
    ),
    run_texts_case,
    weight=16,
)
