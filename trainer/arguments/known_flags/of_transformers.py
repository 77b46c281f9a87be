"""Arguments of transformers' TrainingArguments (5.23), those that older versions had, and those of its examples."""

from shardwright import optimizers
from shardwright.arguments.known_flags.entry import (
    DEFAULT,
    Cells,
    Entry,
    fills,
    listed,
    missing,
    ours,
    renamed,
    same,
    sets,
    share,
    table,
    unneeded,
)


def _in_16_bits(optim: str) -> Entry:
    why, instead = "no optimizer here keeps its state in 8 bits", f"--optim {optim} --optimizer_dtype bfloat16, in 16"
    return missing(why, instead, optim=optim, optimizer_dtype="bfloat16")


_OPTIMIZERS: Cells = {
    (
        "adamw_torch adamw_torch_fused adamw_torch_xla adamw_torch_npu_fused adamw_hf adamw_apex_fused "
        "paged_adamw_32bit paged_adamw adamw"
    ): sets("the same update", optim="adamw"),
    "adamw_bnb_8bit adamw_8bit paged_adamw_8bit adamw_torch_8bit adamw_torch_4bit": _in_16_bits("adamw"),
    "lion_32bit paged_lion_32bit": sets("the same update", optim="lion"),
    "lion_8bit paged_lion_8bit": _in_16_bits("lion"),
    (
        "ademamix ademamix_8bit paged_ademamix_32bit paged_ademamix_8bit sgd adagrad adamw_anyprecision rmsprop "
        "rmsprop_bnb rmsprop_bnb_8bit rmsprop_bnb_32bit galore_adamw galore_adamw_8bit galore_adafactor "
        "galore_adamw_layerwise galore_adamw_8bit_layerwise galore_adafactor_layerwise lomo adalomo grokadamw "
        "schedule_free_radam schedule_free_adamw schedule_free_sgd apollo_adamw apollo_adamw_layerwise stable_adamw"
    ): missing(
        "there is no such optimizer here",
        "--optim adamw, adafactor, lion or muon; or a file of your own in trainer/optimizers/",
        optim="adamw",
    ),
}
# a file in trainer/optimizers/ may have one of these names
OPTIMIZERS = {name: entry for name, entry in table(_OPTIMIZERS).items() if name not in optimizers.OPTIMIZERS}
# why an argument is not needed; of a pair, why it is not to be had, and what to use
REMAT = "the recipe says what the backward computes again (--compute remat=full, or none)"
LAYOUT = "the recipe lays weights, gradients and optimizer state out over the devices (--recipe, --mesh)"
COMPILED = "each step is one program, compiled by XLA"
KERNELS = "the recipe chooses the step's kernels (--compute attention=…)"
LOADER = "rows are tokenised before training and read from disk; no loader has workers"
PROCESSES = "the devices are found by themselves"
HELD_OUT = "5 % are held out where the dataset has no held-out split; --eval_dataset names another"
METRICS = "metrics are summed on the devices, and no logits leave them"
DOWNLOAD = "the hub's client says where files are kept and who may read them (HF_HOME, HF_TOKEN)"
PUSH = ("a run writes to its output folder alone", "`hf upload NAME OUTPUT_DIR/model` afterwards, or push_to_hub()")
OF_PUSH = "it says something of push_to_hub alone"
WANDB = "trackers are told by their own environment variables"
NO_CODE = "models are transformers' own classes; code of a repository is not run"
COLUMNS = "the columns say which are read, and what is not read is counted"
FLOAT16 = missing("TPUs compute in bfloat16 or float32", "--bf16 true", bf16=True)
CACHED = "a cache of rows is known by what it was made of"
CPU = "without a TPU it takes the CPU (PJRT_DEVICE=CPU asks for it)"
EVALUATED = "an evaluation takes the micro-batches of the training, or smaller ones"
OF_LIKE_LENGTH = (
    "rows of packed samples are all of one length; with --packing false a batch holds samples of like length"
)
IN_8_BITS = sets("the frozen base in int8", base_dtype="int8")
IN_4_BITS = sets("the frozen base in NF4", base_dtype="nf4")
BITS = missing(
    "a frozen base has no such size",
    "--base_dtype nf4, int8, mxfp4 or bfloat16",
    at={"4": IN_4_BITS, "8": IN_8_BITS, "16": DEFAULT},
)
NF4_ALONE = missing(
    "no base is stored so",
    "--base_dtype nf4 or mxfp4",
    at={"nf4": "it is what --base_dtype nf4 means"},
    base_dtype="nf4",
)
SCALES = "NF4 takes 4.5 bits a weight, its scales too"
DTYPE: Cells = {
    "auto none": "weights are trained in --weight_dtype, and the recipe says what computes",
    "bfloat16 bf16": sets(bf16=True),
    "float16 fp16 half": FLOAT16,
    "float32 fp32": "weights are stored in float32",
}

ARGUMENTS: Cells = {
    **same(
        "output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate lr_scheduler_kwargs "
        "lr_scheduler_type warmup_steps optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon "
        "gradient_accumulation_steps max_grad_norm label_smoothing_factor bf16 neftune_noise_alpha logging_steps "
        "logging_first_step run_name project eval_steps eval_on_start save_steps save_total_limit "
        "load_best_model_at_end metric_for_best_model greater_is_better seed resume_from_checkpoint"
    ),
    "optim": ours("optim", at=OPTIMIZERS),
    "report_to": listed("report_to", at=dict.fromkeys(("", "[]"), sets(report_to="none"))),
    "eval_strategy": ours("eval_strategy", at={"false": sets(eval_strategy="no")}),
    "save_strategy": ours("save_strategy", at={"false": sets(save_strategy="no")}),
    "logging_strategy": unneeded(
        "lines come every --logging_steps",
        at={
            "epoch": ("lines come every so many steps", "--logging_steps N"),
            "no": ("a run has a log", "--logging_steps N"),
        },
    ),
    "average_tokens_across_devices": unneeded(
        "a step's loss is the mean over the tokens of all devices", at={"false": ("it always is", "nothing")}
    ),
    "optim_target_modules": ("there is no GaLore and no APOLLO here", "--lora_r 16, or --optim adafactor"),
    "fp16": FLOAT16,
    "fp16_full_eval": ("an evaluation computes as the training does", "--bf16 true"),
    "bf16_full_eval": "an evaluation computes as the training does",
    "tf32": "it is a format of NVIDIA's; --bf16 says what computes",
    (
        "gradient_checkpointing gradient_checkpointing_kwargs activation_checkpointing activation_checkpointing_kwargs"
    ): REMAT,
    "torch_compile torch_compile_backend torch_compile_mode": COMPILED,
    "use_liger_kernel liger_kernel_config": KERNELS,
    "use_cache": "training keeps no cache of keys and values",
    "torch_empty_cache_steps": "XLA plans the memory of a step when it compiles it",
    "auto_find_batch_size": (
        "a step that does not fit is not tried smaller",
        "scripts/compile.py, which says what fits before a device is used",
    ),
    "log_on_each_node log_level log_level_replica disable_tqdm": "the first host alone writes the log",
    "logging_nan_inf_filter": "a loss that is not finite ends the run",
    "include_num_input_tokens_seen": "the log has tokens a second",
    "trackio_space_id trackio_bucket_id trackio_static_space_id": WANDB,
    "eval_delay": ("evaluations begin with the first --eval_steps", "--eval_steps N --eval_on_start false"),
    "per_device_eval_batch_size": EVALUATED,
    (
        "prediction_loss_only eval_do_concat_batches eval_use_gather_object eval_accumulation_steps "
        "include_for_metrics batch_eval_metrics"
    ): METRICS,
    "save_only_model": "a checkpoint has all that a run needs to go on; OUTPUT_DIR/model is the model alone",
    "save_on_each_node": "each host writes its part into the one output folder",
    "enable_jit_checkpoint": "SIGTERM always saves",
    "push_to_hub": PUSH,
    "hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision": OF_PUSH,
    "ignore_data_skip": ("a run goes on with the batch that it would have had", "nothing"),
    "restore_callback_states_from_checkpoint": "callbacks' states always come back",
    "full_determinism": "the same program on the same devices gives the same numbers",
    "data_seed": ("one seed draws the weights and the order of the data", "--seed"),
    "use_cpu": CPU,
    "accelerator_config parallelism_config fsdp fsdp_config deepspeed": LAYOUT,
    "dataloader_drop_last": "every batch is full: an epoch's last rows go on into the next",
    (
        "dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor "
        "dataloader_multiprocessing_context dataloader_in_order"
    ): LOADER,
    "remove_unused_columns": COLUMNS,
    "label_names": ("a causal language model has one kind of label", "compute_loss_func= in Python"),
    "train_sampling_strategy": unneeded(
        OF_LIKE_LENGTH,
        at={
            "random": "the order is drawn anew for each epoch",
            "sequential": ("the order is drawn anew for each epoch", "--seed, which draws the same one again"),
        },
    ),
    "length_column_name": "lengths are counted in tokens",
    "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend": LAYOUT,
    "ddp_timeout": "--hang_timeout ends a run in which nothing moves",
    "debug": ("it is for GPUs and torch_xla's old data parallelism", "--profile_steps 10:13"),
    "skip_memory_metrics": "scripts/compile.py says what a step takes",
    "do_train": unneeded("scripts/train.py trains", at={"false": ("scripts/train.py trains", "scripts/evaluate.py")}),
    "do_eval": DEFAULT,
    "do_predict": ("a run trains", "Trainer.predict() in Python"),
    "local_rank": PROCESSES,
}

# arguments of earlier releases
OLDER: Cells = {
    "warmup_ratio": ours("warmup_steps", "a share of the steps", share),
    **renamed(evaluation_strategy="eval_strategy", per_gpu_train_batch_size="per_device_train_batch_size"),
    **same("overwrite_output_dir"),
    "logging_dir": "TensorBoard's files are in OUTPUT_DIR/runs",
    "no_cuda use_mps_device": CPU,
    "group_by_length": OF_LIKE_LENGTH,
    "per_gpu_eval_batch_size": EVALUATED,
    "fp16_opt_level fp16_backend half_precision_backend": "it is a setting of GPUs",
    "adafactor": sets(optim="adafactor"),
    "fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap sharded_ddp mp_parameters": LAYOUT,
    "torchdynamo jit_mode_eval use_ipex": COMPILED,
    "tpu_num_cores xpu_backend dispatch_batches split_batches ray_scope": PROCESSES,
    "tpu_metrics_debug": ("it is for torch_xla's old data parallelism", "--profile_steps 10:13"),
    "include_inputs_for_metrics eval_use_ipex past_index": METRICS,
    "include_tokens_per_second": "the log has tokens a second",
    "save_safetensors": "files of weights are safetensors",
    "push_to_hub_model_id push_to_hub_organization push_to_hub_token": OF_PUSH,
}

# arguments of transformers' examples/pytorch/language-modeling/run_clm.py, and of Alpaca's train.py
EXAMPLES: Cells = {
    "model_name_or_path model_id": ours("model"),
    "config_name": ours("model", "a config alone: random weights"),
    "tokenizer_name tokenizer_name_or_path": ours("tokenizer"),
    "use_fast_tokenizer": "tokenizers are the fast ones",
    "model_revision": ours("revision", at={"main none": DEFAULT}),
    "dataset_name train_dataset train_file data_path train_files": ours("dataset"),
    "dataset_config_name": ours("dataset", suffix=":", at={"none default": DEFAULT}),
    "validation_file eval_file test_file": ours("eval_dataset"),
    "max_train_samples": ours("max_samples"),
    "max_eval_samples": ("an evaluation counts rows, which hold several samples", "--max_eval_rows N"),
    "block_size model_max_length": ours("sequence_length"),
    "validation_split_percentage": HELD_OUT,
    "preprocessing_num_workers num_workers": LOADER,
    "overwrite_cache": CACHED,
    "keep_linebreaks": unneeded(
        "texts are tokenised as they are",
        at={"false": ("texts are tokenised as they are", "a dataset without them")},
    ),
    "torch_dtype dtype": unneeded("weights are stored in --weight_dtype", at=DTYPE),
    "low_cpu_mem_usage device_map": "weights are read a tensor at a time, onto the devices",
    "cache_dir use_auth_token token hf_token": DOWNLOAD,
    "trust_remote_code": NO_CODE,
    "config_overrides": ("a config is a file", "--model with the path of a config's .json"),
    "use_flash_attn use_flash_attention use_flash_attention_2": KERNELS,
    "attn_implementation": unneeded(
        "the recipe chooses the step's kernels",
        at={
            "eager": sets(compute="attention=eager"),
            "sdpa": "exact attention, in this package's kernel",
        },
    ),
    "use_lora": fills("LoRA with rank 8", lora_r=8),
    "lora_rank": ours("lora_r"),
    "q_lora": fills("LoRA over NF4", lora_r=8, base_dtype="nf4"),
    "bits": BITS,
    "double_quant": SCALES,
    "quant_type": NF4_ALONE,
    "wandb_project": WANDB,
}
