"""Small models that transformers itself saves in the hub's format, and the same models placed on the devices."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from shardwright.layout.load_recipe import load_recipe
from shardwright.layout.plan import ShardingPlan
from shardwright.weights.on_devices import LiveWeights
from shardwright.weights.place import place_parameters
from shardwright.weights.weight_sources import Source
from shardwright.xla.device_mesh import build_mesh
from tests.support.jobs import job_of

SMALL = {
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
MOE = {"num_experts_per_tok": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral_ep", {"model_type": "mixtral", "num_local_experts": 4, **MOE}),
    "llama": ("llama_fsdp", {"model_type": "llama", "tie_word_embeddings": False}),
    "llama, tied": ("llama_fsdp", {"model_type": "llama", "tie_word_embeddings": True}),
    "qwen3_moe": (
        "mixtral_ep",
        {"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 64, "head_dim": 8, **MOE},
    ),
}


def config_of(family: str, **changes: Any) -> PretrainedConfig:
    return AutoConfig.for_model(**{**SMALL, **FAMILIES[family][1], **changes})


def save_theirs(folder: Path, config: PretrainedConfig, *, seed: int = 0, **how: Any) -> PreTrainedModel:
    """Writes a random model of ``config`` by transformers' own `save_pretrained`; norms and biases are random too."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter)
    model.save_pretrained(folder, **how)
    return model


@dataclass
class Placed:
    """An assembled model, whose parameters are on the devices."""

    model: PreTrainedModel
    plan: ShardingPlan
    mesh: Any
    parameters: dict[str, torch.Tensor]

    @property
    def live(self) -> LiveWeights:
        return LiveWeights(self.model, self.plan, self.mesh, self.parameters)


def place(family: str, config: PretrainedConfig, source: Source, *, scan: bool = True) -> Placed:
    """Places the family's model on 8 devices by its recipe, with the parameters of ``source``."""
    recipe = load_recipe(FAMILIES[family][0])
    recipe = recipe.computing(scan=scan)
    mesh = build_mesh(recipe.mesh)
    job = job_of(recipe, config)
    model = copy.deepcopy(job.assembled)
    return Placed(model, job.stored, mesh, place_parameters(model, job.stored, mesh, source))


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    """Returns what the safetensors files of ``folder`` hold; asserts that an index names just that."""
    tensors, where = {}, {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                tensors[name], where[name] = opened.get_tensor(name), file.name
    index = folder / "model.safetensors.index.json"
    if index.exists():
        content = json.loads(index.read_text())
        assert content["weight_map"] == where
        assert content["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    else:
        assert set(where.values()) == {"model.safetensors"}
    return tensors


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    """Whether names, dtypes and bytes are equal."""
    assert ours.keys() == theirs.keys(), sorted(ours.keys() ^ theirs.keys())
    return all(ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name]) for name in theirs)
