"""Layers that mix tokens by a recurrence: our kernels beside transformers' own torch functions, alone and in models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch_xla
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.mamba import modeling_mamba
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention
from transformers.models.qwen3_next import modeling_qwen3_next
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru
from transformers.models.rwkv import modeling_rwkv

from shardwright.layout.mesh import Mesh
from shardwright.layout.recipe import Compute, Recipe
from shardwright.models.mixers import functions
from shardwright.models.mixers.bind import bind
from shardwright.models.mixers.delta import delta_rule
from shardwright.models.ops.jax_call import jax
from tests.support.cases import check_near, check_step, make_batch, make_case

ROWS, HEADS, GROUPS, WIDTH, STATE, CHANNELS = 2, 4, 2, 8, 16, 8

Tensors = tuple[torch.Tensor, ...]
Function = Callable[..., torch.Tensor]


def decays(*shape: int, most: float = 2.0) -> torch.Tensor:
    return -most * torch.rand(shape)


def delta(theirs: Function, groups: int, decay: torch.Tensor) -> tuple[Function, Function, Tensors]:
    def run(function: Callable[..., Any], *given: torch.Tensor) -> torch.Tensor:
        return function(*given, None, False, use_qk_l2norm_in_kernel=True)[0]

    def ours(*given: torch.Tensor) -> torch.Tensor:
        return functions.gated_delta_rule(*given, use_qk_l2norm_in_kernel=True)[0]

    keys, heads = (ROWS, decay.shape[1], groups, STATE), (ROWS, decay.shape[1], HEADS)
    given = (torch.randn(keys), torch.randn(keys), torch.randn(*heads, WIDTH), decay, torch.rand(heads))
    return partial(run, theirs), ours, given


def gated_delta(tokens: int) -> tuple[Function, Function, Tensors]:
    """Some decays are so strong that one running sum over a chunk would lose the weak ones."""
    decay = decays(ROWS, tokens, HEADS, most=16.0)
    return delta(modeling_qwen3_next.torch_recurrent_gated_delta_rule, GROUPS, decay)


def kimi_delta(tokens: int) -> tuple[Function, Function, Tensors]:
    decay = decays(ROWS, tokens, HEADS, STATE)
    return delta(modeling_kimi_linear.recurrent_kimi_delta_attention, HEADS, decay)


def mamba2(tokens: int) -> tuple[Function, Function, Tensors]:
    def run(function: Function, *given: torch.Tensor) -> torch.Tensor:
        *inputs, skip, bias = given
        return function(*inputs, chunk_size=32, D=skip, dt_bias=bias, dt_softplus=True, dt_limit=(0.1, 2.0))

    keys, heads = (ROWS, tokens, GROUPS, STATE), (ROWS, tokens, HEADS)
    inputs = (torch.randn(*heads, WIDTH), torch.randn(heads), decays(HEADS), torch.randn(keys), torch.randn(keys))
    theirs, ours = modeling_mamba2.mamba2_chunk_scan, functions.mamba2_chunk_scan
    return partial(run, theirs), partial(run, ours), (*inputs, torch.randn(HEADS), torch.randn(HEADS))


def mamba(tokens: int) -> tuple[Function, Function, Tensors]:
    rows, states = (ROWS, CHANNELS, tokens), (ROWS, STATE, tokens)
    inputs = (torch.randn(rows), torch.randn(rows), decays(CHANNELS, STATE), torch.randn(states), torch.randn(states))
    theirs, ours = modeling_mamba.mamba_selective_scan, functions.mamba_selective_scan
    given = (*inputs, torch.randn(CHANNELS), torch.randn(rows), torch.randn(CHANNELS))
    return partial(theirs, delta_softplus=True), partial(ours, delta_softplus=True), given


def convolution(tokens: int) -> tuple[Function, Function, Tensors]:
    given = (torch.randn(ROWS, CHANNELS, tokens), torch.randn(CHANNELS, 4), torch.randn(CHANNELS))
    theirs, ours = modeling_mamba.causal_conv1d_fn, functions.causal_conv1d_fn
    return partial(theirs, activation="silu"), partial(ours, activation="silu"), given


def rwkv(tokens: int) -> tuple[Function, Function, Tensors]:
    rows = (ROWS, tokens, CHANNELS)
    given = (torch.randn(CHANNELS), torch.randn(CHANNELS), 3 * torch.randn(rows), torch.randn(rows))
    theirs, ours = modeling_rwkv.rwkv_linear_attention_cpu, functions.rwkv_linear_attention
    return lambda *t: theirs(*t)[0], lambda *t: ours(*t)[0], given


def rg_lru(tokens: int) -> tuple[Function, Function, Tensors]:
    """A second document begins in the middle of the row."""

    def run(function: Callable[..., Any], x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        begins = (torch.arange(tokens) % (tokens // 2) == 0).to(x.device)
        return function(x, gate, begins[None, :, None], None)[0]

    config = AutoConfig.for_model("recurrent_gemma", lru_width=CHANNELS, num_attention_heads=2)
    rows = (ROWS, tokens, CHANNELS)
    given = (torch.randn(rows), torch.rand(rows))
    return partial(run, RecurrentGemmaRglru(config)._rnn_scan), partial(run, functions.rnn_scan), given


@pytest.mark.parametrize(
    ("kernel", "tokens"),
    [
        (gated_delta, 5),
        (gated_delta, 600),  # more than one segment, and no multiple of a chunk
        (kimi_delta, 150),
        (mamba2, 150),
        (mamba, 150),
        (convolution, 5),
        (rwkv, 150),
        (rg_lru, 150),
    ],
)
def test_a_kernel_equals_transformers_torch_function_in_values_and_every_gradient(kernel, tokens):
    torch.manual_seed(tokens)
    theirs, ours, given = kernel(tokens)
    expected = values_and_gradients(theirs, given, "cpu")
    found = values_and_gradients(ours, given, "xla")
    check_near(found, expected)


def values_and_gradients(function: Function, given: Tensors, device: str) -> dict[str, torch.Tensor]:
    inputs = [tensor.to(device).requires_grad_() for tensor in given]
    output = function(*inputs)
    weights = torch.linspace(-1, 2, output.numel()).reshape(output.shape).to(device)
    gradients = torch.autograd.grad((output * weights).sum(), inputs)
    if device == "xla":
        torch_xla.sync()
    found = {"values": output, **{f"gradient of input {i}": g for i, g in enumerate(gradients)}}
    return {name: tensor.detach().cpu() for name, tensor in found.items()}


def test_a_lightning_attention_equals_transformers_module():
    config = AutoConfig.for_model("minimax", hidden_size=32, num_attention_heads=HEADS, head_dim=WIDTH, block_size=16)
    torch.manual_seed(0)
    plain = MiniMaxLightningAttention(config, layer_idx=1)
    ours = copy.deepcopy(plain)
    bind(ours)
    hidden = torch.randn(ROWS, 150, 32)

    def run(module: Any, hidden: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        given = dict(zip(dict(module.named_parameters()), parameters, strict=True))
        return torch.func.functional_call(module.to(hidden.device), given, (hidden, None, None))[0]

    given = (hidden, *(p.detach() for p in plain.parameters()))
    expected = values_and_gradients(partial(run, plain), given, "cpu")
    check_near(values_and_gradients(partial(run, ours), given, "xla"), expected)


def test_the_loop_over_a_row_is_as_long_for_many_tokens_as_for_few():
    def length(tokens: int) -> int:
        keys, heads = (1, tokens, 2, 8), (1, tokens, 4)
        shapes = [jax.ShapeDtypeStruct(s, "float32") for s in ((*heads, 8), keys, keys, heads, heads)]
        gradients = jax.grad(lambda *given: delta_rule(*given, normalise=True).sum(), argnums=range(5))
        return len(jax.jit(gradients).lower(*shapes).as_text().splitlines())

    assert length(32768) == length(1024)


SMALL = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LINEAR_THEN_FULL = ["linear_attention", "full_attention"]
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": LINEAR_THEN_FULL,
        "mlp_only_layers": [0, 1],
    },
    "kimi_linear": {
        "linear_num_heads": 4,
        "linear_head_dim": 8,
        "layer_types": LINEAR_THEN_FULL,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
        "mlp_layer_types": ["dense", "dense"],
    },
    "granitemoehybrid": {
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_n_groups": 2,
        "num_local_experts": 0,
        "shared_intermediate_size": 64,
        "layer_types": LINEAR_THEN_FULL,
    },
    "jamba": {
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 1,
        "num_experts_per_tok": 1,
    },
}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "compute", "changes"),
    [
        ("qwen3_next", {"remat": "none"}, {}),
        ("qwen3_next", {"remat": "full", "scan": True}, {"layer_types": ["linear_attention"] * 2}),
        ("kimi_linear", {"remat": "full"}, {}),
        ("granitemoehybrid", {"remat": "full"}, {}),
        ("jamba", {"remat": "full"}, {}),
    ],
)
def test_a_model_with_a_recurrence_equals_the_plain_one(family, compute, changes, monkeypatch):
    """The plain Qwen3-Next goes token by token: transformers' chunks lose the gradient of decays in one running sum."""
    exact = modeling_qwen3_next.torch_recurrent_gated_delta_rule
    monkeypatch.setattr(modeling_qwen3_next, "torch_chunk_gated_delta_rule", exact)
    recipe = Recipe(
        mesh=Mesh(fsdp=-1),
        batch=("fsdp",),
        parameters={},
        optional={".".join("*" * depth): {} for depth in range(2, 8)},
        compute=Compute(**{"scan": False, "router_loss": False, "dtype": "float32", **compute}),
        name="any",
    )
    config = AutoConfig.for_model(family, **{**SMALL, **SPECIAL, **MODELS[family], **changes})
    case = make_case(recipe, config)
    batch = make_batch(config)
    check_step(case.gradients(batch), case.reference_gradients(batch))


def test_binding_a_model_leaves_its_class_alone_and_a_copy_runs_with_weights_of_its_own():
    config = AutoConfig.for_model("mamba2", **{**SMALL, **SPECIAL}, num_heads=8, head_dim=8, state_size=8, n_groups=2)
    with torch.device("meta"):
        model, plain = (AutoModelForCausalLM.from_config(config) for _ in range(2))
    bind(model)
    copied = copy.deepcopy(model)
    mixers = [m.get_submodule("backbone.layers.0.mixer") for m in (plain, model, copied)]
    assert [mixer.forward.__self__ is mixer for mixer in mixers] == [True] * 3
    ours = [mixer.forward.__globals__["mamba2_chunk_scan"] is functions.mamba2_chunk_scan for mixer in mixers[1:]]
    assert ours == [True, True]
    assert modeling_mamba2.mamba2_chunk_scan is not functions.mamba2_chunk_scan
    assert "forward" not in vars(mixers[0])


def test_what_generation_and_packed_documents_need_is_refused():
    with pytest.raises(ValueError, match="output_final_state is for generation"):
        functions.gated_delta_rule(*torch.zeros(5, 1, 2, 1, 2), output_final_state=True)
    with pytest.raises(ValueError, match="seq_idx is for generation or packed documents"):
        functions.causal_conv1d_fn(torch.zeros(1, 2, 4), torch.zeros(2, 4), seq_idx=torch.zeros(1, 4))
