"""Models: mutated configs, safetensors files and indices, opened and read as a run opens and reads them."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers import AutoConfig

from shardwright.layout.load_recipe import load_recipe
from shardwright.model.meta_model import load_config, meta_model
from shardwright.weights.hub_read import open_hub_weights
from shardwright.weights.weight_files import INDEX, WEIGHTS
from tests.support.fuzz.edits import MILD, as_text, byte_edits, edited, edited_bytes, tree_edits
from tests.support.fuzz.kind import Kind
from tests.support.lives import TINY

LLAMA = {**TINY, "num_hidden_layers": 1}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 1}
FILES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def prepare(folder: Path) -> Any:
    """A folder of weights in one file, and one of two files with an index; returns it and its model on meta."""
    model = meta_model(AutoConfig.for_model(**LLAMA))
    tensors = {name: 1 + torch.rand(parameter.shape) for name, parameter in model.named_parameters()}
    (folder / "one").mkdir()
    save_file(tensors, folder / "one" / WEIGHTS)
    (folder / "two").mkdir()
    names = sorted(tensors)
    halves = {FILES[0]: names[::2], FILES[1]: names[1::2]}
    for file, part in halves.items():
        save_file({name: tensors[name] for name in part}, folder / "two" / file)
    where = {name: file for file, part in halves.items() for name in part}
    (folder / "two" / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": where}))
    return folder, model


def run_weights(made: Any, case: Any, scratch: Path) -> None:
    (base, model), (form, edits, edits_of_bytes, replaced, deep) = made, case
    folder = scratch / "model"
    folder.mkdir()
    for path in (base / form).iterdir():
        os.link(path, folder / path.name)
    os.mkfifo(folder / "fifo.safetensors")
    changed = folder / (WEIGHTS if form == "one" else replaced)
    data = changed.read_bytes()
    changed.unlink()
    changed.write_bytes(edited_bytes(_mutated(data, changed, edits, deep), edits_of_bytes))
    if replaced == "fifo":
        changed.unlink()
        os.mkfifo(changed)
    weights = open_hub_weights(str(folder), model)
    for name in model.state_dict():
        values = weights(name)
        values[tuple(slice(0, size) for size in values.shape)]


def _mutated(data: bytes, file: Path, edits: Any, deep: bool) -> bytes:
    if file.name == INDEX:
        return as_text(edited(json.loads(data), edits), deep)
    size = struct.unpack("<Q", data[:8])[0]
    header = as_text(edited(json.loads(data[8 : 8 + size]), edits), deep)
    return struct.pack("<Q", len(header)) + header + data[8 + size :]


_RARELY = st.sampled_from([False] * 19 + [True])
_NO_OR_BYTES = st.one_of(st.just([]), st.just([]), byte_edits())
WEIGHTS_KIND = Kind(
    prepare,
    st.one_of(
        *(
            st.tuples(
                st.just("one"), tree_edits(actions=actions), _NO_OR_BYTES, st.sampled_from([""] * 9 + ["fifo"]), _RARELY
            )
            for actions in (MILD, [*MILD, "replace", "rename"])
        ),
        st.tuples(
            st.just("two"), tree_edits(least=0), _NO_OR_BYTES, st.sampled_from([INDEX, INDEX, FILES[0]]), _RARELY
        ),
    ),
    run_weights,
    weight=16,
)


def run_config(made: Any, case: Any, scratch: Path) -> None:
    family, edits, edits_of_bytes, deep = case
    tree = LLAMA if family == "llama" else MIXTRAL
    full = json.loads(AutoConfig.for_model(**tree).to_json_string(use_diff=False))
    (scratch / "config.json").write_bytes(edited_bytes(as_text(edited(full, edits), deep), edits_of_bytes))
    meta_model(load_config(str(scratch / "config.json"), load_recipe("llama_fsdp")))


CONFIGS = Kind(
    lambda folder: None,
    st.tuples(st.sampled_from(["llama", "mixtral"]), tree_edits(), _NO_OR_BYTES, _RARELY),
    run_config,
    weight=6,
)
