"""Qwen3-Next: experts spread over `expert`, everything else sharded over every device.

Three layers of four have linear attention (a gated delta net). Its two matrices are sharded as those of attention are;
its convolution, gates and norm are small and replicated.

command:   python scripts/train.py --recipe qwen3_next_ep
hardware:  8 devices as fsdp=2 × expert=4; 8 virtual CPU devices where there is no TPU
memory:    5.72 MiB a device for weights, gradients and AdamW state, by scripts/plan.py
           Qwen3-Next-80B-A3B on 64 devices: 18.64 GiB; a step on 8 chips of v5p: 79.3 of 95.7 GiB, by the compiler
expected:  held-out loss 7.66 -> 5.59 nats a token with --max_steps 50 on the default data (a unigram model: 6.32)
"""

from shardwright import Compute, Mesh, Recipe, Shard

recipe = Recipe(
    mesh=Mesh(fsdp=-1, expert=4),
    batch=("fsdp", "expert"),
    parameters={
        "model.embed_tokens.weight": {"fsdp": Shard(0), "expert": Shard(0)},
        "model.layers.*.linear_attn.in_proj_qkvz.weight": {"fsdp": Shard(0), "expert": Shard(0)},
        "model.layers.*.linear_attn.in_proj_ba.weight": {},  # two numbers a head
        "model.layers.*.linear_attn.conv1d.weight": {},
        "model.layers.*.linear_attn.A_log": {},
        "model.layers.*.linear_attn.dt_bias": {},
        "model.layers.*.linear_attn.norm.weight": {},
        "model.layers.*.linear_attn.out_proj.weight": {"fsdp": Shard(1), "expert": Shard(1)},
        "model.layers.*.self_attn.[qkv]_proj.weight": {"fsdp": Shard(0), "expert": Shard(0)},
        "model.layers.*.self_attn.o_proj.weight": {"fsdp": Shard(1), "expert": Shard(1)},
        "model.layers.*.self_attn.[qk]_norm.weight": {},
        "model.layers.*.mlp.gate.weight": {"fsdp": Shard(1), "expert": Shard(1)},  # the router
        "model.layers.*.mlp.experts.*_proj": {"expert": Shard(0), "fsdp": Shard(2)},
        "model.layers.*.mlp.shared_expert.gate_proj.weight": {"fsdp": Shard(0), "expert": Shard(0)},
        "model.layers.*.mlp.shared_expert.up_proj.weight": {"fsdp": Shard(0), "expert": Shard(0)},
        "model.layers.*.mlp.shared_expert.down_proj.weight": {"fsdp": Shard(1), "expert": Shard(1)},
        "model.layers.*.mlp.shared_expert_gate.weight": {},
        "model.layers.*.*layernorm.weight": {},
        "model.norm.weight": {},
        "lm_head.weight": {"fsdp": Shard(0), "expert": Shard(0)},
    },
    optional={
        # an MTP layer, where it is trained
        "model.layers.*.eh_proj.weight": {"fsdp": Shard(0), "expert": Shard(0)},
        "model.layers.*.[eh]norm.weight": {},
        "model.layers.*.shared_head.norm.weight": {},
    },
    activations={"model.layers.*": {"fsdp": Shard(0), "expert": Shard(0)}},
    compute=Compute(experts="dropless", router_loss=True, remat="full", scan=True),
    model={
        "model_type": "qwen3_next",
        "hidden_size": 128,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "num_hidden_layers": 8,  # linear, linear, linear, full; twice
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 2048,
        "max_position_embeddings": 2048,
        "router_aux_loss_coef": 0.02,
    },
)
