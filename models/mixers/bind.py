"""Puts our mixers into a model's modules, by the functions and attributes that a module uses; no family is named.

transformers' mixers call functions of their modeling file (transformers 5.23: every file has its own copy, wrapped by
`use_kernel_func_from_hub_with_fallback` of integrations/hub_kernels.py, whose alternatives are the packages `kernels`,
`fla` and `mamba_ssm`). A bound module gets a forward of its own: the class's code, with those names bound to our
functions.
"""

import inspect
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.models.mixers import functions

# semi-private, transformers 5.23: functions of models/*/modeling_*.py that a mixer's forward calls -> ours
_CALLED: dict[str, Callable[..., Any]] = {
    "torch_chunk_gated_delta_rule": functions.gated_delta_rule,  # qwen3_next
    "chunk_kimi_delta_attention": functions.gated_delta_rule,  # kimi_linear
    "mamba2_chunk_scan": functions.mamba2_chunk_scan,  # mamba2
    "mamba_selective_scan": functions.mamba_selective_scan,  # mamba
    "causal_conv1d_fn": functions.causal_conv1d_fn,  # all of these, and lfm2
    "rwkv_linear_attention": functions.rwkv_linear_attention,  # rwkv
}


def bind(model: nn.Module) -> None:
    """Make each module of ``model`` that mixes tokens by a recurrence run our kernels. A copy of the model does too."""
    for module in model.modules():
        forward = inspect.unwrap(type(module).forward)
        called = _CALLED.keys() & set(forward.__code__.co_names) if isinstance(forward, FunctionType) else set()
        if called:
            module.forward = MethodType(_with_names(forward, {name: _CALLED[name] for name in called}), module)
        if hasattr(module, "_rnn_scan"):  # the RG-LRU: models/recurrent_gemma, transformers 5.23
            vars(module)["_rnn_scan"] = functions.rnn_scan
        if hasattr(module, "slope_rate") and hasattr(module, "output_gate"):  # models/minimax, transformers 5.23
            module.forward = MethodType(_lightning, module)


def _with_names(function: FunctionType, names: dict[str, Any]) -> FunctionType:
    known = {**function.__globals__, **names}
    copy = FunctionType(function.__code__, known, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _lightning(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: Any,
    attention_mask: Tensor | None,
    past_key_values: Any = None,  # the cache, in transformers 5.23
    cache: Any = None,  # in 5.24
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The forward of lightning attention (arXiv:2501.08313) with one loop over its blocks, not a copy for each."""
    if past_key_values is not None or cache is not None:
        raise ValueError("a cache is for generation: a training step has whole rows alone")
    qkv = self.act_fn(self.qkv_proj(hidden_states))
    if attention_mask is not None:
        qkv = (qkv * attention_mask[:, :, None]).to(qkv.dtype)
    query, key, value = qkv.unflatten(-1, (self.num_attention_heads, 3 * self.head_dim)).chunk(3, dim=-1)
    mixed = functions.lightning_attention(query, key, value, self.slope_rate).flatten(2)
    return self.out_proj(torch.sigmoid(self.output_gate(hidden_states)) * self.norm(mixed)), None
