"""The model as transformers describes it: its config, and its module on meta, which allocates nothing."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import torch
from accelerate import init_empty_weights
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from trainer.errors import UserError
from trainer.layout.recipe import Recipe


def load_config(model: str | None, recipe: Recipe) -> PretrainedConfig:
    """The config of ``model``: a folder with a ``config.json``, such a file, or a hub id; None: the recipe's.

    Raises:
        UserError: nothing there, an unreadable config, or None where the recipe has no default model.
    """
    if model is None and recipe.model is None:
        raise UserError(
            asked=f"recipe {recipe.name} without a model",
            found="the recipe has no default model",
            why="a plan needs shapes",
            instead="--model with a hub id, a folder, or a config.json",
        )
    path = None if model is None else Path(model)
    if model is not None and path is not None:
        looks_local = model.endswith(".json") or model.startswith((".", "~", os.sep)) or model.count("/") > 1
        config_file = path / "config.json" if path.is_dir() else path
        if (looks_local or path.exists()) and not config_file.is_file():
            raise UserError(
                asked=f"model {model}",
                found=f"no file {config_file}",
                why="a local model is a config.json, or a folder that has one",
                instead="the path of such a file or folder, or a hub id such as mistralai/Mixtral-8x7B-v0.1",
            )
    try:
        if model is None:
            return AutoConfig.for_model(**dict(recipe.model or {}))
        return AutoConfig.from_pretrained(model, trust_remote_code=False)
    # transformers and the hub client raise many types here (OSError, ValueError, KeyError, their own);
    # whichever it is, what the user named has no config that can be read.
    except Exception as error:
        raise UserError(
            asked=f"model {model}" if model else f"recipe {recipe.name}: its default model",
            found=_in_short(error),
            why="no transformers config can be read from it",
            instead="a config.json whose model_type transformers knows, a folder with one, or a hub id, "
            "which needs network, or the hub's cache (HF_HUB_OFFLINE=1 looks only there)",
        ) from error


def meta_model(config: PretrainedConfig) -> PreTrainedModel:
    """The causal-LM model of ``config`` on meta: names, shapes and ties, and no memory.

    Weights are float32 whatever dtype the config states: training keeps them so, also under bfloat16 compute.

    Raises:
        UserError: the config has no causal-LM head, or transformers cannot build the model from it.
    """
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or getattr(config, "is_decoder", None) is False:
        raise UserError(
            asked=f"a model of type {config.model_type!r}",
            found="a model without a causal-LM head",
            why="training predicts the next token",
            instead="a decoder that AutoModelForCausalLM loads, such as mixtral, llama or qwen2",
        )
    try:
        # unlike `torch.device("meta")` it keeps the values of buffers: RoPE's frequencies are in no checkpoint
        with init_empty_weights(include_buffers=False):
            # a copy: choosing a model's kernels writes into its config
            model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32)
        model.tie_weights()  # init_empty_weights makes a new parameter of each one that is assigned, and ties are lost
        return model
    # The sizes in a config are the user's, and what they break inside a model raises whatever it raises.
    except Exception as error:
        raise UserError(
            asked=f"a model of type {config.model_type!r}",
            found=_in_short(error),
            why="transformers cannot build a model from this config",
            instead="sizes that go together in its config.json",
        ) from error


def experts_modules(model: PreTrainedModel) -> list[str]:
    """The dotted names of the modules that hold experts."""
    # semi-private: `use_experts_implementation` marks experts modules so (transformers/integrations/moe.py, 5.23)
    return [name for name, module in model.named_modules() if hasattr(module, "_is_expert_parallel")]


def training_flops(model: PreTrainedModel, config: PretrainedConfig, rows: int, length: int) -> float | None:
    """FLOPs that a step on ``rows`` × ``length`` tokens needs, as MFU counts them: nothing is counted twice.

    There are 6 for each pair of a weight and a token that meet in a matrix product, where a token meets only the
    experts that it goes to, and a lookup of embeddings is no product. To these come 6 × the width of query and value
    for each pair of tokens that attend. None if the config does not say how many experts a token goes to.
    """
    text = config.get_text_config()
    inside = experts_modules(model)
    share = 1.0
    if inside:
        chosen = getattr(text, "num_experts_per_tok", None)
        experts = next(iter(model.get_submodule(inside[0]).parameters())).shape[0]
        if chosen is None:
            return None
        share = chosen / experts
    looked_up = {id(p) for p in model.get_input_embeddings().parameters()}
    looked_up -= {id(p) for p in model.get_output_embeddings().parameters()}
    weights = 0.0
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and id(parameter) not in looked_up:
            weights += parameter.numel() * (share if name.rpartition(".")[0] in inside else 1.0)
    heads = text.num_attention_heads
    width = heads * (getattr(text, "head_dim", None) or text.hidden_size // heads)
    window = min(getattr(text, "sliding_window", None) or length, length)
    pairs = length * window - window * (window - 1) / 2  # a row's pairs of a token and one that it sees
    return 6 * weights * rows * length + 12 * text.num_hidden_layers * width * pairs * rows


def _in_short(error: Exception) -> str:
    """The type and first paragraph of a library's message, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).partition(chr(10) * 2)[0].split())}"
