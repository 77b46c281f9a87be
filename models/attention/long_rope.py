"""PhiMoE's RoPE of type `longrope`, by operations that XLA can run."""

from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def scaled_by_length(rotary: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the positions ``[batch, sequence]``, each ``[batch, sequence, head dimension]`` like ``x``.

    Their scale is another one where a position lies beyond the original context. transformers' own asks that of the
    values, and has the frequencies of short rows in both cases.
    """
    stated = rotary.config.rope_parameters
    scale: Any = rotary.attention_scaling
    if stated["rope_type"] != "default":
        beyond = position_ids.max() >= stated["original_max_position_embeddings"]
        scale = torch.where(beyond, stated["long_mscale"], stated["short_mscale"])
    angles = position_ids[..., None].float() * rotary.original_inv_freq.float()
    angles = torch.cat((angles, angles), -1)
    return (angles.cos() * scale).to(x.dtype), (angles.sin() * scale).to(x.dtype)
