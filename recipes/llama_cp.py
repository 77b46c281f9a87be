"""Llama, Qwen2, Qwen3 on long rows: the tokens of a row split over `sequence`, keys and values passed in a ring.

Every weight is sharded over every device, as in llama_fsdp. A row is cut so that each device has as much to attend to
as the next; documents in it are kept apart as ever.

command:   python scripts/train.py --recipe llama_cp
hardware:  8 devices as fsdp=2 × sequence=4; 8 virtual CPU devices where there is no TPU
memory:    2.89 MiB a device for weights, gradients and AdamW state, by scripts/plan.py
           Llama-3-70B on 64 devices: 16.45 GiB
expected:  the losses of llama_fsdp on the same rows: with --per_device_train_batch_size 4 --max_steps 50 held-out loss
           7.66 -> 6.13 nats a token on the default data, as there
"""

from shardwright import Compute, Mesh, Recipe, Shard

recipe = Recipe(
    mesh=Mesh(fsdp=-1, sequence=4),  # neighbours in the ring: innermost
    batch=("fsdp",),
    parameters={
        "model.embed_tokens.weight": {"fsdp": Shard(0), "sequence": Shard(0)},
        "model.layers.*.self_attn.[qkv]_proj.weight": {"fsdp": Shard(0), "sequence": Shard(0)},
        "model.layers.*.self_attn.o_proj.weight": {"fsdp": Shard(1), "sequence": Shard(1)},
        "model.layers.*.mlp.gate_proj.weight": {"fsdp": Shard(0), "sequence": Shard(0)},
        "model.layers.*.mlp.up_proj.weight": {"fsdp": Shard(0), "sequence": Shard(0)},
        "model.layers.*.mlp.down_proj.weight": {"fsdp": Shard(1), "sequence": Shard(1)},
        "model.layers.*.*layernorm.weight": {},
        "model.norm.weight": {},
        "lm_head.weight": {"fsdp": Shard(0), "sequence": Shard(0)},  # as embed_tokens: some models tie the two
    },
    optional={
        "model.layers.*.self_attn.[qkv]_proj.bias": {"fsdp": Shard(0), "sequence": Shard(0)},  # Qwen2
        "model.layers.*.self_attn.o_proj.bias": {},
        "model.layers.*.self_attn.[qk]_norm.weight": {},  # Qwen3
        "model.layers.*.mlp.gate_proj.bias": {"fsdp": Shard(0), "sequence": Shard(0)},
        "model.layers.*.mlp.up_proj.bias": {"fsdp": Shard(0), "sequence": Shard(0)},
        "model.layers.*.mlp.down_proj.bias": {},
    },
    activations={"model.layers.*": {"fsdp": Shard(0), "sequence": Shard(1)}},
    compute=Compute(remat="full", scan=True),
    model={
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 2048,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
    },
)
