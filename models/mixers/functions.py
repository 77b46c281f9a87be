"""transformers' functions of layers that mix tokens, under the names and signatures that its modeling files call.

Each supports a training step's arguments. A state from before the row, the state after it, and rows of several
documents are refused: those are for generation, and for kernels that keep documents separate.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.activations import ACT2FN

from shardwright.models.mixers.delta import delta_rule
from shardwright.models.mixers.diagonal import linear_recurrence, selective_scan, short_convolution, wkv
from shardwright.models.mixers.linear_attention import decayed_attention
from shardwright.models.mixers.segments import apply


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **others: Any,
) -> tuple[Tensor, None]:
    """`torch_chunk_gated_delta_rule` and `chunk_kimi_delta_attention`: ([batch, tokens, heads, width], no state)."""
    _refuse_states(others)
    return apply(delta_rule, value, query, key, g, beta, normalise=use_qk_l2norm_in_kernel), None


def mamba2_chunk_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **others: Any,
) -> Tensor:
    """Mamba-2's state space: [batch, tokens, heads, width], in the dtype of ``hidden_states`` as on a GPU."""
    _refuse_states(others)
    step = _step(dt, dt_bias, dt_softplus).clamp(*dt_limit)
    out = apply(decayed_attention, hidden_states, C, B, step * A.float(), step)
    return out if D is None else (out + D[:, None] * hidden_states).to(out.dtype)


def mamba_selective_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    **others: Any,
) -> Tensor:
    """Mamba's selective scan: [batch, channels, tokens], in the dtype of ``hidden_states`` as on a GPU."""
    _refuse_states(others)
    x, B, C = (t.transpose(1, 2) for t in (hidden_states, B, C))
    out = apply(selective_scan, x, _step(dt.transpose(1, 2), delta_bias, delta_softplus), A, B, C).transpose(1, 2)
    out = out if D is None else out + hidden_states * D[:, None]
    return (out if z is None else out * F.silu(z)).to(hidden_states.dtype)


def causal_conv1d_fn(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **others: Any
) -> Tensor:
    """Each channel's causal convolution, [batch, channels, tokens]."""
    _refuse_states(others)
    out = apply(short_convolution, hidden_states, weight, *(() if bias is None else (bias,)))
    return out if activation is None else ACT2FN[activation](out)


def rwkv_linear_attention(
    time_decay: Tensor, time_first: Tensor, key: Tensor, value: Tensor, state: Any = None, return_state: bool = False
) -> tuple[Tensor, None]:
    """RWKV-4's attention: ([batch, tokens, channels], no state)."""
    _refuse_states({"initial_state": state, "return_final_states": return_state})
    return apply(wkv, value, key, -torch.exp(time_decay.float()), time_first), None


def rnn_scan(
    hidden_states: Tensor, recurrent_gate: Tensor, reset: Tensor, recurrent_states: Tensor | None
) -> tuple[Tensor, None]:
    """The RG-LRU's recurrence, a method of its module: ([batch, tokens, channels], no state)."""
    _refuse_states({"initial_state": recurrent_states})
    return apply(linear_recurrence, hidden_states, recurrent_gate * ~reset), None


def lightning_attention(query: Tensor, key: Tensor, value: Tensor, slope: Tensor) -> Tensor:
    """Linear attention, [batch, tokens, heads, width], with a constant decay for each head, of logarithm ``-slope``."""
    decay = -slope.float().reshape(-1).expand(value.shape[:3])
    return apply(decayed_attention, value, query, key, decay, torch.ones_like(decay))


def _step(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    """The step sizes of a state space, [batch, tokens, heads], in float32 as on a GPU."""
    dt = dt.float() if bias is None else dt.float() + bias.float()
    return F.softplus(dt) if softplus else dt


def _refuse_states(arguments: dict[str, Any]) -> None:
    """Raise ValueError if ``arguments`` has a state, asks for one, or marks where documents begin."""
    states = ("initial_state", "initial_states", "output_final_state", "return_final_states", "return_last_state")
    for name in (*states, "cu_seqlens", "seq_idx"):
        if arguments.get(name) is not None and arguments[name] is not False:
            raise ValueError(f"{name} is for generation or packed documents: a training step has whole rows alone")
