"""Attention of families that ask for more than causality and a window, against transformers' eager attention."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch_xla
import torch_xla.debug.metrics as metrics
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from shardwright.layout.mesh import Mesh
from shardwright.layout.recipe import Compute, Recipe
from shardwright.model.attention_probe import leak, mixes_in_order, our_attention
from shardwright.model.facts import facts_of
from shardwright.models.attention import portable as portable_kernel
from shardwright.models.attention.attention_interface import MASKED, NAME, choose, masks_without_reads
from shardwright.models.experts.expert_families import experts_modules
from tests.support.cases import make_batch, make_case, relative

LENGTH = 24  # beyond every window, chunk, block and choice of keys below
WINDOW = {"sliding_window": 5}
TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
LATENT = MOE | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
}
DENSE_FIRST = {"mlp_layer_types": ["dense", "sparse"]}
# of few heads all may score a key 0, and of keys that tie any may be chosen
INDEXED = LATENT | DENSE_FIRST | {"index_topk": 4, "index_n_heads": 16, "index_head_dim": 8}
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1}
GPT2 |= {"eos_token_id": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
GEMMA = WINDOW | {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4}
SHARED_KEYS = GEMMA | {
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 64,
}
COMPRESSED = MOE | {
    "num_key_value_heads": 1,
    "num_hidden_layers": 3,
    "head_dim": 8,
    "q_lora_rank": 16,
    "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention", "sliding_attention"],
    "mlp_layer_types": ["hash_moe", "moe", "moe"],
    "compress_rates": {"compressed_sparse_attention": 3, "heavily_compressed_attention": 6},
    "o_groups": 2,
    "o_lora_rank": 8,
    "index_topk": 2,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "hc_mult": 2,
}
# as Phi-3.5-MoE states its RoPE, with fewer factors
LONG_ROPE = {"rope_type": "longrope", "rope_theta": 10_000.0, "short_mscale": 1.24, "long_mscale": 1.43}
LONG_ROPE |= {"short_factor": [1.0, 1.1, 1.3, 2.0], "long_factor": [1.0, 2.0, 4.0, 8.0]}
PHIMOE = {"num_local_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 64}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "an indexer": ("deepseek_v32", MASKED, INDEXED),
    "an indexer whose choice later layers share": ("glm_moe_dsa", MASKED, INDEXED | {"index_topk_freq": 2}),
    "an indexer and gates": ("axk2", MASKED, INDEXED),
    "an indexer and sinks": ("hy_v4", MASKED, INDEXED),
    "an indexer in some layers": (
        "dots3_note_text",
        MASKED,
        INDEXED
        | WINDOW
        | {
            "head_dim": 12,
            "layer_types": ["indexed_attention", "full_attention"],
            "shared_experts_intermediate_size": 16,
        },
    ),
    "an indexer of blocks of keys": (
        "minimax_m3_vl_text",
        NAME,
        MOE
        | {"head_dim": 8, "num_local_experts": 4, "index_block_size": 3, "index_topk_blocks": 2, "index_head_dim": 8}
        | {"index_n_heads": 2, "layer_types": ["full_attention", "minimax_m3_sparse"]},
    ),
    "an indexer of means of keys": (
        "qwen4_exp_text",
        MASKED,
        {"head_dim": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2}
        | {"linear_num_value_heads": 4, "hc_lowrank": 4, "hc_count": 2, "num_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
        | {"indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 6}
        | {"indexer_compress_ratio": 3, "layer_types": ["linear_attention", "indexed_attention"]},
    ),
    "keys beyond the sequence's": ("deepseek_v4", MASKED, COMPRESSED | WINDOW),
    "a mask that the model makes": ("doge", MASKED, {"keep_window_size": 5}),
    "a bias by position": ("inkling_text", NAME, MOE | WINDOW | {"head_dim": 8}),
    "a bias and a sink for each query": ("inkling2_text", NAME, MOE | WINDOW | {"head_dim": 8}),
    "chunks": (
        "llama4_text",
        NAME,
        {"head_dim": 8, "attention_chunk_size": 5, "layer_types": ["chunked_attention", "full_attention"]}
        | {"num_local_experts": 2, "intermediate_size_mlp": 48, "floor_scale": 7, "no_rope_layers": [1, 0]},
    ),
    "values of their own width": ("deepseek_v3", NAME, LATENT | {"first_k_dense_replace": 1}),
    "sinks and windows": ("gpt_oss", NAME, WINDOW | {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "soft caps": ("gemma2", NAME, WINDOW | {"head_dim": 8, "query_pre_attn_scalar": 8}),
    "keys of an earlier layer": (
        "gemma3n_text",
        NAME,
        SHARED_KEYS | {"laurel_rank": 8, "activation_sparsity_pattern": [0.0] * 4, "intermediate_size": 48},
    ),
    "keys of an earlier layer, wide heads": ("gemma4_text", NAME, SHARED_KEYS | {"global_head_dim": 16}),
    "scores by the layer's number": ("gpt2", NAME, GPT2 | {"scale_attn_by_inverse_layer_idx": True}),
    "scores in float32": ("gpt2", NAME, GPT2 | {"reorder_and_upcast_attn": True}),
    "not a decoder by its config": ("gpt_neox", NAME, {"is_decoder": False, "hidden_dropout": 0.0}),
    "rows within RoPE's first context": (
        "phimoe",
        NAME,
        PHIMOE | {"rope_parameters": LONG_ROPE | {"original_max_position_embeddings": LENGTH}},
    ),
    "rows beyond RoPE's first context": (
        "phimoe",
        NAME,
        PHIMOE | {"rope_parameters": LONG_ROPE | {"original_max_position_embeddings": LENGTH - 1}},
    ),
    "biases of ALiBi": ("falcon", NAME, {"alibi": True, "new_decoder_architecture": False}),
}


def config_of(case: str) -> tuple[PretrainedConfig, str]:
    family, name, changes = FAMILIES[case]
    values = changes if family == "gpt2" else TINY | changes
    return AutoConfig.for_model(family, **values), name


def model_of(config: PretrainedConfig) -> PreTrainedModel:
    """A model whose biases, norms and sinks are no constants."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.1)
    if experts_modules(model):
        model.set_experts_implementation("eager")
    return model


def loss_and_gradients(
    model: PreTrainedModel, attention: str, device: str = "cpu"
) -> tuple[torch.Tensor, dict[str, Any]]:
    model = copy.deepcopy(model).to(device)
    choose(model, attention)
    ids = torch.randint(3, 60, (2, LENGTH), generator=torch.Generator().manual_seed(1)).to(device)
    with masks_without_reads():
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    torch_xla.sync(wait=True)
    return loss.detach().cpu(), {name: gradient.cpu() for name, gradient in gradients.items()}


@pytest.mark.parametrize("case", FAMILIES)
def test_loss_and_gradients_equal_eager(case: str) -> None:
    config, name = config_of(case)
    assert our_attention(facts_of(config), LENGTH) == name
    model = model_of(config)
    (theirs, expected), (ours, found) = (loss_and_gradients(model, each) for each in ("eager", name))
    check(ours, theirs, found, expected)


def check(ours: Any, theirs: Any, found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Losses are equal, and each gradient beside a thousandth of the largest: tiny ones are differences of large."""
    assert abs(ours - theirs) < 1e-5 * theirs
    rest = 1e-3 * torch.stack([gradient.norm() for gradient in expected.values()]).max()[None]
    difference, where = relative(
        *({name: torch.cat([g.flatten(), rest]) for name, g in side.items()} for side in (found, expected))
    )
    assert difference < 1e-5, where


@pytest.mark.parametrize("case", ["an indexer", "an indexer whose choice later layers share", "chunks", "soft caps"])
def test_documents_stay_apart(case: str) -> None:
    config, name = config_of(case)
    found = leak(facts_of(config), name)
    assert (found is not None) == (case == "chunks")  # a chunk begins where the row's does, not the document's


def test_a_temperature_by_position_is_that_of_each_token_where_a_row_is_cut_into_pieces() -> None:
    assert mixes_in_order(facts_of(config_of("chunks")[0])) is None


def test_an_indexer_runs_on_xla_in_one_execution_without_fallbacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portable_kernel, "BLOCK", 16)  # two, of which the last is not full
    model = model_of(config_of("an indexer whose choice later layers share")[0])
    theirs, expected = loss_and_gradients(model, "eager")
    model.set_experts_implementation("dense")
    model.to("xla")
    torch_xla.sync(wait=True)
    metrics.clear_all()
    ours, found = loss_and_gradients(model, MASKED, "xla")
    assert metrics.counter_value("ExecuteReplicated") == 1
    assert [name for name in metrics.counter_names() if name.startswith("aten::")] == []
    check(ours, theirs, found, expected)


def test_a_step_trains_a_mask_that_the_model_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portable_kernel, "BLOCK", 8)
    config, _ = config_of("a mask that the model makes")
    config.keep_window_size = make_batch(config)["input_ids"].shape[1]  # new models' keys tie, and any may be kept
    anything = {".".join("*" * depth): {} for depth in range(1, 9)}
    recipe = Recipe(mesh=Mesh(fsdp=-1), batch=("fsdp",), parameters={}, optional=anything, compute=Compute())
    case = make_case(recipe, config, scan=False, remat="none")
    batch = make_batch(config)
    (ours, found), (theirs, expected) = case.gradients(batch), case.reference_gradients(batch)
    check(ours, theirs, found, expected)
