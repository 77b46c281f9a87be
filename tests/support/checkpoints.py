"""Checkpoints of a small state, written and read as a run does it."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoConfig, LlamaConfig, TrainerState

from shardwright.checkpoint import manifest
from shardwright.checkpoint.host_state import random_state
from shardwright.checkpoint.lineage import folder_of
from shardwright.checkpoint.read import RunCheckpoint
from shardwright.checkpoint.tensors import write_index, write_part
from shardwright.checkpoint.write import CheckpointWriter, run_texts
from shardwright.files.folder import Folder
from shardwright.model.meta_model import meta_model
from tests.support.lives import TINY

LAYERS = 3
VALUES = {
    "model.layers.*.mlp.up_proj.weight": torch.arange(LAYERS * 16 * 8, dtype=torch.float32).reshape(LAYERS, 16, 8),
    "model.layers.*.mlp.up_proj.weight first moment": torch.rand(LAYERS, 16, 8),
    "lm_head.weight": torch.rand(24, 8).to(torch.bfloat16),
    "model.layers.0.norm.weight": torch.rand(8),
    "model.layers.1.norm.weight": torch.rand(8),
    "metrics": torch.rand(5),
}
SPECS = {
    "model.layers.*.mlp.up_proj.weight": (None, ("fsdp", "tensor"), None),
    "model.layers.*.mlp.up_proj.weight first moment": (None, "fsdp", "tensor"),
    "lm_head.weight": ("tensor", None),
    "model.layers.0.norm.weight": (None,),
    "model.layers.1.norm.weight": ("tensor",),
    "metrics": (None,),
}


def host(step: int) -> dict:
    rest = {"learning_rate": 1e-3, "data": {}, "metrics_read": True}
    return {"step": step, "random": random_state(), **rest}


TEXTS = {"training_args.json": {"max_steps": 9}, "recipe.json": {"name": "r"}}


def writer(output: Folder, limit: int | None = None) -> CheckpointWriter:
    return CheckpointWriter(output, run_texts(TEXTS, LlamaConfig(**TINY), None), limit)


def save(
    output: Folder, state, *steps: int, limit: int | None = None, best: int | None = None, resume: int | None = None
) -> list[int]:
    """A run that saves at ``steps`` and ends; returns which steps it set aside when it began."""
    saves = writer(output, limit)
    aside = saves.begin(None if resume is None else RunCheckpoint(folder_of(output, resume)))
    for step in steps:
        kept = None if best is None else f"checkpoint-{best}"
        saves.save(state, host(step), TrainerState(global_step=step, best_model_checkpoint=kept))
    saves.wait()
    return aside


def quiet() -> Console:
    return Console(file=io.StringIO(), width=400)


def anything(found: RunCheckpoint) -> None:
    """Accepts every checkpoint."""


def write_untrained(folder: Path, config: Mapping[str, Any], **arguments: Any) -> None:
    """A whole checkpoint of step 7 of the model that ``config`` describes, all of it zeros."""
    model = meta_model(AutoConfig.for_model(**config))
    tensors = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
    snapshot = {name: [(tuple(slice(0, n) for n in t.shape), t)] for name, t in tensors.items()}
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    written = write_index(Folder(folder), [write_part(Folder(folder), snapshot)], shapes)
    said: dict[str, Any] = {"lineage": {}, "asked_batch": [8, 1], "mesh": {"fsdp": 8}}
    texts: dict[str, Any] = {"host.json": {**host(7), **said}, "training_args.json": {"optim": "adamw", **arguments}}
    texts |= {"recipe.json": {"batch": ["fsdp"]}, "trainer_state.json": {}}
    texts["config.json"] = dict(config)
    for name, content in texts.items():
        data = json.dumps(content).encode()
        Folder(folder).write(name, data)
        written[name] = manifest.checksum(data)
    manifest.write_manifest(Folder(folder), written)
