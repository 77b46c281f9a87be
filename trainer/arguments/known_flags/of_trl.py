"""Arguments of trl's trainers and scripts (1.16), and those of earlier releases and of the alignment handbook."""

from shardwright.arguments.known_flags.dataset_words import first_to_train_on, several
from shardwright.arguments.known_flags.entry import (
    BOTH_ANSWERS,
    DEFAULT,
    NOTHING,
    WITH_SFT,
    Cells,
    fills,
    listed,
    missing,
    ours,
    renamed,
    same,
    sets,
    table,
    unneeded,
)
from shardwright.arguments.known_flags.of_peft import PARAMETERS, PLACE, TARGETS
from shardwright.arguments.known_flags.of_transformers import (
    COLUMNS,
    EXAMPLES,
    HELD_OUT,
    IN_4_BITS,
    IN_8_BITS,
    KERNELS,
    LOADER,
    NF4_ALONE,
    NO_CODE,
    REMAT,
    SCALES,
)

_EXAMPLES = table(EXAMPLES)
ROWS = "rows are packed, or padded to a few fixed lengths, each compiled once"
OFFLOAD = missing("the recipe says what the backward keeps", "--compute remat=offload", compute="remat=offload")
REFERENCE = "what the starting weights say is computed once, before the first step"
OTHER_REFERENCE = missing("the reference is the starting weights", "--model, which is where the run starts")
_OF_REFERENCE: Cells = {
    "precompute_ref_log_probs precompute_ref_batch_size": REFERENCE,
    "sync_ref_model": missing(OTHER_REFERENCE.why, "nothing; each run is one reference"),
    "ref_model_mixup_alpha ref_model_sync_steps": "they say something of a moving reference alone",
}
ALIKE = ("each answer's tokens count alike", "--objective simpo, which takes their mean")
WITH_CHOSEN = ours(
    "loss_weights",
    "the likelihood of the chosen answer is added",
    lambda weight: f"1,{float(weight):g}",
    at={"none 0 0.0": NOTHING},
    fill=WITH_SFT,
)
NO_LOSS = ("there is no such loss here", "--loss_type sigmoid, or --objective dpo, ipo, orpo, simpo, kto")
RL = (
    "nothing is generated while a run trains: there is no GRPO and no PPO here",
    "--objective dpo or kto on answers ranked before",
)
SHUFFLED = "the order is drawn anew for each epoch"
CUT = missing(
    "a sample is cut at one of its ends",
    "--overflow truncate_right or truncate_left",
    at={
        "keep_start right": sets(overflow="truncate_right"),
        "keep_end left": sets(overflow="truncate_left"),
    },
)
NOT_CUT = sets("a sample longer than --sequence_length is an error", overflow="error")
FOR_BOTH = ours("sequence_length", BOTH_ANSWERS, at={"none": NOT_CUT})

COMMON: Cells = {
    "model_init_kwargs": ("a model is built from its config", "--model, --revision, --bf16, --compute attention=…"),
    "trust_remote_code": NO_CODE,
    "router_aux_loss_coef": (
        "the model's config has the coefficient",
        "--compute router_loss=true, which adds that loss",
    ),
    "dataset_num_proc": LOADER,
    "max_length": ours("sequence_length", at={"none": NOT_CUT}),
    **renamed(chat_template_path="chat_template"),
    "pad_to_multiple_of": ROWS,
    "activation_offloading": OFFLOAD,
    "pad_token": "padding is never learned",
    "eos_token": ("texts end with the tokenizer's own token", "--tokenizer, a folder whose token it is"),
    "disable_dropout": "dropout is what --lora_dropout (off in trl here) and the config say, none since Llama",
}

# the `datasets` of a YAML file: a mixture, each by its place and its share
MIXTURE: Cells = {
    "datasets": ours("dataset", "without fractions they are mixed by their sizes", several),
    "datasets.columns": "columns say what records are",
    **same("streaming"),
    "test_split_size": HELD_OUT,
}

SFT: Cells = {
    **COMMON,
    "dataset_text_field": ours("text_column", at={"text": "columns say what records are"}),
    "dataset_kwargs": missing(
        "records are read by their columns",
        "docs/data.md, which lists the shapes",
        at={"skip_prepare_dataset=true": COLUMNS},
    ),
    "truncation_mode": CUT,
    "shuffle_dataset": SHUFFLED,
    **same("packing"),
    "packing_strategy": unneeded(
        "rows are packed by best fit",
        at={"bfd_split wrapped": sets("what does not fit into a row goes on in another", overflow="split")},
    ),
    "padding_free": ROWS,
    "eval_packing": "--packing alone says whether samples share rows",
    "completion_only_loss": unneeded(
        "the loss is on completions",
        at={"true": DEFAULT, "false": sets("the prompt is learned too", train_on_prompt=True)},
    ),
    "assistant_only_loss": unneeded(
        "the loss is on the assistant's turns",
        at={"true": DEFAULT, "false": sets("all turns are learned", train_on_prompt=True)},
    ),
    "loss_type": ours(
        "loss_type",
        at={
            "nll chunked_nll": "it is the loss of --objective sft",
            "dft": ("there is no DFT here", "--objective sft"),
        },
    ),
}

DPO: Cells = {
    **COMMON,
    "max_length": FOR_BOTH,
    **_OF_REFERENCE,
    **same("beta label_smoothing f_divergence_type f_alpha_divergence_coef discopop_tau"),
    "truncation_mode": CUT,
    "padding_free": ROWS,
    "loss_type": listed(
        "loss_type",
        at={
            "sigmoid": "it is the loss of --objective dpo",
            "ipo": sets(objective="ipo"),
            "orpo": sets(objective="orpo"),
            "simpo": sets(objective="simpo"),
            "kto_pair": missing("KTO takes single answers here", "--objective kto", objective="kto"),
        },
    ),
    "loss_weights": listed("loss_weights"),
    "ld_alpha": ALIKE,
    "use_weighting": NO_LOSS,
}

KTO: Cells = {
    **COMMON,
    "max_length": FOR_BOTH,
    **_OF_REFERENCE,
    **same("beta desirable_weight undesirable_weight"),
    "loss_type": ours("loss_type", at={"kto": "it is the loss of --objective kto"}),
}

REWARD: Cells = {**COMMON, "max_length": FOR_BOTH, **same("center_rewards_coefficient")}

GRPO: Cells = {
    **COMMON,
    "shuffle_dataset": SHUFFLED,
    (
        "loss_type beta cast_lm_head_to_fp32 num_generations num_generations_eval max_completion_length "
        "ds3_gather_for_generation generation_batch_size steps_per_generation temperature top_p top_k min_p "
        "generation_kwargs chat_template_kwargs repetition_penalty cache_implementation use_vllm vllm_mode "
        "vllm_model_impl vllm_enable_sleep_mode vllm_structured_outputs_regex vllm_server_base_url vllm_server_host "
        "vllm_server_port vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization vllm_max_model_length "
        "vllm_tensor_parallel_size num_iterations epsilon delta epsilon_high sapo_temperature_neg sapo_temperature_pos "
        "vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg importance_sampling_level reward_weights "
        "multi_objective_aggregation scale_rewards mask_truncated_completions sync_ref_model ref_model_mixup_alpha "
        "ref_model_sync_steps top_entropy_quantile entropy_coef use_adaptive_entropy entropy_coef_min entropy_coef_max "
        "entropy_coef_delta entropy_target max_tool_calling_iterations vllm_importance_sampling_correction "
        "vllm_importance_sampling_mode vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min "
        "off_policy_mask_threshold use_bias_correction_kl log_completions log_multimodal num_completions_to_print "
        "log_unique_prompts log_completions_hub_repo use_transformers_continuous_batching "
        "transformers_continuous_batching_config use_transformers_paged vllm_importance_sampling_cap"
    ): RL,
}

# ScriptArguments and ModelConfig
SCRIPT: Cells = {
    "dataset_name": ours("dataset"),
    "dataset_config": _EXAMPLES["dataset_config_name"],
    "dataset_train_split": ours("dataset", suffix="#", at={"train": DEFAULT}),
    "dataset_test_split": missing(
        "of a dataset's splits `validation` or `test` is held out",
        "--eval_dataset with the path of the split's own files",
        at={"test validation": "it is held out where the dataset has it"},
    ),
    **renamed(dataset_streaming="streaming"),
    "ignore_bias_buffers": "no buffer is sent between devices",
}
MODEL: Cells = {
    **{name: _EXAMPLES[name] for name in ("model_name_or_path", "model_revision", "dtype", "attn_implementation")},
    "use_peft": fills(
        "LoRA with trl's rank, alpha and dropout, on PEFT's own targets of most models",
        lora_r=16,
        lora_alpha=32,
        lora_dropout=0.05,
        lora_target="q_proj,v_proj",
    ),
    **same("lora_r lora_alpha lora_dropout use_rslora use_dora"),
    "lora_target_modules": TARGETS,
    "lora_target_parameters": PARAMETERS,
    "lora_modules_to_save": listed("modules_to_save"),
    "lora_task_type": PLACE,
    "load_in_8bit": IN_8_BITS,
    "load_in_4bit": IN_4_BITS,
    "bnb_4bit_quant_type": NF4_ALONE,
    "use_bnb_nested_quant bnb_4bit_quant_storage": SCALES,
}

# earlier releases of trl, its experimental trainers, and the alignment handbook
OLDER: Cells = {
    **same("chat_template text_column simpo_gamma lmbda temperature"),
    **renamed(max_seq_length="sequence_length", eval_dataset_name="eval_dataset", teacher_model_name_or_path="teacher"),
    "max_prompt_length max_target_length max_completion_length": unneeded(
        "samples longer than --sequence_length are cut, counted and said (--overflow)"
    ),
    "gradient_checkpointing_use_reentrant": REMAT,
    "use_liger use_liger_loss use_unsloth": KERNELS,
    "num_proc dataset_batch_size": LOADER,
    "generate_during_eval": ("answers are sampled from a file of prompts", "--sample_prompts FILE"),
    "is_encoder_decoder": ("models are causal language models", "nothing"),
    "label_pad_token_id padding_value": "it is -100, as everywhere",
    "rpo_alpha": WITH_CHOSEN,
    "reference_free": NO_LOSS,
    "model_adapter_name ref_adapter_name force_use_ref_model": "an adapter is compared with itself as it was at first",
    "base_model_attribute_name": "the model is found by its class",
    "cpo_alpha": ("there is no CPO here", "--objective simpo or orpo"),
    "num_of_sequences": "rows are packed as the data are read",
    "chars_per_token": "tokens are counted",
    "dataset_mixer": ours("dataset", read=several),
    "dataset_splits": ours("dataset", suffix="#", read=first_to_train_on),
    "dataset_configs": ("a dataset's configuration stands behind its name", "--dataset id:configuration"),
    "auto_insert_empty_system_msg": "a conversation is rendered as it is",
    "clean_up_tokenization_spaces": "nothing is decoded in training",
    "truncation_side": CUT,
    "ref_model": OTHER_REFERENCE,
    "reward_model_path sft_model_path": RL,
}
