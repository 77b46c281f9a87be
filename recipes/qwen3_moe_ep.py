"""Qwen3-MoE and GLM-4.5: experts spread over `expert`, everything else sharded over every device.

command:   python scripts/train.py --recipe qwen3_moe_ep
hardware:  8 devices as fsdp=2 × expert=4; 8 virtual CPU devices where there is no TPU
memory:    4.40 MiB a device for weights, gradients and AdamW state, by scripts/plan.py
           Qwen3-235B-A22B on 128 devices: 27.38 GiB; on 32 v5p with bfloat16 state and a sequence of 4096 a chip,
           61.8 GiB, by scripts/compile.py
expected:  held-out loss 7.66 -> 6.14 nats a token with --max_steps 50 on the default data (a unigram model: 6.32)
"""

from shardwright import Compute, Mesh, Recipe, Shard

recipe = Recipe(
    mesh=Mesh(fsdp=-1, expert=4),
    batch=("fsdp", "expert"),
    parameters={
        "model.embed_tokens.weight": {"fsdp": Shard(0), "expert": Shard(0)},
        "model.layers.*.self_attn.[qkv]_proj.weight": {"fsdp": Shard(0), "expert": Shard(0)},
        "model.layers.*.self_attn.o_proj.weight": {"fsdp": Shard(1), "expert": Shard(1)},
        "model.layers.*.mlp.gate.weight": {"fsdp": Shard(1), "expert": Shard(1)},  # the router
        "model.layers.*.mlp.experts.*_proj": {"expert": Shard(0), "fsdp": Shard(2)},
        "model.layers.*.*layernorm.weight": {},
        "model.norm.weight": {},
        "lm_head.weight": {"fsdp": Shard(0), "expert": Shard(0)},
    },
    optional={
        "model.layers.*.self_attn.[qk]_norm.weight": {},  # all but GLM-4.5-Air
        # the rest is GLM-4.5's: biases, shared experts, and first layers that are dense
        "model.layers.*.self_attn.[qkv]_proj.bias": {},
        "model.layers.*.mlp.shared_experts.gate_proj.weight": {"fsdp": Shard(0), "expert": Shard(0)},
        "model.layers.*.mlp.shared_experts.up_proj.weight": {"fsdp": Shard(0), "expert": Shard(0)},
        "model.layers.*.mlp.shared_experts.down_proj.weight": {"fsdp": Shard(1), "expert": Shard(1)},
        "model.layers.*.mlp.gate_proj.weight": {"fsdp": Shard(0), "expert": Shard(0)},
        "model.layers.*.mlp.up_proj.weight": {"fsdp": Shard(0), "expert": Shard(0)},
        "model.layers.*.mlp.down_proj.weight": {"fsdp": Shard(1), "expert": Shard(1)},
    },
    activations={"model.layers.*": {"fsdp": Shard(0), "expert": Shard(0)}},
    compute=Compute(experts="dropless", router_loss=True, remat="full", scan=True),
    model={
        "model_type": "qwen3_moe",
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "vocab_size": 2048,
        "max_position_embeddings": 2048,
        "router_aux_loss_coef": 0.02,
    },
)
