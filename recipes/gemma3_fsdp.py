"""Gemma-3's text model: everything sharded over every device; each layer's weights are gathered as it runs.

command:   python scripts/train.py --recipe gemma3_fsdp
hardware:  8 devices as fsdp=8; 8 virtual CPU devices where there is no TPU
memory:    7.18 MiB a device for weights, gradients and AdamW state, by scripts/plan.py
           Gemma-3-27B on 16 devices: 25.17 GiB; on 4 v5p with bfloat16 state and a sequence of 4096 a chip,
           59.6 GiB, by scripts/compile.py
expected:  held-out loss 7.65 -> 6.09 nats a token with --max_steps 50 on the default data (a unigram model: 6.32)
"""

from shardwright import Compute, Mesh, Recipe, Shard

recipe = Recipe(
    mesh=Mesh(fsdp=-1),
    batch=("fsdp",),
    parameters={
        "model.embed_tokens.weight": {"fsdp": Shard(0)},  # and the head: Gemma ties the two
        "model.layers.*.self_attn.[qkv]_proj.weight": {"fsdp": Shard(0)},
        "model.layers.*.self_attn.o_proj.weight": {"fsdp": Shard(1)},
        "model.layers.*.self_attn.[qk]_norm.weight": {},
        "model.layers.*.mlp.gate_proj.weight": {"fsdp": Shard(0)},
        "model.layers.*.mlp.up_proj.weight": {"fsdp": Shard(0)},
        "model.layers.*.mlp.down_proj.weight": {"fsdp": Shard(1)},
        "model.layers.*.*layernorm.weight": {},  # four a layer
        "model.norm.weight": {},
        "lm_head.weight": {"fsdp": Shard(0)},
    },
    activations={"model.layers.*": {"fsdp": Shard(0)}},
    compute=Compute(remat="full", scan=True),
    model={
        "model_type": "gemma3_text",
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 14,  # five with a window and a full one, twice, and two with a window, as the 27B ends
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 64,
        "vocab_size": 2048,
        "max_position_embeddings": 2048,
    },
)
