"""The rows of scripts/measure/tpu_tables.py: table → row → options of scripts/compile.py.

``@FILE,KEY=VALUE,…`` is a file of docs/configs with those entries changed; ``@prompts`` is a file of 16 prompts.
"""


def step(recipe: str, model: str, topology: str, batch: int, *more: str, length: int = 4096) -> str:
    """The options that compile a step of ``model``, a file of docs/configs: ``NAME``, or ``NAME,KEY=VALUE,…``."""
    name, _, changes = model.partition(",")
    config = f"@{name}.json,{changes}" if changes else f"docs/configs/{name}.json"
    where = f"--recipe {recipe} --model {config} --sequence_length {length} --topology {topology}"
    return " ".join([where, f"--per_device_train_batch_size {batch}", *more])


_MIXTRAL, _LLAMA70, _QWEN = "mixtral_8x7b", "llama3_70b", "qwen3_30b_a3b"
_MIXTRAL2, _MIXTRAL4 = f"{_MIXTRAL},num_hidden_layers=2", f"{_MIXTRAL},num_hidden_layers=4"
_LLAMA2 = "llama3_8b,num_hidden_layers=2"
LLAMA8 = f"{_LLAMA70},num_hidden_layers=32,hidden_size=4096,intermediate_size=14336,num_attention_heads=32"
_LAYER = (  # of Llama-3-8B's width
    f"{_LLAMA70},num_hidden_layers=1,hidden_size=4096,intermediate_size=4096,num_attention_heads=32,vocab_size=256,"
    "max_position_embeddings=131072"
)
_FOUR = "num_hidden_layers=4,vocab_size=8192"
_LAYERS8 = "llama3_8b,vocab_size=8192"
_V5P, _V5P8 = "v5p:4x4x4", "v5p:2x2x2"
_BF16 = "--weight_dtype bfloat16 --optimizer_dtype bfloat16"
_CAPACITY = "--compute experts=capacity,capacity_factor=1.25"
_CAPACITY2, _DROPLESS = "--compute experts=capacity,capacity_factor=2.0", "--compute experts=dropless"
_TRAIN = "--only_train_step"
_NEWER = "--libtpu 0.0.52"
_KEPT, _CAPACITY_KEPT = "--compute remat=1.0", f"{_CAPACITY},remat=1.0"
_LORA, _INT8, _SAME = "--lora_r 16", "--base_dtype int8", "--base_dtype same"
_ALL4, _ALL32 = (f"--mesh fsdp=1,expert={chips}" for chips in (4, 32))
_EXPERTS8, _EXPERTS4 = "--mesh fsdp=1,expert=8", "--mesh fsdp=2,expert=4"
_PLAIN = "--compute scan=False,remat=none"
_ONE_AXIS = "--mesh fsdp=64,inner=1"
_TORUS = "--mesh fsdp=16,inner=16"  # an axis for each dimension of a pod of v5e or v6e
_ASKED_FOR = "--objective dpo --sample_prompts @prompts"


def _flags(*flags: str) -> str:
    return f"--compiler_options '{' '.join(flags)}'"


# published flag sets, one by one, on top of torch_xla's own flags; `name=` takes back a flag of this trainer
_ALL_TO_ALL = "xla_tpu_enable_async_all_to_all="
_VMEM = "xla_tpu_scoped_vmem_limit_kib="
_FUSION = "xla_tpu_enable_async_collective_fusion"
_SPARSE_CORE = "xla_tpu_enable_sparse_core_collective_offload"
_SPARSE_CORES = f"{_SPARSE_CORE}_all_gather=true {_SPARSE_CORE}_reduce_scatter=true {_SPARSE_CORE}_all_reduce=true"
_REDUCE_SCATTER = f"xla_enable_async_reduce_scatter_fusion=true {_FUSION}_fuse_reduce_scatter=true"
_FLAGS = {
    "torch_xla's own": "",
    "asynchronous all-to-all": f"{_ALL_TO_ALL}true",
    "32 MiB of VMEM for a fusion": f"{_VMEM}32768",
    "80 MiB of VMEM for a fusion": f"{_VMEM}81920",
    "no latency hiding": "xla_tpu_enable_latency_hiding_scheduler=false",
    "no windowed einsum": "xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000",
    "async collective fusion": f"{_FUSION}=true {_FUSION}_fuse_all_gather=true {_FUSION}_multiple_steps=true "
    "xla_tpu_overlap_compute_collective_tc=true",
    "asynchronous reduce-scatter": _REDUCE_SCATTER,
    "collectives on the sparse cores": _SPARSE_CORES,
}
_SCATTERED = _flags(f"{_ALL_TO_ALL}false")
_NONE_OF_OURS = _flags(_ALL_TO_ALL, _VMEM)
_MIB80 = _flags(f"{_VMEM}81920")
# all gathers and reduce-scatters on the sparse cores, none fused into products
_BESIDE = _flags(f"{_FUSION}_fuse_all_gather=false", _SPARSE_CORES)

# models whose layers mix tokens by a recurrence → the config of one such layer alone, with a dense MLP; layer_types,
# which lists all layers of the model, is null, and then a config's first layer is of that kind
_MIXERS = {
    "Qwen3-Next-80B (gated delta rule)": "qwen3_next_80b_a3b,num_hidden_layers=1,decoder_sparse_step=2",
    "Kimi-Linear-48B (Kimi delta attention)": "kimi_linear_48b_a3b,num_hidden_layers=1,layer_types=null,pad_token_id=0",
    "Granite-4.0-H-Small (Mamba-2)": "granite_4_h_small,num_hidden_layers=1,layer_types=null,num_local_experts=0",
}


def _layouts(topology: str, batch: int) -> dict[str, str]:
    recipes = ("mixtral_ep", "mixtral_fsdp")
    return {f"{recipe}, {topology}": step(recipe, _MIXTRAL, topology, batch, _CAPACITY) for recipe in recipes}


def _flag_rows(topology: str, batch: int, *names: str) -> dict[str, str]:
    """Rows for one step with torch_xla's own flags, with each named set added, and with this trainer's."""
    ours = step("mixtral_ep", _MIXTRAL2, topology, batch, _CAPACITY)
    sets = {name: _FLAGS[name] for name in ("torch_xla's own", *names)}
    rows = {f"{topology}, {name}": f"{ours} {_flags(_ALL_TO_ALL, _VMEM, more)}" for name, more in sets.items()}
    return {**rows, f"{topology}, this trainer's": ours}


TABLES: dict[str, dict[str, str]] = {
    "anchor": {
        "dropless, bf16 state, 36 sequences": step("mixtral_fsdp", _MIXTRAL, _V5P, 36, _BF16),
        "dropless, 12": step("mixtral_ep", _MIXTRAL, _V5P, 12),
        "capacity 1.25, 12": step("mixtral_ep", _MIXTRAL, _V5P, 12, _CAPACITY),
        "capacity 1.25, 12, torch_xla's flags": step("mixtral_ep", _MIXTRAL, _V5P, 12, _CAPACITY, _NONE_OF_OURS),
    },
    "libtpu": {  # both compilers, and the generation that the newer alone knows, two devices a chip
        f"{name}, {shape(chip)}, {version}": step(
            recipe, model, shape(chip), batch, _TRAIN, *more, f"--libtpu {version}"
        )
        for name, recipe, model, batch, shape, *more in (
            ("Llama-3-8B, 2", "llama_fsdp", "llama3_8b", 2, "{}:2x2x2".format),
            ("Mixtral-8x7B, capacity 1.25, 12", "mixtral_ep", _MIXTRAL, 12, "{}:4x4x4".format, _CAPACITY),
            ("dropless, 12", "mixtral_ep", _MIXTRAL, 12, "{}:4x4x4".format),
            ("dropless, bf16 state, 36", "mixtral_fsdp", _MIXTRAL, 36, "{}:4x4x4".format, _BF16),
        )
        for chip, version in (("v5p", "0.0.21"), ("v5p", "0.0.52"), ("tpu7x", "0.0.52"))
    },
    "newer": {  # what defaults give with the newer compiler
        "Llama-3-8B, 2, v5p:2x2x2": step("llama_fsdp", "llama3_8b", _V5P8, 2, _TRAIN, _NEWER),
        "Llama-3-8B, 2, tpu7x:2x2x1": step("llama_fsdp", "llama3_8b", "tpu7x:2x2x1", 2, _TRAIN, _NEWER),
        "Mixtral-8x7B, 4, v5p:4x4x4": step("mixtral_ep", _MIXTRAL, _V5P, 4, _TRAIN, _NEWER),
        "8, v5p:4x4x4": step("mixtral_ep", _MIXTRAL, _V5P, 8, _TRAIN, _NEWER),
        "4, tpu7x:2x4x4": step("mixtral_ep", _MIXTRAL, "tpu7x:2x4x4", 4, _TRAIN, _NEWER),
        "experts gathered, remat 1.0": step("mixtral_fsdp", _MIXTRAL, _V5P, 4, _TRAIN, _NEWER, _KEPT),
        "experts gathered, remat 1.0, bf16 state": step(
            "mixtral_fsdp", _MIXTRAL, _V5P, 4, _TRAIN, _NEWER, _KEPT, _BF16
        ),
        "experts gathered, remat 0.8": step("mixtral_fsdp", _MIXTRAL, _V5P, 4, _TRAIN, _NEWER, "--compute remat=0.8"),
    },
    "levers": {
        "Llama-3-70B, 1 sequence, all kept (remat 1.0)": step("llama_fsdp", _LLAMA70, _V5P, 1, _KEPT, _TRAIN),
        "36 sequences, remat full, v5p:4x4x4": step("mixtral_fsdp", _MIXTRAL, _V5P, 36, _BF16, _TRAIN),
        "4, all kept (remat 1.0), v5p:4x4x4": step("mixtral_fsdp", _MIXTRAL, _V5P, 4, _BF16, _TRAIN, _KEPT),
        "4, all kept, sparse cores, v5p:4x4x4": step("mixtral_fsdp", _MIXTRAL, _V5P, 4, _BF16, _TRAIN, _KEPT, _BESIDE),
        **{
            f"experts spread, 2 sequences, {name}, v5p:4x4x4": step("mixtral_ep", _MIXTRAL, _V5P, 2, _TRAIN, remat)
            for name, remat in (("remat full", "--compute remat=full"), ("all kept (remat 1.0)", _KEPT))
        },
        "4 layers, capacity 2.0, v6e:8x8": step("mixtral_ep", _MIXTRAL4, "v6e:8x8", 2, _TRAIN, _CAPACITY2),
        "4 layers, dropless, v6e:8x8": step("mixtral_ep", _MIXTRAL4, "v6e:8x8", 2, _TRAIN, _DROPLESS),
        "4 layers, dropless, 80 MiB, v6e:8x8": step("mixtral_ep", _MIXTRAL4, "v6e:8x8", 2, _TRAIN, _DROPLESS, _MIB80),
    },
    "levers_v6e": {
        name: step(recipe, _MIXTRAL4, "v6e:8x8", 2, _TRAIN, *more)
        for name, recipe, *more in (
            ("an all-to-all runs alone", "mixtral_ep", _flags(_ALL_TO_ALL)),
            ("all kept (remat 1.0)", "mixtral_ep", _KEPT),
            ("layer by layer, nothing computed again", "mixtral_ep", _PLAIN),
            ("the same, 80 MiB", "mixtral_ep", _PLAIN, _MIB80),
            ("a mesh axis for each dimension of the torus", "mixtral_ep", "--mesh fsdp=8,expert=8"),
            ("no token crosses, all weights do (mixtral_fsdp)", "mixtral_fsdp", "--mesh fsdp=8,inner=8"),
            ("the same on the sparse cores", "mixtral_fsdp", "--mesh fsdp=8,inner=8", _BESIDE),
        )
    },
    "pod_v6e": {
        name: step(recipe, model, "v6e:16x16", batch, _TRAIN, *more)
        for name, recipe, model, batch, *more in (
            ("4 layers, 2 sequences, experts spread", "mixtral_ep", _MIXTRAL4, 2),
            ("8 sequences, experts spread", "mixtral_ep", _MIXTRAL, 8),
            ("8 sequences, experts gathered", "mixtral_fsdp", _MIXTRAL, 8, _TORUS),
            ("8 sequences, experts gathered, 80 MiB", "mixtral_fsdp", _MIXTRAL, 8, _TORUS, _MIB80),
            ("8 sequences, experts gathered on the sparse cores", "mixtral_fsdp", _MIXTRAL, 8, _TORUS, _BESIDE),
        )
    },
    "layouts_v5p": _layouts(_V5P, 4)
    | {
        "mixtral_ep_tp, v5p:4x4x4": step("mixtral_ep_tp", _MIXTRAL, _V5P, 4, _CAPACITY),
        "one axis for all (naive), v5p:4x4x4": step("mixtral_fsdp", _MIXTRAL, _V5P, 4, _CAPACITY, _ONE_AXIS),
    },
    "layouts_v5e": _layouts("v5e:16x16", 1),
    "layouts_v6e": _layouts("v6e:16x16", 2),
    "remat": {
        f"mixtral_ep, remat {remat}": step("mixtral_ep", _MIXTRAL, _V5P, 4, f"{_CAPACITY},remat={remat}")
        for remat in ("full", "offload", "save_matmuls", "auto")
    }
    | {
        f"llama_fsdp, remat {remat}": step("llama_fsdp", _LLAMA70, _V5P, 2, f"--compute remat={remat}")
        for remat in ("full", "offload", "auto")
    },
    "remat_values": {
        f"{name}, remat {remat}": step(
            "llama_fsdp", f"{model},{_FOUR}", _V5P8, batch, _TRAIN, f"--compute remat={remat}"
        )
        for name, model, batch in (("Llama-3-8B, 4 ×", "llama3_8b", 4), ("Llama-3-70B, 2 ×", "llama3_70b", 2))
        for remat in ("full", "0.4")
    },
    "models": {
        "Llama-3-70B, llama_fsdp": step("llama_fsdp", _LLAMA70, _V5P, 2),
        "Llama-3-70B, llama_tp": step("llama_tp", _LLAMA70, _V5P, 2),
        "Qwen3-30B-A3B, mixtral_ep": step("mixtral_ep", _QWEN, _V5P, 4, _CAPACITY),
    },
    "families": {  # real models
        f"{name}, {recipe}, {topology}": step(recipe, config, topology, 1, _BF16, f"--mesh {mesh}")
        for name, config, recipe, topology, mesh in (
            ("Gemma-3-27B", "gemma3_27b", "gemma3_fsdp", "v5p:2x2x1", "fsdp=4"),
            ("Qwen3-Next-80B-A3B", "qwen3_next_80b_a3b", "qwen3_next_ep", _V5P8, "fsdp=2,expert=4"),
            ("GPT-OSS-120B", "gpt_oss_120b", "gpt_oss_ep", "v5p:2x2x4", "fsdp=4,expert=4"),
            ("Llama-4-Scout", "llama4_scout", "llama4_ep", "v5p:2x2x4", "fsdp=4,expert=4"),
            ("Qwen3-235B-A22B", "qwen3_235b_a22b", "qwen3_moe_ep", "v5p:2x4x4", "fsdp=8,expert=4"),
            ("GLM-4.5", "glm_4_5", "qwen3_moe_ep", "v5p:2x4x4", "fsdp=8,expert=4"),
            ("DeepSeek-V3", "deepseek_v3", "deepseek_v3_ep", _V5P, "fsdp=4,expert=16"),
        )
    },
    "experts": {
        "64 experts, fsdp=1,expert=8": step("mixtral_ep", f"{_QWEN},num_experts=64", _V5P8, 1, _BF16, _EXPERTS8),
        "128 experts, fsdp=2,expert=4": step("mixtral_ep", _QWEN, _V5P8, 1, _BF16, _EXPERTS4),
    },
    "lora": {
        f"capacity 1.25, {topology}": step("mixtral_ep", _MIXTRAL, topology, 1, _LORA, _CAPACITY)
        for topology in ("v5e:4x4", "v5e:2x4", "v6e:2x4", "v6e:2x2")
    }
    | {
        f"capacity 1.25, int8, {topology}": step("mixtral_ep", _MIXTRAL, topology, 1, _LORA, _CAPACITY, _INT8)
        for topology in ("v5e:2x2", "v6e:2x2")
    }
    | {
        "dropless, v5e:2x4": step("mixtral_ep", _MIXTRAL, "v5e:2x4", 1, _LORA, _TRAIN),
        "dropless, v6e:2x2": step("mixtral_ep", _MIXTRAL, "v6e:2x2", 1, _LORA),
    },
    "lora_published": {  # frozen models as they are published: MXFP4, FP8 in blocks, INT4
        "gpt-oss-120b, v6e:2x2": step("gpt_oss_ep", "gpt_oss_120b", "v6e:2x2", 1, _LORA, _SAME, _ALL4),
        "DeepSeek-V3, v6e:4x8": step("deepseek_v3_ep", "deepseek_v3", "v6e:4x8", 1, _LORA, _SAME, _ALL32, _TRAIN),
        "Kimi-K2.5, v6e:4x8": step("deepseek_v3_ep", "kimi_k2_5", "v6e:4x8", 1, _LORA, _SAME, _ALL32, _TRAIN),
    },
    "graphs": {
        recipe: step(recipe, _MIXTRAL, _V5P, 4, _CAPACITY) for recipe in ("mixtral_ep", "mixtral_fsdp", "mixtral_ep_tp")
    }
    | {recipe: step(recipe, _LLAMA70, _V5P, 2) for recipe in ("llama_fsdp", "llama_tp")}
    | {"mixtral_ep, Qwen3-30B-A3B": step("mixtral_ep", _QWEN, _V5P, 4, _CAPACITY)},
    "graphs_asked_for": {"Llama-3-8B": step("llama_fsdp", LLAMA8, "v5e:4x4", 1, _ASKED_FOR, length=2048)},
    "depth": {
        f"{layers} layers": step("llama_fsdp", f"llama3_70b,num_hidden_layers={layers}", _V5P, 2)
        for layers in (4, 32, 80)
    },
    "large_slices": {
        "2 layers of Llama-3-8B, v5p:8x8x16": step("llama_fsdp", _LLAMA2, "v5p:8x8x16", 1, _TRAIN, length=2048),
        "5 layers of DeepSeek-V3, v5p:8x8x16": step(
            "deepseek_v3_ep", "deepseek_v3,num_hidden_layers=5,quantization_config=null", "v5p:8x8x16", 1, _TRAIN
        ),
        "Llama-3-70B, 4 × v6e:16x16": step("llama_fsdp", _LLAMA70, "v6e:16x16", 1, "--slices 4", _TRAIN),
    },
    "optimizers": {
        optim: step("llama_fsdp", "llama3_8b", _V5P8, 1, _TRAIN, f"--optim {optim}")
        for optim in ("adamw", "adafactor", "lion", "muon")
    },
    "flags": _flag_rows("v5p:2x2x4", 2, *(name for name in list(_FLAGS)[1:] if not name.startswith("80")))
    | _flag_rows("v5e:4x4", 1, "asynchronous all-to-all", "32 MiB of VMEM for a fusion")
    | _flag_rows(
        "v6e:4x4", 1, "asynchronous all-to-all", "80 MiB of VMEM for a fusion", "collectives on the sparse cores"
    ),
    "attention": {
        f"{length:,} tokens": step("llama_fsdp", _LAYER, "v5p:2x2x1", 1, length=length)
        for length in (4096, 32768, 131072)
    },
    "sequence": {
        f"{length:,} tokens, {topology}": step("llama_cp", "llama3_8b", topology, 1, *more, length=length)
        for length, topology, *more in (
            (131072, "v5p:2x2x1", "--mesh fsdp=1,sequence=4"),
            (1048576, "v5p:2x2x1", "--mesh fsdp=1,sequence=4", "--compute remat=offload"),
            (1048576, _V5P8, "--mesh fsdp=1,sequence=8", "--compute remat=offload"),
        )
    },
    "exposed": {
        f"Llama-3-8B, {batch} × 4,096": step("llama_fsdp", "llama3_8b", _V5P8, batch, _TRAIN) for batch in (1, 2, 4)
    },
    # other ways to hide a gradient's reduce-scatter
    "exposed_levers": {
        name: step("llama_fsdp", _LAYERS8, _V5P8, 1, _TRAIN, _flags(*flags))
        for name, *flags in (
            ("asynchronous reduce-scatter, by itself", "xla_enable_async_reduce_scatter_fusion=true"),
            ("the same, fused with what is computed", _REDUCE_SCATTER),
            ("collectives on the sparse cores, 16 MiB of VMEM for a fusion", _VMEM, _SPARSE_CORES),
            ("products and reduce-scatters in steps", "xla_tpu_reduce_scatter_collective_matmul_mode=post_spmd"),
        )
    },
    "exposed_64": {
        "exchanges": step("llama_fsdp", _LLAMA70, _V5P, 2, _TRAIN),
        "reduce-scatters": step("llama_fsdp", _LLAMA70, _V5P, 2, _TRAIN, _SCATTERED),
    },
    "exposed_gathered": {
        "4 layers of Llama-3-8B, v5p:2x2x2": step("llama_fsdp", f"llama3_8b,{_FOUR}", _V5P8, 1, _TRAIN, _KEPT),
        "2 layers of Mixtral-8x7B, v5p:2x2x4": step("mixtral_fsdp", _MIXTRAL2, "v5p:2x2x4", 1, _TRAIN, _CAPACITY_KEPT),
    },
    "exposed_layers": {topology: step("llama_fsdp", _LAYERS8, topology, 1, _TRAIN) for topology in (_V5P8, "v5e:4x4")},
    "exposed_small": {
        f"{topology}, {batch} × 4,096, {name}": step("llama_fsdp", _LAYERS8, topology, batch, _TRAIN, *more, flag)
        for topology, *more in (("v6e:2x4",), ("v5e:2x4", _BF16))
        for batch in (1, 2, 4)
        for name, flag in (("reduce-scatters", _SCATTERED), ("exchanges", _flags(f"{_ALL_TO_ALL}true")))
    },
    "mixers": {
        f"{name}, {length:,} tokens": step("auto", f"{layer},vocab_size=256", "v5p:2x2x1", 1, length=length)
        for name, layer in _MIXERS.items()
        for length in (4096, 32768)
    },
}
