"""Llama, Qwen2, Qwen3: everything sharded over every device; each layer's weights are gathered as it runs.

command:   python scripts/train.py --recipe llama_fsdp
hardware:  8 devices as fsdp=8; 8 virtual CPU devices where there is no TPU
memory:    2.89 MiB a device for weights, gradients and AdamW state, by scripts/plan.py
           Llama-3-70B on 64 devices: 16.45 GiB
           Llama-3-70B on 1024 devices: 4.13 GiB, as four copies (HSDP); on 4 slices v6e:16x16, a copy on each, with a
           sequence of 4096 a chip 15.1 of 31.2 GiB, by scripts/compile.py --topology v6e:16x16 --slices 4
expected:  held-out loss 7.66 -> 6.13 nats a token with --max_steps 50 on the default data (a unigram model: 6.32)
"""

from shardwright import Compute, Mesh, Recipe, Shard

recipe = Recipe(
    mesh=Mesh(fsdp=-1),
    batch=("fsdp",),
    parameters={
        "model.embed_tokens.weight": {"fsdp": Shard(0)},
        "model.layers.*.self_attn.[qkv]_proj.weight": {"fsdp": Shard(0)},
        "model.layers.*.self_attn.o_proj.weight": {"fsdp": Shard(1)},
        "model.layers.*.mlp.gate_proj.weight": {"fsdp": Shard(0)},
        "model.layers.*.mlp.up_proj.weight": {"fsdp": Shard(0)},
        "model.layers.*.mlp.down_proj.weight": {"fsdp": Shard(1)},
        "model.layers.*.*layernorm.weight": {},
        "model.norm.weight": {},
        "lm_head.weight": {"fsdp": Shard(0)},  # as embed_tokens: some models tie the two
    },
    optional={
        "model.layers.*.self_attn.[qkv]_proj.bias": {"fsdp": Shard(0)},  # Qwen2
        "model.layers.*.self_attn.o_proj.bias": {},
        "model.layers.*.self_attn.[qk]_norm.weight": {},  # Qwen3
        "model.layers.*.mlp.gate_proj.bias": {"fsdp": Shard(0)},
        "model.layers.*.mlp.up_proj.bias": {"fsdp": Shard(0)},
        "model.layers.*.mlp.down_proj.bias": {},
    },
    activations={"model.layers.*": {"fsdp": Shard(0)}},
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
