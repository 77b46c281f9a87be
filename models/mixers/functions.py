"""transformers' functions of layers that mix tokens, under the names and signatures that its modeling files call.

Each supports a training step's arguments. A state from before the row, the state after it, and rows of several
documents are refused: those are for generation, and for kernels that keep documents separate.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from transformers.activations import ACT2FN

from shardwright.models.mixers.delta import delta_rule
from shardwright.models.mixers.diagonal import linear_recurrence, selective_scan, short_convolution, wkv
from shardwright.models.mixers.linear_attention import decayed_attention
from shardwright.models.mixers.segments import apply


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """`torch_chunk_gated_delta_rule` and `chunk_kimi_delta_attention`: ([batch, tokens, heads, width], no state)."""
    _refuse_states(others)
    return apply(delta_rule, value, query, key, g, beta, normalise=use_qk_l2norm_in_kernel), None


def mamba2_chunk_scan(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **others: Any,
) -> torch.Tensor:
    """Mamba-2's state space: [batch, tokens, heads, width], in the dtype of ``hidden_states`` as on a GPU."""
    _refuse_states(others)
    step = _step(dt, dt_bias, dt_softplus).clamp(*dt_limit)
    out = apply(decayed_attention, hidden_states, C, B, step * A.float(), step)
    return out if D is None else (out + D[:, None] * hidden_states).to(out.dtype)


def mamba_selective_scan(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    **others: Any,
) -> torch.Tensor:
    """Mamba's selective scan: [batch, channels, tokens], in the dtype of ``hidden_states`` as on a GPU."""
    _refuse_states(others)
    x, B, C = (t.transpose(1, 2) for t in (hidden_states, B, C))
    out = apply(selective_scan, x, _step(dt.transpose(1, 2), delta_bias, delta_softplus), A, B, C).transpose(1, 2)
    out = out if D is None else out + hidden_states * D[:, None]
    return (out if z is None else out * F.silu(z)).to(hidden_states.dtype)


def causal_conv1d_fn(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **others: Any,
) -> torch.Tensor:
    """Each channel's causal convolution, [batch, channels, tokens]."""
    _refuse_states(others)
    out = apply(short_convolution, hidden_states, weight, *(() if bias is None else (bias,)))
    return out if activation is None else ACT2FN[activation](out)


def rwkv_linear_attention(
    time_decay: torch.Tensor,
    time_first: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    state: Any = None,
    return_state: bool = False,
) -> tuple[torch.Tensor, None]:
    """RWKV-4's attention: ([batch, tokens, channels], no state)."""
    _refuse_states({"initial_state": state, "return_final_states": return_state})
    return apply(wkv, value, key, -torch.exp(time_decay.float()), time_first), None


def rnn_scan(
    hidden_states: torch.Tensor,
    recurrent_gate: torch.Tensor,
    reset: torch.Tensor,
    recurrent_states: torch.Tensor | None,
) -> tuple[torch.Tensor, None]:
    """The RG-LRU's recurrence, a method of its module: ([batch, tokens, channels], no state)."""
    _refuse_states({"initial_state": recurrent_states})
    return apply(linear_recurrence, hidden_states, recurrent_gate * ~reset), None


def lightning_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slope: torch.Tensor
) -> torch.Tensor:
    """Linear attention with a constant decay for each head: [batch, tokens, heads, width].

    ``slope`` is the decay of a token's weight with each later token, as a logarithm: one number for each head.
    """
    decay = -slope.float().reshape(-1).expand(value.shape[:3])
    return apply(decayed_attention, value, query, key, decay, torch.ones_like(decay))


def _step(dt: torch.Tensor, bias: torch.Tensor | None, softplus: bool) -> torch.Tensor:
    """The step sizes of a state space, [batch, tokens, heads], in float32 as on a GPU."""
    dt = dt.float() if bias is None else dt.float() + bias.float()
    return F.softplus(dt) if softplus else dt


def _refuse_states(arguments: dict[str, Any]) -> None:
    """Raise ValueError if ``arguments`` has a state, asks for one, or marks where documents begin."""
    states = ("initial_state", "initial_states", "output_final_state", "return_final_states", "return_last_state")
    for name in (*states, "cu_seqlens", "seq_idx"):
        if arguments.get(name) is not None and arguments[name] is not False:
            raise ValueError(f"{name} is for generation or packed documents: a training step has whole rows alone")
