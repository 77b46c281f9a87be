"""Llama-4's text model: experts spread over `expert`, everything else sharded over every device.

command:   python scripts/train.py --recipe llama4_ep
hardware:  8 devices as fsdp=2 × expert=4; 8 virtual CPU devices where there is no TPU
memory:    8.66 MiB a device for weights, gradients and AdamW state, by scripts/plan.py
           Llama-4-Scout on 64 devices: 25.16 GiB; on 16 v5p with bfloat16 state and a sequence of 4096 a chip,
           58.7 GiB, by scripts/compile.py
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
        "model.layers.*.feed_forward.router.weight": {},  # small, and every token needs all of it
        "model.layers.*.feed_forward.experts.*_proj": {"expert": Shard(0), "fsdp": Shard(2)},
        "model.layers.*.feed_forward.shared_expert.gate_proj.weight": {"fsdp": Shard(0), "expert": Shard(0)},
        "model.layers.*.feed_forward.shared_expert.up_proj.weight": {"fsdp": Shard(0), "expert": Shard(0)},
        "model.layers.*.feed_forward.shared_expert.down_proj.weight": {"fsdp": Shard(1), "expert": Shard(1)},
        "model.layers.*.*layernorm.weight": {},
        "model.norm.weight": {},
        "lm_head.weight": {"fsdp": Shard(0), "expert": Shard(0)},
    },
    optional={  # Maverick: every second layer is dense
        "model.layers.*.feed_forward.gate_proj.weight": {"fsdp": Shard(0), "expert": Shard(0)},
        "model.layers.*.feed_forward.up_proj.weight": {"fsdp": Shard(0), "expert": Shard(0)},
        "model.layers.*.feed_forward.down_proj.weight": {"fsdp": Shard(1), "expert": Shard(1)},
    },
    activations={"model.layers.*": {"fsdp": Shard(0), "expert": Shard(0)}},
    compute=Compute(experts="dropless", remat="full", scan=True),
    model={
        "model_type": "llama4_text",
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 8,  # three with rotation in chunks and one with neither, twice
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 1,
        "attention_chunk_size": 64,
        "vocab_size": 2048,
        "max_position_embeddings": 2048,
    },
)
