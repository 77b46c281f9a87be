"""Mixtral: experts spread over `expert`, everything else sharded over every device.

command:   python scripts/train.py --recipe mixtral_ep
hardware:  8 devices as fsdp=2 × expert=4; 8 virtual CPU devices where there is no TPU
memory:    7.46 MiB a device for weights, gradients and AdamW state, by scripts/plan.py
           Mixtral-8x7B on 64 devices: 10.89 GiB; with 12 sequences of 4096 a chip 32.7 GiB of a v5p, by
           scripts/compile.py
expected:  held-out loss 7.66 -> 5.57 nats a token in 100 steps on the default data (a unigram model: 6.32)
"""

from shardwright import Compute, Mesh, Recipe, Shard

recipe = Recipe(
    mesh=Mesh(fsdp=-1, expert=4),  # the all-to-all of tokens runs on the innermost axis
    batch=("fsdp", "expert"),
    parameters={
        "model.embed_tokens.weight": {"fsdp": Shard(0), "expert": Shard(0)},
        "model.layers.*.self_attn.[qkv]_proj.weight": {"fsdp": Shard(0), "expert": Shard(0)},
        "model.layers.*.self_attn.o_proj.weight": {"fsdp": Shard(1), "expert": Shard(1)},
        "model.layers.*.mlp.gate.weight": {},  # the router: small, and every token needs all of it
        "model.layers.*.mlp.experts.*_proj": {"expert": Shard(0), "fsdp": Shard(2)},
        "model.layers.*.*layernorm.weight": {},
        "model.norm.weight": {},
        "lm_head.weight": {"fsdp": Shard(0), "expert": Shard(0)},
    },
    optional={
        "model.layers.*.self_attn.[qkv]_proj.bias": {"fsdp": Shard(0), "expert": Shard(0)},
        "model.layers.*.self_attn.o_proj.bias": {},
        "model.layers.*.self_attn.[qk]_norm.weight": {},  # Qwen3-MoE
    },
    activations={"model.layers.*": {"fsdp": Shard(0), "expert": Shard(0)}},
    compute=Compute(experts="dropless", router_loss=True, remat="full", scan=True),
    model={
        "model_type": "mixtral",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 2048,
        "max_position_embeddings": 2048,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
        "rms_norm_eps": 1e-5,
    },
)
