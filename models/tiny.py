"""Tiny configs of transformers' causal language models: each family's own layers, narrow, and as few as show a pattern.

Rules (:data:`_RULES`) shrink a config: widths, heads, experts, windows. Its list of layer kinds is cut after the prefix
and two periods. :data:`BY_HAND` has the values that rules can't know, :data:`LEFT_OUT` the families that are swept
under another name or do not train on the next token. :func:`tiny_config` shrinks a family's default config, and
:func:`shrunk` a real model's, with what is special to it.
"""

import re
from collections.abc import Sequence
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

MOST_LAYERS = 8  # for a family whose layers have no period
_HEADS = 4
FEWEST_LAYERS = 3  # for a family whose layers are all alike

_LEFT_OUT = {  # why → families
    "an encoder unless its config says is_decoder": "bert bert-generation big_bird camembert data2vec-text electra "
    "ernie megatron-bert rembert roberta roberta-prelayernorm roc_bert roformer xlm xlm-roberta xlm-roberta-xl xmod "
    "reformer",
    "the decoder of an encoder-decoder": "bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus "
    "plbart prophetnet trocr whisper",
    "trains on permutations, not on the next token": "xlnet",
    "has inputs and a loss of its own": "cpmant",
    "codes of sound, not text": "musicgen musicgen_melody",
    "drafts from another model's keys and values": "gemma4_assistant gemma4_unified_assistant",
    "images around a decoder of its own, an encoder's": "git",
    "images around persimmon, which is swept": "fuyu",
    "images around qwen2, which is swept": "got_ocr2",
    "sound around qwen3, which is swept": "moss_transcribe_diarize",
    "images or sound around the family of its name and _text, which is swept": "dots3_note gemma3 gemma3n gemma4 "
    "gemma4_unified llama4 qwen3_5 qwen3_5_moe qwen4_exp",
    "gpt2 under another name": "gpt-sw3",
}
LEFT_OUT = {family: why for why, families in _LEFT_OUT.items() for family in families.split()}

# (pattern of an int field, its new value, or a function of the default); the first that matches counts
_RULES: Sequence[tuple[str, Any]] = [
    (r"vocab", 256),
    (r"(num_)?(hidden_)?layers|n_layers?", None),  # decided apart
    (r"moe.*intermediate_size|.*shared.*intermediate_size|.*expert.*(size|dim)", 32),
    (r".*intermediate_size.*|ffn_dim|ffn_hidden_size|n_inner|dff|d_ff|dim_ff|ff_dim", 128),
    (r"hidden_size|n_embd|d_model|emb_dim|embedding_dim|word_embed_proj_dim|lru_width|attention_hidden_size", 64),
    (r"(num_)?key_value_heads|num_kv_heads|.*num_key_value_heads", lambda n: min(n, 2)),
    (r"(num_)?attention_heads|n_heads?|num_heads|swa_num_attention_heads|linear_num_heads", _HEADS),
    (r"linear_num_key_heads", 2),
    (r"linear_num_value_heads", 4),
    (r"mamba_num_heads", 16),  # a multiple of the groups that share a state, which stay
    (r"index_n_heads", 16),  # with fewer many scores tie at 0, and the choice of keys is arbitrary
    (r"rotary_dim", 8),
    (r".*head_dim|kv_channels|attention_head_size", 16),
    (r"(num_local|num|n_routed|moe_num)_experts", 8),
    (r"num_experts_per_tok(en)?|moe_topk|moe_k|top_k_experts", lambda n: min(n, 2)),
    (r"n_group|num_expert_group", lambda n: min(n, 2)),
    (r"topk_group", 1),
    (r".*lora_rank|.*_rank", 16),
    (r"sliding_window(_size)?|attention_chunk_size|window_size|attention_window_size|local_attention", 8),
    (r"(mamba_)?chunk_size|(index_)?block_size|floor_scale", 8),
    (r"index_topk", 8),
    (r"index_topk_blocks", 2),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|context_length|model_max_length", 128),
]

# of a config, what tells of its files, and what only says its own fields once more (Kimi Linear's)
_LEFT = {"architectures", "auto_map", "dtype", "quantization_config", "transformers_version", "_name_or_path"}
_LEFT |= {"linear_attn_config"}
_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")

_MOE_OF_DEFAULT_NONE = {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2}
_MLP_THEN_EXPERTS = {"first_k_dense_replace": 1, "num_hidden_layers": 4}
_SPARSE_ATTENTION = {**_MLP_THEN_EXPERTS, "mlp_layer_types": ["dense", *["sparse"] * 3]}
_SWA = {"rope_type": "default", "rope_theta": 10_000.0}
_THETAS = {"layer_rope_theta": [10_000.0, *[100_000.0] * 3] * 2}
_TEXT = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
_TEXT |= {"vocab_size": 256, "pad_token_id": 0}
_NARROW = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
_CONVOLUTIONS = [*["conv", "conv", "full_attention"] * 2, "conv", "full_attention"]
_ZAMBA = {"attention_hidden_size": 128, "attention_head_dim": 32}

# family → its number of layers, where no list of their kinds tells it
_LAYERS = {"afmoe": 9, "flint": 10, "glm4_moe": 4, "gpt_neox_japanese": 4, "hrm_text": 2, "inkling2_text": 13}
_LAYERS |= {"modernbert-decoder": 7, "recurrent_gemma": 8}
# family → values that the rules can't know
BY_HAND: dict[str, dict[str, Any]] = {
    **{family: {"num_hidden_layers": layers} for family, layers in _LAYERS.items()},
    "bamba": {"num_hidden_layers": 6, "attn_layer_indices": [2, 5], "mamba_n_heads": 8, "mamba_d_head": 16},
    "beam": {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 3, "num_hidden_layers": 9}
    | {"mlp_layer_types": ["dense"] * 3 + ["sparse"] * 6},
    "blt": {
        "encoder_hash_byte_group_vocab": 64,
        "encoder_hash_byte_group_size": [3, 4],
        "patcher_config": {**_NARROW, "num_hidden_layers": 2, "vocab_size": 260},
        "encoder_config": {**_NARROW, "hidden_size_global": 64},
        "decoder_config": {**_NARROW, "hidden_size_global": 64, "num_hidden_layers": 3},
        "cross_attn_k": 2,
        "global_config": {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64},
    },
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 8,
        "rope_parameters": {"full_attention": None, "sliding_attention": _SWA},
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10_000.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 32, "moe_num_experts": 8, "moe_top_k": 2},
    },
    "deepseek_v2": {**_MLP_THEN_EXPERTS, "num_experts_per_tok": 2},
    "deepseek_v3": _MLP_THEN_EXPERTS,
    "deepseek_v32": _SPARSE_ATTENTION,
    "deepseek_v4": {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}}
    | {"num_hidden_layers": 8, "o_groups": 2, "index_topk": 4},
    # parameters are drawn about 1, which of the usual range would make attention choose one key alone
    "dory": {"layer_types": ["sliding_attention", "full_attention"] * 3, "num_hidden_layers": 6, "n_input_layers": 2}
    | {"n_recurrent_layers": 2, "n_output_layers": 2, "initializer_range": 1.0},
    "dots1": {**_MOE_OF_DEFAULT_NONE, **_MLP_THEN_EXPERTS},
    "dots3_note_text": {"head_dim": 32, "swa_head_dim": 32, "swa_qk_nope_head_dim": 16, "swa_v_head_dim": 16}
    | {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 16, "swa_kv_lora_rank": 16},
    "emu3": {
        "text_config": {
            **_TEXT,
            "num_hidden_layers": 3,
            "attention_dropout": 0.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        "vocabulary_map": {"<|extra_200|>": 255, "<image>": 254, "<|visual token 000000|>": 253},
    },
    "ernie4_5_moe": {"num_hidden_layers": 4, "moe_layer_end_index": 3},
    "gemma3n_text": {"num_hidden_layers": 10, "num_kv_shared_layers": 5, "hidden_size_per_layer_input": 16}
    | {"intermediate_size": [128] * 10, "activation_sparsity_pattern": [0.95] * 2 + [0.0] * 8},
    "glm_moe_dsa": _SPARSE_ATTENTION,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_layers": 4},
    "granite_swa": _THETAS,
    "granitemoe_swa": _THETAS,
    "granitemoehybrid": {"num_hidden_layers": 6, "mamba_n_heads": 8, "mamba_d_head": 16}
    | {"layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 8, "moe_topk": 2},
    "jamba": {"num_hidden_layers": 8, "attn_layer_period": 4, "attn_layer_offset": 2},
    "lfm2": {"layer_types": _CONVOLUTIONS, "num_hidden_layers": 8, "block_multiple_of": 16},
    "lfm2_moe": {"layer_types": _CONVOLUTIONS, "num_hidden_layers": 8},
    "longcat_flash": {"num_layers": 3, "ffn_hidden_size": 128, "expert_ffn_hidden_size": 32, "zero_expert_num": 4}
    | {"qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "qk_head_dim": 32},
    "mamba2": {"num_heads": 8},
    "minimax_m3_vl_text": {"index_n_heads": 2},
    "ministral": {"head_dim": 16},
    "mllama": {
        "text_config": {**_TEXT, "num_hidden_layers": 5, "cross_attention_layers": [3]},
        "vision_config": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_global_layers": 1}
        | {"attention_heads": 2, "vision_output_dim": 64, "intermediate_layers_indices": [0]},
    },
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"] * 2},
    "phi4_multimodal": {
        "vision_config": _NARROW | {"num_hidden_layers": 2, "image_size": 28, "crop_size": 28, "image_token_id": 250},
        "audio_config": _NARROW
        | {"num_blocks": 1, "ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32}
        | {"nemo_conv_channels": 32, "audio_token_id": 251, "bias_max_distance": 16},
    },
    "qwen4_exp_text": {"indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8}
    | {"indexer_compress_ratio": 2, "hc_lowrank": 16},
    "smollm3": {"no_rope_layers": [1, 1, 1, 0] * 2, "num_hidden_layers": 8},
    "zamba": _ZAMBA
    | {"num_hidden_layers": 9, "layers_block_type": ["linear_attention", "linear_attention", "hybrid"] * 3},
    "zamba2": _ZAMBA,
}


def families() -> list[str]:
    """The model types of all causal language models that are swept."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - LEFT_OUT.keys())


def tiny_config(family: str, **changes: Any) -> PretrainedConfig:
    """The config of ``family``, tiny; ``changes`` override its values.

    Dropout and jitter are 0, so that the plain model and ours compute the same.
    """
    kind = CONFIG_MAPPING[family]
    return kind(**_small_values(kind(), {**BY_HAND.get(family, {}), **changes}))


def shrunk(config: PretrainedConfig) -> PretrainedConfig:
    """``config`` of a text model, tiny, with what is special to it: all values that are no sizes; heads of several
    widths, or wider than the model; one head of keys, or one for each query; a dense layer before sparse ones.

    Raises as transformers does where the values that are left don't fit together.
    """
    stated = {name: value for name, value in config.to_dict().items() if name not in _LEFT}
    changes = {**BY_HAND.get(config.model_type, {}), **_special(config)}
    values = stated | _small_values(config, changes)
    depth = values.get("num_hidden_layers", 0)
    if shared := values.get("num_kv_shared_layers", 0):  # as many as compute their own, for each kind to be among both
        values["num_kv_shared_layers"] = min(shared, depth // 2)
    if own := stated.get("per_layer_config"):
        values["per_layer_config"] = {n: _scaled(v, stated, values) for n, v in own.items() if int(n) < depth}
    return type(config).from_dict(_without_long_tables(values))


def _scaled(own: dict[str, Any], stated: dict[str, Any], small: dict[str, Any]) -> dict[str, Any]:
    """A layer's ``own`` values, as many times those of all layers in ``small`` as they are in ``stated``."""
    sizes = {name for name, value in own.items() if type(value) is int and small.get(name) != stated.get(name)}
    return {n: max(1, v * small[n] // stated[n]) if n in sizes else v for n, v in own.items()}


def _special(config: PretrainedConfig) -> dict[str, Any]:
    """Small values for those special cases that the rules would level."""
    found = {name: value for name, value in vars(config).items() if isinstance(value, int) and value}
    dims = {name: value for name, value in found.items() if re.fullmatch(r".*head_dim", name) and name != "qk_head_dim"}
    heads, width = found.get("num_attention_heads", 0), found.get("hidden_size", 0)
    least = min(dims.values(), default=0)
    natural = len(set(dims.values())) == 1 and least * heads == width  # and then they need not be told apart
    wide = len(set(dims.values())) == 1 and not natural
    special: dict[str, Any] = {name: 32 if wide or value > least else 16 for name, value in dims.items()}
    keys = found.get("num_key_value_heads")
    if keys is not None:
        special["num_key_value_heads"] = _HEADS if keys == heads else min(keys, 2)
    if "first_k_dense_replace" in found:
        special |= _MLP_THEN_EXPERTS
    return {name: value for name, value in special.items() if name not in BY_HAND.get(config.model_type, {})}


def _without_long_tables(values: dict[str, Any]) -> dict[str, Any]:
    """``values``, with tables of factors for each frequency of a wide head cut to those of a narrow one."""
    rope = values.get("rope_parameters")
    if not isinstance(rope, dict):
        return values
    width = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
    count = int(width * rope.get("partial_rotary_factor", 1.0)) // 2
    cut = {name: v[:count] if isinstance(v, list) and name.endswith("_factor") else v for name, v in rope.items()}
    return values | {"rope_parameters": cut}


def _small_values(default: PretrainedConfig, by_hand: dict[str, Any]) -> dict[str, Any]:
    """The values of ``default`` that a tiny config has of its own, with those given ``by_hand``."""
    known = type(default).__dataclass_fields__
    if "kv_lora_rank" in known:  # latent attention has a key head for each query head
        by_hand = {"num_key_value_heads": _HEADS, **by_hand}
    shrunk = {n: _shrunk(n, v) for n, v in vars(default).items() if n not in {"qk_head_dim", *by_hand}}
    values = {n: v for n, v in shrunk.items() if v is not None} | by_hand
    depth_name = next((n for names in (by_hand, vars(default)) for n in _DEPTHS if n in names), "")
    depth = getattr(default, depth_name, 0)
    lists = {n: v for n, v in vars(default).items() if isinstance(v, list) and len(v) == depth and n not in by_hand}
    if depth_name not in by_hand and depth_name:
        values[depth_name] = shown_layers([str(kinds) for kinds in zip(*lists.values(), strict=True)])
    return values | {name: kinds[: values[depth_name]] for name, kinds in lists.items() if name in known}


def shown_layers(kinds: Sequence[str]) -> int:
    """The number of layers that show the pattern of ``kinds``: the shortest prefix and two periods."""
    fits = [
        (prefix + period, prefix)
        for prefix in range(4)
        for period in range(1, MOST_LAYERS + 1)
        if len(kinds) >= prefix + 2 * period
        and all(kinds[i] == kinds[i + period] for i in range(prefix, len(kinds) - period))
    ]
    if not kinds:
        return FEWEST_LAYERS
    if not fits:
        return min(MOST_LAYERS, len(kinds))
    total, prefix = min(fits)
    return prefix + max(2 * (total - prefix), FEWEST_LAYERS)


def _shrunk(name: str, value: Any) -> Any:
    """The smaller value of a default config's field; None: unchanged."""
    if name.endswith("_token_id") and value is not None:
        return [1] if isinstance(value, list) else min(value, 1)
    if isinstance(value, float) and re.search("drop|jitter", name):
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    rule = next((new for pattern, new in _RULES if re.fullmatch(pattern, name) or pattern == "vocab" in name), None)
    if callable(rule):
        return rule(value)
    return min(rule, value) if rule and "rank" in name else rule
