"""Llama 4's temperature of attention, by the position that each token has."""

from typing import Any

import torch
from torch import Tensor


def by_position(layer: Any, hidden_states: Tensor, position_ids: Tensor | None = None, **kwargs: Any) -> Any:
    """A decoder layer's forward, whose queries are scaled by ``position_ids``, ``[batch or 1, sequence]``.

    transformers' own takes a token's place in its row, which is another number where rows are cut into pieces.
    """
    own, attention = super(type(layer), layer).forward, layer.self_attn
    cache = kwargs.get("cache", kwargs.get("past_key_values"))  # its name in transformers 5.24 and 5.23
    scaled = attention.attn_temperature_tuning and not attention.use_rope and cache is None
    # in a shorter row every factor is 1
    if not scaled or position_ids is None or hidden_states.shape[1] < attention.floor_scale:
        return own(hidden_states, position_ids=position_ids, **kwargs)
    steps = torch.floor((position_ids.float() + 1.0) / attention.floor_scale)
    factors = (torch.log1p(steps) * attention.attn_scale + 1.0).unsqueeze(-1)
    hook = attention.q_proj.register_forward_hook(lambda _, given, query: (query * factors).to(query.dtype))
    attention.attn_temperature_tuning = False
    try:
        return own(hidden_states, position_ids=position_ids, **kwargs)
    finally:
        attention.attn_temperature_tuning = True
        hook.remove()
