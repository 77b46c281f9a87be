"""Small models of the families that serving engines read, exported and adapted as a run writes them.

``python -m tests.serving.models FOLDER`` writes them for :mod:`tests.serving.record_vllm`. No two widths of a model are
equal, so that a tensor fits where it belongs and nowhere else.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PretrainedConfig

from shardwright.errors import UserError
from shardwright.files.folder import Folder
from shardwright.model.adapted_weights import adapted_shapes
from shardwright.model.facts import facts_of
from shardwright.models.adapters.lora import Lora
from shardwright.models.experts.input_scaling import ScaledExperts
from shardwright.weights.hub_read import open_hub_weights
from shardwright.weights.hub_write import export
from shardwright.weights.peft_files import AdapterFiles, save_adapter
from shardwright.weights.peft_layout import factor_shapes
from shardwright.weights.weight_files import WEIGHTS
from shardwright.weights.weight_sources import seeded_init

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "vocab_size": 256,
    "head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NO_HEAD_DIM = {**{name: value for name, value in SMALL.items() if name != "head_dim"}, "hidden_size": 128}
ROUTED = {"num_experts_per_tok": 2}
EXPERTS = {**ROUTED, "num_experts": 4, "moe_intermediate_size": 48}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
LINEAR |= {"linear_value_head_dim": 24, "layer_types": ["linear_attention", "full_attention"]}
DENSE_FIRST = {
    "num_nextn_predict_layers": 1,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "moe_intermediate_size": 48,
    "n_shared_experts": 1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "llama, tied": {**SMALL, "tie_word_embeddings": True},
    "mistral": SMALL,
    "qwen2": NO_HEAD_DIM,
    "qwen3": SMALL,
    "phi3": NO_HEAD_DIM,
    "gemma3_text": SMALL,
    "mixtral": {**SMALL, **ROUTED, "num_local_experts": 4},
    "olmoe": {**NO_HEAD_DIM, **ROUTED, "num_experts": 4},
    "granitemoe": {**NO_HEAD_DIM, **ROUTED, "num_local_experts": 4},
    "qwen2_moe": {**NO_HEAD_DIM, **EXPERTS, "shared_expert_intermediate_size": 80},
    "qwen3_moe": {**SMALL, **EXPERTS},
    "qwen3_next": {**SMALL, **EXPERTS, **LINEAR, "shared_expert_intermediate_size": 80},
    "qwen3_5_text": {**SMALL, **LINEAR},
    "qwen3_5_moe_text": {**SMALL, **EXPERTS, **LINEAR, "shared_expert_intermediate_size": 80},
    "gpt_oss": {**SMALL, **ROUTED, "num_local_experts": 4},
    # topk_method is in every config on the hub, and without it vLLM has no place for the routers' biases
    "deepseek_v3": {
        **{name: value for name, value in SMALL.items() if name != "head_dim"},
        **DENSE_FIRST,
        **ROUTED,
        "n_group": 2,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "num_key_value_heads": 4,
        "q_lora_rank": 40,
        "kv_lora_rank": 56,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 24,
    },
    "glm4_moe": {**SMALL, **DENSE_FIRST, **ROUTED, "n_group": 1, "topk_group": 1},
    "llama4_text": {
        **SMALL,
        "intermediate_size_mlp": 112,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "attention_chunk_size": 16,
        "interleave_moe_layer_step": 2,
    },
    # the last three are in every config on the hub
    "minimax_m2": {
        **SMALL,
        **ROUTED,
        "num_local_experts": 4,
        "rotary_dim": 16,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
    },
}
FAMILIES["qwen3_5_moe"] = {  # the whole, whose text part is adapted
    "text_config": {"model_type": "qwen3_5_moe_text", **FAMILIES["qwen3_5_moe_text"]},
    "vision_config": {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": 2,
        "spatial_merge_size": 1,
        "temporal_patch_size": 1,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [],
    },
    "image_token_id": 10,
    "video_token_id": 11,
    "vision_start_token_id": 12,
    "vision_end_token_id": 13,
}
# tensors of the layers for multi-token prediction, which no run trains and an export carries
AFTER_THE_LAST = [
    *("eh_proj", "enorm", "hnorm", "embed_tokens", "shared_head.norm", "shared_head.head", "input_layernorm"),
    *("self_attn.o_proj", "mlp.experts.0.up_proj"),
]
BESIDE = ["fc", "norm", "pre_fc_norm_hidden", "layers.0.self_attn.q_proj", "layers.0.mlp.experts.0.up_proj"]
CARRIED = {
    **{family: [f"model.layers.2.{name}.weight" for name in AFTER_THE_LAST] for family in ("deepseek_v3", "glm4_moe")},
    **{family: [f"mtp.{name}.weight" for name in BESIDE] for family in ("qwen3_next", "qwen3_5_moe")},
}
RANK, ALPHA = 2, 4.0
# what is adapted, and whether experts are written one by one
ADAPTERS = {"peft": ("inner", False), "per_expert": ("inner", True), "lm_head": ("head", False)}


@dataclass(frozen=True)
class Small:
    """A small model of a family, on meta."""

    family: str

    @property
    def values(self) -> dict[str, Any]:
        return FAMILIES[self.family]

    @property
    def config(self) -> PretrainedConfig:
        return AutoConfig.for_model(**{"model_type": self.family.partition(",")[0], **self.values})

    def export(self, folder: Path) -> None:
        whole = facts_of(self.config).whole
        export(folder, copy.deepcopy(whole), seeded_init(whole, 0))
        if carried := {name: torch.ones(8, 8) for name in CARRIED.get(self.family, ())}:
            base = folder.with_name(f"{folder.name} with more")
            folder.rename(base)
            save_file(load_file(base / WEIGHTS) | carried, base / WEIGHTS, metadata={"format": "pt"})
            opened = open_hub_weights(str(base), copy.deepcopy(whole))
            export(folder, copy.deepcopy(whole), opened, base=opened)

    def files(self, kind: str) -> AdapterFiles | None:
        """The adapter of a ``kind`` of ADAPTERS; None: the head is tied."""
        facts = facts_of(self.config)
        model, (picked, per_expert) = facts.model, ADAPTERS[kind]
        if picked == "head" and self.config.get_text_config().tie_word_embeddings:
            return None
        head = model.get_output_embeddings()
        owners = {name: model.get_submodule(name.rpartition(".")[0]) for name in adapted_shapes(model)}
        targets = [name for name, owner in owners.items() if (owner is head) == (picked == "head")]
        targets = [name for name in targets if not isinstance(owners[name], ScaledExperts)]
        lora = Lora(RANK, ALPHA, False, tuple(targets))
        return AdapterFiles(lora, model, facts.whole, facts.names_in_whole, None, per_expert)


def save(folder: Path, files: AdapterFiles, console: Console | None = None) -> None:
    """Writes the adapter with random factors; raises as `save_adapter`."""
    generator, shapes = torch.Generator().manual_seed(0), factor_shapes(files.lora, files.model)
    values = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_adapter(Folder(str(folder)), files, values.__getitem__, None, console or Console(quiet=True))


def written(folder: Path, families: Iterable[str] = FAMILIES) -> Iterator[str]:
    """Writes them; yields what is written."""
    for family in families:
        small = Small(family)
        small.export(folder / family / "model")
        yield family
        for kind in ADAPTERS:
            files = small.files(kind)
            try:
                if files is not None:
                    save(folder / family / kind, files)
                    yield f"{family} {kind}"
            except UserError as error:
                yield f"{family} {kind}: {error.found}"


if __name__ == "__main__":
    for line in written(Path(sys.argv[1])):
        print(line)
