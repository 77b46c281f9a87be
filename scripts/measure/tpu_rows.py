"""The rows of scripts/measure/tpu_tables.py: table → row → options of scripts/compile.py.

``@FILE,KEY=VALUE,…`` is a file of docs/configs with those entries changed; ``@prompts`` is a file of 16 prompts.
"""

from __future__ import annotations

_MIXTRAL = "--model docs/configs/mixtral_8x7b.json --sequence_length 4096"
_64 = "--topology v5p:4x4x4"
_BF16 = "--weight_dtype bfloat16 --optimizer_dtype bfloat16"
_CAPACITY = "--compute experts=capacity,capacity_factor=1.25"
_DENSE70 = "--model docs/configs/llama3_70b.json --sequence_length 4096"
_DENSE8 = "--model docs/configs/llama3_8b.json --sequence_length"
_LONG = f"--recipe llama_cp {_DENSE8}"
_BATCH = "--per_device_train_batch_size"
_PLAIN = "--compute scan=False,remat=none"
_TORUS = "--mesh fsdp=16,inner=16"  # an axis for each dimension of a pod of v5e or v6e

# published flag sets, one by one, on top of torch_xla's own flags; `name=` takes back a flag of this trainer
_NONE_OF_OURS = "xla_tpu_enable_async_all_to_all= xla_tpu_scoped_vmem_limit_kib="
_SPARSE_CORE = "xla_tpu_enable_sparse_core_collective_offload"
_FLAGS = {
    "torch_xla's own": "",
    "asynchronous all-to-all": "xla_tpu_enable_async_all_to_all=true",
    "32 MiB of VMEM for a fusion": "xla_tpu_scoped_vmem_limit_kib=32768",
    "80 MiB of VMEM for a fusion": "xla_tpu_scoped_vmem_limit_kib=81920",
    "no latency hiding": "xla_tpu_enable_latency_hiding_scheduler=false",
    "no windowed einsum": "xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000",
    "async collective fusion": "xla_tpu_enable_async_collective_fusion=true "
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather=true "
    "xla_tpu_enable_async_collective_fusion_multiple_steps=true xla_tpu_overlap_compute_collective_tc=true",
    "asynchronous reduce-scatter": "xla_enable_async_reduce_scatter_fusion=true "
    "xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter=true",
    "collectives on the sparse cores": f"{_SPARSE_CORE}_all_gather=true {_SPARSE_CORE}_reduce_scatter=true "
    f"{_SPARSE_CORE}_all_reduce=true",
}

# all gathers and reduce-scatters on the sparse cores, none fused into products
_BESIDE = f"xla_tpu_enable_async_collective_fusion_fuse_all_gather=false {_FLAGS['collectives on the sparse cores']}"

# other ways to hide a gradient's reduce-scatter
_LEVERS = {
    "asynchronous reduce-scatter, by itself": "xla_enable_async_reduce_scatter_fusion=true",
    "the same, fused with what is computed": _FLAGS["asynchronous reduce-scatter"],
    "collectives on the sparse cores, 16 MiB of VMEM for a fusion": "xla_tpu_scoped_vmem_limit_kib= "
    + _FLAGS["collectives on the sparse cores"],
    "products and reduce-scatters in steps": "xla_tpu_reduce_scatter_collective_matmul_mode=post_spmd",
}
_LAYERS8 = (
    "--recipe llama_fsdp --model @llama3_8b.json,vocab_size=8192 --sequence_length 4096 --only_train_step "
    f"{_BATCH} 1 --topology"
)

# models whose layers mix tokens by a recurrence → the config of one such layer alone, with a dense MLP; layer_types,
# which lists all layers of the model, is null, and then a config's first layer is of that kind
_MIXERS = {
    "Qwen3-Next-80B (gated delta rule)": "@qwen3_next_80b_a3b.json,decoder_sparse_step=2",
    "Kimi-Linear-48B (Kimi delta attention)": "@kimi_linear_48b_a3b.json,layer_types=null,pad_token_id=0",
    "Granite-4.0-H-Small (Mamba-2)": "@granite_4_h_small.json,layer_types=null,num_local_experts=0",
}


def _layouts(topology: str, batch: int) -> dict[str, str]:
    where = f"{_MIXTRAL} --topology {topology} {_BATCH} {batch} {_CAPACITY}"
    return {
        f"mixtral_ep, {topology}": f"--recipe mixtral_ep {where}",
        f"mixtral_fsdp, {topology}": f"--recipe mixtral_fsdp {where}",
    }


def _flags(topology: str, batch: int, *names: str) -> dict[str, str]:
    """Rows for one step with torch_xla's own flags, with each named set added, and with this trainer's."""
    step = (
        "--recipe mixtral_ep --model @mixtral_8x7b.json,num_hidden_layers=2 --sequence_length 4096 "
        f"--topology {topology} {_BATCH} {batch} {_CAPACITY}"
    )
    rows = {
        f"{topology}, {name}": f"{step} --compiler_options '{_NONE_OF_OURS} {_FLAGS[name]}'"
        for name in ("torch_xla's own", *names)
    }
    return {**rows, f"{topology}, this trainer's": step}


def _families(*rows: tuple[str, str, str, str, str]) -> dict[str, str]:
    """Rows for real models (name, config, recipe, slice, mesh): one sequence of 4096 a chip, bfloat16 state."""
    return {
        f"{name}, {recipe}, {topology}": f"--recipe {recipe} --model docs/configs/{config}.json --sequence_length 4096 "
        f"--topology {topology} --mesh {mesh} {_BATCH} 1 {_BF16}"
        for name, config, recipe, topology, mesh in rows
    }


TABLES: dict[str, dict[str, str]] = {
    "anchor": {
        "dropless, bf16 state, 36 sequences": f"--recipe mixtral_fsdp {_MIXTRAL} {_64} {_BATCH} 36 {_BF16}",
        "dropless, 12": f"--recipe mixtral_ep {_MIXTRAL} {_64} {_BATCH} 12",
        "capacity 1.25, 12": f"--recipe mixtral_ep {_MIXTRAL} {_64} {_BATCH} 12 {_CAPACITY}",
        "capacity 1.25, 12, torch_xla's flags": f"--recipe mixtral_ep {_MIXTRAL} {_64} {_BATCH} 12 {_CAPACITY} "
        f"--compiler_options '{_NONE_OF_OURS}'",
    },
    "levers": {
        "Llama-3-70B, 1 sequence, all kept (remat 1.0)": f"--recipe llama_fsdp {_DENSE70} {_64} {_BATCH} 1 "
        "--compute remat=1.0 --only_train_step"
    }
    | {
        f"{name}, v5p:4x4x4": f"--recipe mixtral_fsdp {_MIXTRAL} {_64} {_BF16} {_BATCH} {options} --only_train_step"
        for name, options in (
            ("36 sequences, remat full", "36"),
            ("4, all kept (remat 1.0)", "4 --compute remat=1.0"),
            ("4, all kept, sparse cores", f"4 --compute remat=1.0 --compiler_options '{_BESIDE}'"),
        )
    }
    | {
        f"experts spread, 2 sequences, {name}, v5p:4x4x4": f"--recipe mixtral_ep {_MIXTRAL} {_64} {_BATCH} 2 "
        f"--compute remat={remat} --only_train_step"
        for name, remat in (("remat full", "full"), ("all kept (remat 1.0)", "1.0"))
    }
    | {
        f"4 layers, {name}, v6e:8x8": f"--recipe mixtral_ep --model @mixtral_8x7b.json,num_hidden_layers=4 "
        f"--sequence_length 4096 --topology v6e:8x8 {_BATCH} 2 --compute {options} --only_train_step"
        for name, options in (
            ("capacity 2.0", "experts=capacity,capacity_factor=2.0"),
            ("dropless", "experts=dropless"),
            ("dropless, 80 MiB", f"experts=dropless --compiler_options {_FLAGS['80 MiB of VMEM for a fusion']}"),
        )
    },
    "levers_v6e": {
        name: f"--recipe mixtral_{recipe} --model @mixtral_8x7b.json,num_hidden_layers=4 --sequence_length 4096 "
        f"--topology v6e:8x8 {_BATCH} 2 --only_train_step {options}"
        for name, recipe, options in (
            ("an all-to-all runs alone", "ep", "--compiler_options xla_tpu_enable_async_all_to_all="),
            ("all kept (remat 1.0)", "ep", "--compute remat=1.0"),
            ("layer by layer, nothing computed again", "ep", _PLAIN),
            ("the same, 80 MiB", "ep", f"{_PLAIN} --compiler_options {_FLAGS['80 MiB of VMEM for a fusion']}"),
            ("a mesh axis for each dimension of the torus", "ep", "--mesh fsdp=8,expert=8"),
            ("no token crosses, all weights do (mixtral_fsdp)", "fsdp", "--mesh fsdp=8,inner=8"),
            ("the same on the sparse cores", "fsdp", f"--mesh fsdp=8,inner=8 --compiler_options '{_BESIDE}'"),
        )
    },
    "pod_v6e": {
        name: f"--recipe mixtral_{job} --topology v6e:16x16 --only_train_step"
        for name, job in (
            (
                "4 layers, 2 sequences, experts spread",
                f"ep --model @mixtral_8x7b.json,num_hidden_layers=4 --sequence_length 4096 {_BATCH} 2",
            ),
            ("8 sequences, experts spread", f"ep {_MIXTRAL} {_BATCH} 8"),
            ("8 sequences, experts gathered", f"fsdp {_MIXTRAL} {_BATCH} 8 {_TORUS}"),
            (
                "8 sequences, experts gathered, 80 MiB",
                f"fsdp {_MIXTRAL} {_BATCH} 8 {_TORUS} --compiler_options {_FLAGS['80 MiB of VMEM for a fusion']}",
            ),
            (
                "8 sequences, experts gathered on the sparse cores",
                f"fsdp {_MIXTRAL} {_BATCH} 8 {_TORUS} --compiler_options '{_BESIDE}'",
            ),
        )
    },
    "layouts_v5p": _layouts("v5p:4x4x4", 4)
    | {
        "mixtral_ep_tp, v5p:4x4x4": f"--recipe mixtral_ep_tp {_MIXTRAL} {_64} {_BATCH} 4 {_CAPACITY}",
        "one axis for all (naive), v5p:4x4x4": f"--recipe mixtral_fsdp --mesh fsdp=64,inner=1 {_MIXTRAL} {_64} "
        f"{_BATCH} 4 {_CAPACITY}",
    },
    "layouts_v5e": _layouts("v5e:16x16", 1),
    "layouts_v6e": _layouts("v6e:16x16", 2),
    "remat": {
        f"mixtral_ep, remat {remat}": f"--recipe mixtral_ep {_MIXTRAL} {_64} {_BATCH} 4 {_CAPACITY},remat={remat}"
        for remat in ("full", "offload", "save_matmuls", "auto")
    }
    | {
        f"llama_fsdp, remat {remat}": f"--recipe llama_fsdp {_DENSE70} {_64} {_BATCH} 2 --compute remat={remat}"
        for remat in ("full", "offload", "auto")
    },
    "remat_values": {
        f"{name}, remat {remat}": f"--recipe llama_fsdp --model @{config},num_hidden_layers=4,vocab_size=8192 "
        f"--sequence_length 4096 --only_train_step --topology v5p:2x2x2 {_BATCH} {batch} --compute remat={remat}"
        for name, config, batch in (
            ("Llama-3-8B, 4 ×", "llama3_8b.json", 4),
            ("Llama-3-70B, 2 ×", "llama3_70b.json", 2),
        )
        for remat in ("full", "0.4")
    },
    "models": {
        "Llama-3-70B, llama_fsdp": f"--recipe llama_fsdp {_DENSE70} {_64} {_BATCH} 2",
        "Llama-3-70B, llama_tp": f"--recipe llama_tp {_DENSE70} {_64} {_BATCH} 2",
        "Qwen3-30B-A3B, mixtral_ep": "--recipe mixtral_ep --model docs/configs/qwen3_30b_a3b.json "
        f"--sequence_length 4096 {_64} {_BATCH} 4 {_CAPACITY}",
    },
    "families": _families(
        ("Gemma-3-27B", "gemma3_27b", "gemma3_fsdp", "v5p:2x2x1", "fsdp=4"),
        ("Qwen3-Next-80B-A3B", "qwen3_next_80b_a3b", "qwen3_next_ep", "v5p:2x2x2", "fsdp=2,expert=4"),
        ("GPT-OSS-120B", "gpt_oss_120b", "gpt_oss_ep", "v5p:2x2x4", "fsdp=4,expert=4"),
        ("Llama-4-Scout", "llama4_scout", "llama4_ep", "v5p:2x2x4", "fsdp=4,expert=4"),
        ("Qwen3-235B-A22B", "qwen3_235b_a22b", "qwen3_moe_ep", "v5p:2x4x4", "fsdp=8,expert=4"),
        ("GLM-4.5", "glm_4_5", "qwen3_moe_ep", "v5p:2x4x4", "fsdp=8,expert=4"),
        ("DeepSeek-V3", "deepseek_v3", "deepseek_v3_ep", "v5p:4x4x4", "fsdp=4,expert=16"),
    ),
    "experts": {
        f"{name}, {mesh}": f"--recipe mixtral_ep --model {config} --sequence_length 4096 --topology v5p:2x2x2 --mesh "
        f"{mesh} {_BATCH} 1 {_BF16}"
        for name, config, mesh in (
            ("64 experts", "@qwen3_30b_a3b.json,num_experts=64", "fsdp=1,expert=8"),
            ("128 experts", "docs/configs/qwen3_30b_a3b.json", "fsdp=2,expert=4"),
        )
    },
    "lora": {
        f"{experts}, {topology}": f"--recipe mixtral_ep {_MIXTRAL} {_BATCH} 1 --lora_r 16 --topology {topology} "
        f"{compute}"
        for experts, compute, *topologies in (
            ("capacity 1.25", _CAPACITY, "v5e:4x4", "v5e:2x4", "v6e:2x4", "v6e:2x2"),
            ("capacity 1.25, int8", f"{_CAPACITY} --base_dtype int8", "v5e:2x2"),
            ("dropless", "", "v6e:2x2"),
        )
        for topology in topologies
    },
    "graphs": {
        "mixtral_ep": f"--recipe mixtral_ep {_MIXTRAL} {_64} {_BATCH} 4 {_CAPACITY}",
        "mixtral_fsdp": f"--recipe mixtral_fsdp {_MIXTRAL} {_64} {_BATCH} 4 {_CAPACITY}",
        "mixtral_ep_tp": f"--recipe mixtral_ep_tp {_MIXTRAL} {_64} {_BATCH} 4 {_CAPACITY}",
        "llama_fsdp": f"--recipe llama_fsdp {_DENSE70} {_64} {_BATCH} 2",
        "llama_tp": f"--recipe llama_tp {_DENSE70} {_64} {_BATCH} 2",
        "mixtral_ep, Qwen3-30B-A3B": "--recipe mixtral_ep --model docs/configs/qwen3_30b_a3b.json "
        f"--sequence_length 4096 {_64} {_BATCH} 4 {_CAPACITY}",
    },
    "graphs_asked_for": {
        "Llama-3-8B": "--recipe llama_fsdp --model @llama3_70b.json,num_hidden_layers=32,hidden_size=4096,"
        f"intermediate_size=14336,num_attention_heads=32 --sequence_length 2048 --topology v5e:4x4 {_BATCH} 1 "
        "--objective dpo --sample_prompts @prompts",
    },
    "depth": {
        f"{layers} layers": f"--recipe llama_fsdp --model @llama3_70b.json,num_hidden_layers={layers} "
        f"--sequence_length 4096 {_64} {_BATCH} 2"
        for layers in (4, 32, 80)
    },
    "optimizers": {
        optim: f"--recipe llama_fsdp --model docs/configs/llama3_8b.json --sequence_length 4096 --topology v5p:2x2x2 "
        f"{_BATCH} 1 --only_train_step --optim {optim}"
        for optim in ("adamw", "adafactor", "lion", "muon")
    },
    "flags": _flags("v5p:2x2x4", 2, *(name for name in list(_FLAGS)[1:] if not name.startswith("80")))
    | _flags("v5e:4x4", 1, "asynchronous all-to-all", "32 MiB of VMEM for a fusion")
    | _flags("v6e:4x4", 1, "asynchronous all-to-all", "80 MiB of VMEM for a fusion", "collectives on the sparse cores"),
    "attention": {
        f"{length:,} tokens": "--recipe llama_fsdp --model @llama3_70b.json,num_hidden_layers=1,hidden_size=4096,"
        "intermediate_size=4096,num_attention_heads=32,vocab_size=256,max_position_embeddings=131072 "
        f"--sequence_length {length} --topology v5p:2x2x1 {_BATCH} 1"
        for length in (4096, 32768, 131072)
    },
    "sequence": {
        "131,072 tokens, v5p:2x2x1": f"{_LONG} 131072 --mesh fsdp=1,sequence=4 --topology v5p:2x2x1 {_BATCH} 1",
    }
    | {
        f"1,048,576 tokens, {topology}": f"{_LONG} 1048576 --mesh fsdp=1,sequence={chips} --topology {topology} "
        f"{_BATCH} 1 --compute remat=offload"
        for topology, chips in (("v5p:2x2x1", 4), ("v5p:2x2x2", 8))
    }
    | {
        "1,048,576 tokens, v5p:2x2x4, attention's output kept": f"{_LONG} 1048576 --mesh fsdp=1,sequence=16 "
        f"--topology v5p:2x2x4 {_BATCH} 1 --compute remat=0.12"
    },
    "exposed": {
        f"Llama-3-8B, {batch} × 4,096": f"--recipe llama_fsdp {_DENSE8} 4096 --only_train_step --topology v5p:2x2x2 "
        f"{_BATCH} {batch}"
        for batch in (1, 2, 4)
    },
    "exposed_levers": {name: f"{_LAYERS8} v5p:2x2x2 --compiler_options '{flags}'" for name, flags in _LEVERS.items()},
    "exposed_64": {
        name: f"--recipe llama_fsdp {_DENSE70} {_64} {_BATCH} 2 --only_train_step {options}"
        for name, options in (
            ("exchanges", ""),
            ("reduce-scatters", "--compiler_options xla_tpu_enable_async_all_to_all=false"),
        )
    },
    "exposed_gathered": {
        name: f"{options} --sequence_length 4096 --only_train_step {_BATCH} 1"
        for name, options in (
            (
                "4 layers of Llama-3-8B, v5p:2x2x2",
                "--recipe llama_fsdp --model @llama3_8b.json,num_hidden_layers=4,vocab_size=8192 --topology v5p:2x2x2 "
                "--compute remat=1.0",
            ),
            (
                "2 layers of Mixtral-8x7B, v5p:2x2x4",
                "--recipe mixtral_fsdp --model @mixtral_8x7b.json,num_hidden_layers=2 --topology v5p:2x2x4 "
                f"{_CAPACITY},remat=1.0",
            ),
        )
    },
    "exposed_layers": {topology: f"{_LAYERS8} {topology}" for topology in ("v5p:2x2x2", "v5e:4x4")},
    "exposed_small": {
        f"{topology}, {batch} × 4,096, {name}": f"{_LAYERS8} {topology} {_BATCH} {batch} {state} "
        f"--compiler_options xla_tpu_enable_async_all_to_all={flag}"
        for topology, state in (("v6e:2x4", ""), ("v5e:2x4", _BF16))
        for batch in (1, 2, 4)
        for name, flag in (("reduce-scatters", "false"), ("exchanges", "true"))
    },
    "mixers": {
        f"{name}, {length:,} tokens": f"--recipe auto --model {config},num_hidden_layers=1,"
        f"vocab_size=256 --sequence_length {length} --topology v5p:2x2x1 {_BATCH} 1"
        for name, config in _MIXERS.items()
        for length in (4096, 32768)
    },
}
