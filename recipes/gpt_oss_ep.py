"""GPT-OSS: experts spread over `expert` with their biases, everything else sharded over every device.

command:   python scripts/train.py --recipe gpt_oss_ep
hardware:  8 devices as fsdp=2 × expert=4; 8 virtual CPU devices where there is no TPU
memory:    4.53 MiB a device for weights, gradients and AdamW state, by scripts/plan.py
           GPT-OSS-120B on 64 devices: 27.54 GiB; on 16 v5p with bfloat16 state and a sequence of 4096 a chip,
           62.0 GiB, by scripts/compile.py
expected:  held-out loss 7.66 -> 6.00 nats a token with --max_steps 50 on the default data (a unigram model: 6.32)
"""

from shardwright import Compute, Mesh, Recipe, Shard

recipe = Recipe(
    mesh=Mesh(fsdp=-1, expert=4),
    batch=("fsdp", "expert"),
    parameters={
        "model.embed_tokens.weight": {"fsdp": Shard(0), "expert": Shard(0)},
        "model.layers.*.self_attn.[qkv]_proj.weight": {"fsdp": Shard(0), "expert": Shard(0)},
        "model.layers.*.self_attn.[qkvo]_proj.bias": {},
        "model.layers.*.self_attn.o_proj.weight": {"fsdp": Shard(1), "expert": Shard(1)},
        "model.layers.*.self_attn.sinks": {},  # one number a head
        "model.layers.*.mlp.router.*": {},  # small, and every token needs all of it
        "model.layers.*.mlp.experts.*_proj": {"expert": Shard(0), "fsdp": Shard(2)},
        "model.layers.*.mlp.experts.*_proj_bias": {"expert": Shard(0)},
        "model.layers.*.*layernorm.weight": {},
        "model.norm.weight": {},
        "lm_head.weight": {"fsdp": Shard(0), "expert": Shard(0)},
    },
    activations={"model.layers.*": {"fsdp": Shard(0), "expert": Shard(0)}},
    compute=Compute(experts="dropless", router_loss=True, remat="full", scan=True),
    model={
        "model_type": "gpt_oss",
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 4,  # window and full attention by turns
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 64,
        "vocab_size": 2048,
        "max_position_embeddings": 131072,
        "router_aux_loss_coef": 0.02,
    },
)
