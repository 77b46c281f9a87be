"""Facts of a model: what is asked of its config and of its modules on meta."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel


def stated(config: PretrainedConfig, name: str) -> Any:
    """What the config of the text says; None if it says nothing, or something else for each layer."""
    try:
        return getattr(config.get_text_config(), name, None)
    except RuntimeError:  # transformers/integrations/heterogeneity/configuration_utils.py, transformers 5.23
        return None


def most_positions(model: PreTrainedModel) -> int | None:
    """How many positions the model's tables have; None where positions are computed, as RoPE does, or are none.

    On XLA a position beyond a table's end would silently get the last entry.
    """
    limit = stated(model.config, "max_position_embeddings")
    tokens = model.get_input_embeddings()
    found = []
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module is not tokens:
            padding = -1 if module.padding_idx is None else module.padding_idx
            # two rows more than positions where a family begins at the third
            if limit is not None and limit <= module.num_embeddings <= limit + 2:
                found.append(min(limit, module.num_embeddings - padding - 1))
        # sines, rotations or masks of each position, or the positions themselves
        if limit is not None and any(b.dim() > 1 and limit in b.shape[:2] for b in module.buffers(recurse=False)):
            found.append(limit)
    return min(found, default=None)


def experts_modules(model: PreTrainedModel) -> list[str]:
    """The dotted names of the modules that hold experts."""
    # semi-private: `use_experts_implementation` marks experts modules so (transformers/integrations/moe.py, 5.23)
    return [name for name, module in model.named_modules() if hasattr(module, "_is_expert_parallel")]


def routing_of(model: PreTrainedModel, config: PretrainedConfig) -> tuple[int, int] | None:
    """(experts that a token goes to, experts that there are); None without experts, or if the config does not say."""
    chosen, inside = getattr(config.get_text_config(), "num_experts_per_tok", None), experts_modules(model)
    if chosen is None or not inside:
        return None
    return chosen, next(iter(model.get_submodule(inside[0]).parameters())).shape[0]


def training_flops(model: PreTrainedModel, config: PretrainedConfig, rows: int, length: int) -> float | None:
    """FLOPs that a step on ``rows`` × ``length`` tokens needs, as MFU counts them: nothing is counted twice.

    There are 6 for each pair of a weight and a token that meet in a matrix product (4 if the weight is frozen), where a
    token meets only the experts that it goes to, and a lookup of embeddings is no product. To these come 6 × the width
    of query and value for each pair of tokens that attend. None if the config does not say how many experts a token
    goes to.
    """
    text = config.get_text_config()
    inside = experts_modules(model)
    share = 1.0
    if inside:
        routing = routing_of(model, config)
        if routing is None:
            return None
        share = routing[0] / routing[1]
    looked_up = {id(p) for p in model.get_input_embeddings().parameters()}
    looked_up -= {id(p) for p in model.get_output_embeddings().parameters()}
    weights = 0.0
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and id(parameter) not in looked_up:
            each = 6 if parameter.requires_grad else 4
            weights += each * parameter.numel() * (share if name.rpartition(".")[0] in inside else 1.0)
    heads = text.num_attention_heads
    width = heads * (getattr(text, "head_dim", None) or text.hidden_size // heads)
    window = min(getattr(text, "sliding_window", None) or length, length)
    pairs = length * window - window * (window - 1) / 2  # a row's pairs of a token and one that it sees
    return weights * rows * length + 12 * text.num_hidden_layers * width * pairs * rows


def in_short(error: Exception) -> str:
    """The type and first paragraph of a library's message, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).partition(chr(10) * 2)[0].split())}"
