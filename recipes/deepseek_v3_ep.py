"""DeepSeek-V3 and its like: experts spread over `expert`, everything else sharded over every device.

Latent attention is two pairs of projections, down to a few hundred channels and up to all heads. The first of a pair
is split by its inputs and the second by its outputs: their widths are multiples of many devices, the latent's is not.

command:   python scripts/train.py --recipe deepseek_v3_ep
hardware:  8 devices as fsdp=2 × expert=4; 8 virtual CPU devices where there is no TPU
memory:    4.13 MiB a device for weights, gradients and AdamW state, by scripts/plan.py
           DeepSeek-V3 on 256 devices: 39.07 GiB; on 64 v5p with bfloat16 state and a sequence of 4096 a chip,
           89.7 GiB, by scripts/compile.py
           Kimi-K2 on 1024 devices: 14.95 GiB
expected:  held-out loss 7.66 -> 5.66 nats a token with --max_steps 50 on the default data (a unigram model: 6.32)
"""

from shardwright import Compute, Mesh, Recipe, Shard

recipe = Recipe(
    mesh=Mesh(fsdp=-1, expert=4),
    batch=("fsdp", "expert"),
    parameters={
        "model.embed_tokens.weight": {"fsdp": Shard(0), "expert": Shard(0)},
        "model.layers.*.self_attn.kv_a_proj_with_mqa.weight": {"fsdp": Shard(1), "expert": Shard(1)},
        "model.layers.*.self_attn.kv_a_layernorm.weight": {},
        "model.layers.*.self_attn.kv_b_proj.weight": {"fsdp": Shard(0), "expert": Shard(0)},
        "model.layers.*.self_attn.o_proj.weight": {"fsdp": Shard(1), "expert": Shard(1)},
        "model.layers.*.mlp.gate.weight": {"fsdp": Shard(1), "expert": Shard(1)},  # the router
        "model.layers.*.mlp.experts.*_proj": {"expert": Shard(0), "fsdp": Shard(2)},
        "model.layers.*.mlp.shared_experts.gate_proj.weight": {"fsdp": Shard(0), "expert": Shard(0)},
        "model.layers.*.mlp.shared_experts.up_proj.weight": {"fsdp": Shard(0), "expert": Shard(0)},
        "model.layers.*.mlp.shared_experts.down_proj.weight": {"fsdp": Shard(1), "expert": Shard(1)},
        "model.layers.*.*layernorm.weight": {},
        "model.norm.weight": {},
        "lm_head.weight": {"fsdp": Shard(0), "expert": Shard(0)},
    },
    optional={
        "model.layers.*.self_attn.q_a_proj.weight": {"fsdp": Shard(1), "expert": Shard(1)},
        "model.layers.*.self_attn.q_a_layernorm.weight": {},
        "model.layers.*.self_attn.q_b_proj.weight": {"fsdp": Shard(0), "expert": Shard(0)},
        "model.layers.*.self_attn.q_proj.weight": {"fsdp": Shard(0), "expert": Shard(0)},  # where q has no latent
        # the first layers are dense
        "model.layers.*.mlp.gate_proj.weight": {"fsdp": Shard(0), "expert": Shard(0)},
        "model.layers.*.mlp.up_proj.weight": {"fsdp": Shard(0), "expert": Shard(0)},
        "model.layers.*.mlp.down_proj.weight": {"fsdp": Shard(1), "expert": Shard(1)},
        # MTP layers, where they are trained
        "model.layers.*.eh_proj.weight": {"fsdp": Shard(0), "expert": Shard(0)},
        "model.layers.*.[eh]norm.weight": {},
        "model.layers.*.shared_head.norm.weight": {},
    },
    activations={"model.layers.*": {"fsdp": Shard(0), "expert": Shard(0)}},
    compute=Compute(experts="dropless", remat="full", scan=True),
    model={
        "model_type": "deepseek_v3",
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 4,
        "first_k_dense_replace": 1,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "q_lora_rank": 64,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 4,
        "topk_group": 2,
        "vocab_size": 2048,
        "max_position_embeddings": 2048,
    },
)
