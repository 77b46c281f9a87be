"""Tiny multimodal models: a text part beside a vision tower, as transformers itself saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel

VOCABULARY = 320
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
IMAGE_TOKEN = VOCABULARY - 1  # which no text holds
QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
LLAMA4_VISION = {
    "vision_output_dim": 64,
    "projector_input_dim": 64,
    "projector_output_dim": 64,
    "pixel_shuffle_ratio": 1.0,
}
MLLAMA_VISION = {
    **{name: VISION[name] for name in ("hidden_size", "intermediate_size", "image_size", "patch_size")},
    "num_hidden_layers": 1,
    "num_global_layers": 1,
    "attention_heads": 2,
    "vision_output_dim": 64,
    "intermediate_layers_indices": [0],
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
FAMILIES: dict[str, dict[str, Any]] = {
    "llava": {
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": {"model_type": "clip_vision_model", **VISION, "projection_dim": 32},
        "image_token_index": IMAGE_TOKEN,
    },
    "gemma3": {
        "text_config": {**TEXT, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 512},
        "vision_config": {**VISION},
        "mm_tokens_per_image": 4,
        "image_token_index": IMAGE_TOKEN,
    },
    "qwen2_5_vl": {
        "text_config": {**TEXT, "rope_parameters": {**ROPE, "mrope_section": [1, 1, 2]}},
        "vision_config": QWEN_VISION,
        "image_token_id": IMAGE_TOKEN,
    },
    "llama4": {
        "text_config": {**TEXT, "head_dim": 8, "intermediate_size_mlp": 128, "num_local_experts": 4},
        "vision_config": {**VISION, **LLAMA4_VISION, "pixel_shuffle_ratio": 1.0},
        "image_token_index": IMAGE_TOKEN,
    },
    "mllama": {  # its class of the text alone takes the whole config; no text meets its third layer
        "text_config": {**TEXT, "num_hidden_layers": 3, "cross_attention_layers": [2], "rope_parameters": ROPE},
        "vision_config": MLLAMA_VISION,
        "image_token_index": IMAGE_TOKEN,
    },
}


def config_of(family: str, **changes: Any) -> PretrainedConfig:
    return AutoConfig.for_model(family, **FAMILIES[family], **changes)


def plain(config: PretrainedConfig) -> PreTrainedModel:
    """The whole model, eager and in float32, with random weights; in evaluation, where no image need be given."""
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32, attn_implementation="eager")
    for name, parameter in model.named_parameters():  # all of them: transformers leaves some as their memory was
        torch.nn.init.normal_(parameter, mean=float("norm" in name and "bias" not in name), std=0.1)
    return model.eval()


def save(model: PreTrainedModel, folder: Path) -> None:
    """Writes ``model`` in bfloat16, as checkpoints on the hub are, in several files, with its processor's settings."""
    for parameter in model.parameters():  # not buffers, of which some are complex
        parameter.data = parameter.data.to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="200KB")
    (folder / "preprocessor_config.json").write_text('{"image_processor_type": "SiglipImageProcessor"}')
