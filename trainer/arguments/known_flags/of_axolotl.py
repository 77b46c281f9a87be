"""Common keys of an axolotl YAML; what it passes on to transformers' Trainer by the same name is in that table."""

from shardwright.arguments.known_flags.dataset_words import held_out, known_roles, several, template
from shardwright.arguments.known_flags.entry import (
    DEFAULT,
    NOTHING,
    OURS,
    Cells,
    Entry,
    beta_alone,
    called,
    fills,
    joined,
    listed,
    missing,
    ours,
    padding_alone,
    renamed,
    same,
    sets,
    under,
    unneeded,
)
from shardwright.arguments.known_flags.of_llama_factory import BY_COLUMNS, NO_CONFIG, NO_FP8, NO_SYSTEM, STOPPED
from shardwright.arguments.known_flags.of_peft import ARGUMENTS as PEFT
from shardwright.arguments.known_flags.of_peft import PARAMETERS
from shardwright.arguments.known_flags.of_transformers import (
    CACHED,
    DOWNLOAD,
    EVALUATED,
    FLOAT16,
    HELD_OUT,
    IN_4_BITS,
    IN_8_BITS,
    KERNELS,
    LAYOUT,
    LOADER,
    OPTIMIZERS,
    PROCESSES,
    PUSH,
    REMAT,
    WANDB,
)
from shardwright.arguments.known_flags.of_trl import OFFLOAD, REFERENCE, RL, SHUFFLED, WITH_CHOSEN

PER_EPOCH = "steps are counted here: a share of an epoch is a number of steps"
TEMPLATE = ours(
    "chat_template",
    at={
        (
            "alpaca aya cohere command_a deepseek_v2 deepseek_v3 exaone exaone4 falcon_h1 gemma gemma3 gemma4 inst "
            "jamba llama3 llama3_2_vision llama4 llava metharme mistral_v1 mistral_v2v3 mistral_v3_tekken phi_3 phi_35 "
            "phi_4 pixtral qwen2_vl qwen3 qwen3_5 qwen_25"
        ): (
            "no such template ships; the tokenizer's own is used where it has one",
            "--chat_template with the hub id of a chat model that has it",
        ),
        "tokenizer_default": "the tokenizer's own is used",
        "tokenizer_default_fallback_chatml": "the tokenizer's own is used; a base model takes chatml by name",
        "jinja": "chat_template_jinja says which",
    },
)

ARGUMENTS: Cells = {
    # the model
    **renamed(base_model="model", tokenizer_config="tokenizer"),
    "base_model_config": "the config lies with the weights",
    "revision_of_model": ours("revision", at={"main": DEFAULT}),
    "model_type type_of_model tokenizer_type processor_type tokenizer_use_fast tokenizer_legacy strict": unneeded(
        "transformers' own classes are taken, by the model's config"
    ),
    "is_falcon_derived_model is_llama_derived_model is_mistral_derived_model is_qwen_derived_model": unneeded(
        "the config says the family"
    ),
    "overrides_of_model_config rope_scaling": NO_CONFIG,
    "hf_use_auth_token": DOWNLOAD,
    "special_tokens": Entry(OURS, read=padding_alone, why="padding is never learned"),
    "tokens added_tokens_overrides resize_token_embeddings_to_32x": (
        "a model is trained with the tokens that it has",
        "a tokenizer and a model that have them",
    ),
    "bos_token eos_token pad_token unk_token eot_tokens fix_untrained_tokens": "the tokenizer's own are used",
    # the data
    "datasets": ours("dataset", "several are mixed by their sizes", several),
    "test_datasets": ours("eval_dataset", read=held_out),
    "pretraining_dataset": ours(
        "dataset", "learned whole, as it is read", several, options={"streaming": True}, fill={"overflow": "split"}
    ),
    # further keys of an entry of these lists
    "datasets.type": missing(
        "no words are put around a record",
        "records with the columns messages, or prompt and completion, or instruction and output",
        at={
            "completion": fills("a long text is learned in pieces", overflow="split"),
            "alpaca chat_template chat_template.default sharegpt pretrain": BY_COLUMNS,
        },
    ),
    "datasets.ds_type": "a file's name says its kind",
    "datasets.trust_remote_code datasets.preprocess_shards": NOTHING,
    "datasets.shards datasets.shards_idx": ("a dataset is taken whole", "--max_samples"),
    "datasets.field datasets.text_column": ours("text_column", at={"text": NOTHING}),
    **{f"datasets.field_{name}": called(name) for name in ("messages", "system", "chosen", "rejected", "tools")},
    "datasets.message_field_role": under("role from"),
    "datasets.message_field_content": under("content value"),
    "datasets.message_field_training": under("train weight"),
    "datasets.message_property_mappings": under("role=role,content=content role=from,content=value"),
    "datasets.roles": Entry(OURS, read=known_roles, why="roles are read so"),
    "datasets.roles_to_train": missing(
        "the assistant's turns are learned",
        "--train_on_prompt true, or `train` in messages",
        at={"assistant gpt": DEFAULT},
    ),
    "datasets.train_on_eos datasets.train_on_eot": missing(
        "each turn is learned with the token that ends it", "nothing", at={"turn": DEFAULT}
    ),
    "datasets.chat_template": TEMPLATE,
    "dataset_prepared_path": CACHED,
    "dataset_processes dataset_num_proc dataset_keep_in_memory": LOADER,
    "shuffle_merged_datasets shuffle_before_merging_datasets": SHUFFLED,
    "push_dataset_to_hub": PUSH,
    "val_set_size": HELD_OUT,
    "dataset_exact_deduplication": ("records are trained on as often as they come", "data without doubles"),
    "chat_template": TEMPLATE,
    "chat_template_jinja": ours("chat_template", read=template),
    "default_system_message": NO_SYSTEM,
    **renamed(train_on_inputs="train_on_prompt", sample_packing="packing"),
    "sequence_len max_packed_sequence_len": ours("sequence_length"),
    "eval_sequence_len": "rows of an evaluation are as long as those of training",
    "excess_length_strategy": missing(
        "",
        "--overflow",
        at={
            "drop": sets(overflow="drop"),
            "truncate": sets(overflow="truncate_right"),
            "raise": sets(overflow="error"),
        },
    ),
    "min_sample_len": ("short samples are learned too", "data without them"),
    (
        "eval_sample_packing sample_packing_group_size sample_packing_bin_size sample_packing_sequentially "
        "sample_packing_eff_est multipack_real_batches batch_flattening pad_to_sequence_len "
        "pad_to_multiple_of total_num_tokens"
    ): "rows are packed by best fit, and packed samples never see each other",
    "group_by_length": "with --packing false a batch holds samples of like length",
    "curriculum_sampling": ("the order is drawn anew for each epoch", "nothing"),
    **same("streaming"),
    # the adapter
    "adapter": missing(
        "an adapter is LoRA here",
        "--lora_r 16",
        at={
            "lora": fills("LoRA", lora_r=8),
            "qlora": fills("LoRA over a frozen base in NF4", lora_r=8, base_dtype="nf4"),
        },
    ),
    **same("lora_r lora_alpha lora_dropout"),
    **renamed(lora_model_dir="adapter", peft_use_dora="use_dora", peft_use_rslora="use_rslora"),
    "lora_target_modules": listed("lora_target"),
    "lora_target_parameters": PARAMETERS,
    "lora_target_linear": sets("all linear layers", lora_target="all-linear"),
    "lora_modules_to_save": listed("modules_to_save"),
    "lora_rank_pattern": ours("rank_pattern", read=joined),
    "lora_alpha_pattern": ours("alpha_pattern", read=joined),
    "peft_layers_to_transform": listed("layers_to_transform"),
    "peft_init_lora_weights": PEFT["init_lora_weights"],
    "lora_fan_in_fan_out peft_layers_pattern peft_autocast_adapter_dtype": "a weight's shape says it",
    "lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel": KERNELS,
    "lora_on_cpu qlora_sharded_model_loading merge_lora merge_method": unneeded(
        "scripts/export.py --merge makes a plain model afterwards, a weight at a time"
    ),
    "loraplus_lr_ratio loraplus_lr_embedding embedding_lr embedding_lr_scale lr_groups": (
        "all weights have one learning rate",
        "--learning_rate",
    ),
    "relora relora_prune_ratio lisa_n_layers lisa_step_interval unfrozen_parameters": (
        "weights are trained whole or by LoRA",
        "--lora_r 16 --layers_to_transform 24:32",
    ),
    "load_in_4bit": IN_4_BITS,
    "load_in_8bit": IN_8_BITS,
    "gptq": "a quantized checkpoint is read as it is; --base_dtype same keeps its codes",
    "bnb_config_kwargs": "--base_dtype says how the frozen base is stored",
    # batches and steps
    **renamed(micro_batch_size="per_device_train_batch_size", num_epochs="num_train_epochs"),
    "batch_size": (
        "it is the micro-batch × devices × --gradient_accumulation_steps",
        "--gradient_accumulation_steps 1 --per_device_train_batch_size 1",
    ),
    "eval_batch_size": EVALUATED,
    "optimizer": ours("optim", at=OPTIMIZERS),
    "optim_args": ours("optim_args", read=joined),
    **renamed(lr_scheduler="lr_scheduler_type", bfloat16="bf16", wandb_name="run_name"),
    "cosine_min_lr_ratio": (
        "the scheduler has a name of its own",
        """--lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs '{"min_lr_rate": 0.1}'""",
    ),
    "cosine_constant_lr_ratio lr_quadratic_warmup lr_div_factor": (
        "there is no such scheduler here",
        "--lr_scheduler_type warmup_stable_decay",
    ),
    "adam_epsilon2": ("AdamW has one epsilon", "--adam_epsilon"),
    "adam_beta3": ("AdamW has two betas", "--adam_beta1, --adam_beta2"),
    # numbers
    "bf16": ours("bf16", at={"auto full": sets(bf16=True)}),
    "float16": FLOAT16,
    "float32": sets(bf16=False),
    "fp8": NO_FP8,
    "activation_offloading": OFFLOAD,
    "gradient_checkpointing": unneeded(REMAT, at={"offload": OFFLOAD}),
    "selective_checkpointing layer_offloading": REMAT,
    (
        "flash_attention xformers_attention sdp_attention flex_attention sage_attention eager_attention "
        "flash_attn_cross_entropy flash_attn_rms_norm flash_attn_fuse_mlp flash_attn_fuse_qkv s2_attention "
        "flash_optimum plugins "
        "liger_rope liger_rms_norm liger_glu_activation liger_layer_norm liger_fused_linear_cross_entropy "
        "liger_cross_entropy cut_cross_entropy chunked_cross_entropy experts_implementation tiled_mlp "
        "use_kernels unsloth_lora_mlp unsloth_lora_qkv unsloth_lora_o"
    ): KERNELS,
    # devices
    "fsdp_version fsdp_final_state_dict_type dp_shard_size dp_replicate_size tensor_parallel_size deepcompile": LAYOUT,
    "sequence_parallel_degree context_parallel_size": (
        "tokens of a row are split by an axis of the mesh",
        "--mesh sequence=4",
    ),
    "heads_k_stride ring_attn_func": KERNELS,
    "device world_size ddp max_memory gpu_memory_limit use_ray ray_num_workers": PROCESSES,
    # evaluations, logs, checkpoints
    "eval_steps": ours("eval_steps", fill={"eval_strategy": "steps"}),
    "evals_per_epoch": missing(
        PER_EPOCH,
        "--eval_strategy steps --eval_steps N",
        eval_strategy="epoch",
        at={"1": sets(eval_strategy="epoch")},
    ),
    "saves_per_epoch": missing(
        PER_EPOCH,
        "--save_strategy steps --save_steps N",
        save_strategy="epoch",
        at={"1": sets(save_strategy="epoch")},
    ),
    "eval_table_size": ("answers are sampled from a file of prompts", "--sample_prompts FILE"),
    "eval_max_new_tokens": "--sample_tokens says it",
    "do_causal_lm_eval do_bench_eval eval_causal_lm_metrics": (
        "tasks are measured by another command",
        "scripts/evaluate.py",
    ),
    "early_stopping_patience": STOPPED,
    "loss_watchdog_threshold loss_watchdog_patience": (
        "spikes are judged against the last steps",
        "--on_spike stop",
    ),
    "debug": NOTHING,
    "auto_resume_from_checkpoints": sets(resume_from_checkpoint="latest"),
    "gc_steps save_first_step profiler_steps_start include_tkps tokenizer_save_jinja_files": "the run looks after it",
    "profiler_steps": ("steps are named", "--profile_steps 10:13"),
    "wandb_project": fills("wandb; the project is WANDB_PROJECT", report_to="wandb"),
    (
        "wandb_entity wandb_watch wandb_run_id wandb_log_model wandb_mode use_wandb mlflow_tracking_uri "
        "mlflow_experiment_name mlflow_run_name hf_mlflow_log_artifacts comet_project_name use_comet"
    ): WANDB,
    "use_tensorboard": sets(report_to="tensorboard"),
    "use_mlflow": sets(report_to="mlflow"),
    "hub_model_id": PUSH,
    # preferences
    "rl": missing(
        "there is no such objective here",
        "--objective dpo, ipo, orpo, simpo or kto",
        at={
            **{name: sets(objective=name) for name in ("dpo", "ipo", "orpo", "kto")},
            "simpo": sets(
                "the chosen answer's likelihood is not added, as by cpo_alpha (default 1)", objective="simpo"
            ),
            "grpo": RL,
        },
    ),
    "reward_model": sets(objective="reward"),
    "rl_beta dpo_beta orpo_alpha": ours("beta"),
    "dpo_loss_type": listed("loss_type"),
    **same("center_rewards_coefficient"),
    **renamed(
        dpo_label_smoothing="label_smoothing",
        noisy_embedding_alpha="neftune_noise_alpha",
        kto_desirable_weight="desirable_weight",
        kto_undesirable_weight="undesirable_weight",
    ),
    "rpo_alpha": WITH_CHOSEN,
    "precompute_ref_log_probs": REFERENCE,
    "trl": ours("beta", read=beta_alone),
    "vllm": RL,
}
