"""Checkpoints: mutated manifests, lists of tensors, records and texts, read as a run and an export read them."""

from __future__ import annotations

import io
import json
import os
import shutil
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
from transformers import LlamaConfig, PreTrainedTokenizerFast, TrainerState

from shardwright.checkpoint import manifest
from shardwright.checkpoint.host_state import random_state, set_random_state
from shardwright.checkpoint.manifest import INDEX
from shardwright.checkpoint.read import RunCheckpoint, find_checkpoint, open_checked
from shardwright.checkpoint.tensors import write_index, write_part
from shardwright.checkpoint.write import run_texts
from shardwright.data.rows.batches import TrainingBatches
from shardwright.data.rows.rows import StoredRows
from shardwright.files.folder import Folder, as_json
from shardwright.model.meta_model import meta_model
from shardwright.report.pictures import loss_curve
from tests.support.fuzz.edits import MILD, as_text, byte_edits, edited, edited_bytes, tree_edits
from tests.support.fuzz.kind import Kind
from tests.support.lives import TINY

TENSORS = "tensors-0-0.safetensors"
SPECIAL = ("fifo", "link", "folder")  # what every folder holds beside the checkpoint's own files


def rows() -> StoredRows:
    """Twelve rows of eight tokens."""
    return StoredRows(Dataset.from_dict({"input_ids": np.arange(96).reshape(12, 8).tolist()}))


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(20)}, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1")


def write_checkpoint(folder: Path) -> Path:
    """A whole checkpoint, whose numbers all lie in [1, 2); the tensors are cut as a mesh cuts them."""
    whole = {"model.layers.*.mlp.up_proj.weight": 1 + torch.rand(2, 4, 6), "lm_head.weight": 1 + torch.rand(8, 4)}
    whole["lm_head.weight"] = whole["lm_head.weight"].clamp(max=1.99).bfloat16()
    halves = [(slice(0, 2), slice(i, i + 2), slice(j, j + 3)) for i in (0, 2) for j in (0, 3)]
    rows_of_head = [(slice(0, 4), slice(0, 4)), (slice(4, 8), slice(0, 4))]
    boxes = {"model.layers.*.mlp.up_proj.weight": halves, "lm_head.weight": rows_of_head}
    snapshot = {name: [(box, whole[name][box].clone()) for box in boxes[name]] for name in whole}
    shapes = {name: tuple(values.shape) for name, values in whole.items()}
    files = write_index(Folder(folder), [write_part(Folder(folder), snapshot)], shapes)
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
    for name, data in run_texts(texts, LlamaConfig(**{**TINY, "num_hidden_layers": 1}), tokenizer()).items():
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


_FILES = [TENSORS, INDEX, "manifest.json", "host.json", "trainer_state.json", "tokenizer/tokenizer.json"]
_KINDS = ["fifo", "link", "device", "folder", "huge", "deep", "gone"]
MANIFESTS = Kind(
    write_checkpoint,
    st.tuples(
        tree_edits(least=0),
        st.one_of(st.just([]), st.just([]), byte_edits()),
        st.sampled_from([2, 2, 2, 2, 2, 1, 3, "2", [], True, 2.0]),
        st.one_of(st.none(), st.tuples(st.sampled_from(_FILES), st.sampled_from(_KINDS))),
        st.booleans(),
    ),
    run_manifest,
    weight=20,
)


# ---- lists of tensors, and what lies where they say ----


def run_index(base: Path, case: Any, scratch: Path) -> None:
    edits, edits_of_bytes, edits_of_tensors, deep = case
    index = as_text(edited(json.loads((base / INDEX).read_bytes()), edits), deep)
    changed = {INDEX: edited_bytes(index, edits_of_bytes)}
    if edits_of_tensors:
        changed[TENSORS] = edited_bytes((base / TENSORS).read_bytes(), edits_of_tensors)
    read_all(opened(copied(base, scratch, changed)), not edits_of_tensors)


INDICES = Kind(
    write_checkpoint,
    st.tuples(
        st.one_of(tree_edits(), tree_edits(most=2, actions=MILD), st.just([])),
        st.one_of(st.just([]), st.just([]), byte_edits()),
        st.one_of(st.just([]), st.just([]), byte_edits()),
        st.sampled_from([False] * 19 + [True]),
    ),
    run_index,
    weight=24,
)


# ---- format 1 ----


def prepare_old(folder: Path) -> Path:
    old = Path(__file__).parents[2] / "checkpoint" / "old_format" / "lora" / "checkpoint-3"
    return shutil.copytree(old, folder, dirs_exist_ok=True)


def run_old(base: Path, case: Any, scratch: Path) -> None:
    name, edits_of_bytes = case
    folder = copied(base, scratch, {name: edited_bytes((base / name).read_bytes(), edits_of_bytes)})
    read_all(opened(folder), False)


OLD = Kind(
    prepare_old,
    st.tuples(st.sampled_from([".metadata", ".metadata", "__0_0.distcp"]), byte_edits()),
    run_old,
    weight=10,
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
