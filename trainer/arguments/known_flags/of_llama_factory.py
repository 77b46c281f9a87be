"""Common arguments of LLaMA-Factory (its model, data and finetuning arguments); the rest are transformers' own."""

from shardwright.arguments.known_flags.dataset_words import held_out, only_one, several
from shardwright.arguments.known_flags.entry import (
    DEFAULT,
    NOTHING,
    Cells,
    called,
    fills,
    listed,
    missing,
    ours,
    renamed,
    same,
    sets,
    under,
    unneeded,
)
from shardwright.arguments.known_flags.of_transformers import (
    BITS,
    CACHED,
    DOWNLOAD,
    HELD_OUT,
    KERNELS,
    LOADER,
    NF4_ALONE,
    REMAT,
    SCALES,
    WANDB,
)
from shardwright.arguments.known_flags.of_trl import ALIKE, CUT, OTHER_REFERENCE, REFERENCE, RL, WITH_CHOSEN

NO_FREEZE = ("some layers alone are trained by an adapter of them", "--lora_r 16 --layers_to_transform 24:32")
NO_CONFIG = ("the model's config says it", "a config.json with it, in the folder of --model")
AS_IT_IS = "a conversation is rendered as it is"
NO_SYSTEM = missing(AS_IT_IS, "a first message of the role system in each record")
BY_COLUMNS = "records are recognised by their columns"
NO_FP8 = missing("no step computes in FP8", "--bf16 true", bf16=True)
STOPPED = ("a callback stops a run", "callbacks=[EarlyStoppingCallback(2)] in Python")
# keys of an entry of dataset_info.json, which a port puts in the place of its name: of columns → ours, of others → the
# names that are read here
_COLUMNS = {"prompt": "instruction", "query": "input", "response": "output", "kto_tag": "label"}
_COLUMNS |= {name: name for name in ("messages", "history", "system", "tools", "chosen", "rejected")}
_NAMES = {
    "tags.role_tag": "from role",
    "tags.content_tag": "value content",
    "tags.user_tag": "human user",
    "tags.assistant_tag": "gpt assistant",
    "tags.observation_tag": "observation tool",
    "tags.function_tag": "function_call",
    "tags.system_tag": "system",
}

ARGUMENTS: Cells = {
    # the model
    **renamed(train_from_scratch="from_scratch"),
    "adapter_name_or_path": ours("adapter", read=only_one),
    "create_new_adapter": ("a run trains one adapter", "scripts/export.py --merge, and --model with that"),
    "model_revision": ours("revision", at={"main": DEFAULT}),
    "hf_hub_token ms_hub_token om_hub_token": DOWNLOAD,
    "use_fast_tokenizer low_cpu_mem_usage print_param_status": "it is always so, and said",
    "resize_vocab add_tokens add_special_tokens new_special_tokens_config init_special_tokens": (
        "a model is trained with the tokens that it has",
        "a folder with the larger embedding, as --model",
    ),
    **same("split_special_tokens"),
    "flash_attn enable_liger_kernel use_unsloth use_v1_kernels": KERNELS,
    "use_unsloth_gc use_reentrant_gc": REMAT,
    "disable_gradient_checkpointing": sets(at={"false": REMAT}, compute="remat=none"),
    "shift_attn mixture_of_depths": ("a model is trained as its config has it", "--mesh sequence=4 for long rows"),
    "rope_scaling": NO_CONFIG,
    "upcast_layernorm upcast_lmhead_output": "norms and the loss are computed in float32",
    "moe_aux_loss_coef": ("the model's config has the coefficient", "--compute router_loss=true"),
    "quantization_bit": BITS,
    "quantization_method": missing(
        "a base is quantized as it is read",
        "--base_dtype nf4, int8, mxfp4",
        at={"bnb bitsandbytes": "--base_dtype says it"},
    ),
    "quantization_type": NF4_ALONE,
    "double_quantization quantization_device_map": SCALES,
    (
        "image_max_pixels image_min_pixels video_max_pixels video_min_pixels video_fps video_maxlen "
        "freeze_vision_tower freeze_multi_modal_projector"
    ): "a model's text part is what is trained",
    "freeze_language_model": ("a model's text part is what is trained", "nothing"),
    "export_dir export_size export_device export_legacy_format export_hub_model_id": unneeded(
        "OUTPUT_DIR/model is written as the hub has it; scripts/export.py writes other formats"
    ),
    "infer_backend infer_dtype offload_folder use_kv_cache": "a run trains",
    # the data
    "dataset": ours(
        "dataset", "a name that no dataset_info.json has is for you to replace by a file or hub id", several
    ),
    "eval_dataset": ours("eval_dataset", read=held_out),
    "dataset_dir": "--dataset takes files and hub ids; names in a dataset_info.json there are looked up",
    "dataset.formatting dataset.ranking": BY_COLUMNS,
    **{f"dataset.columns.{name}": called(column) for name, column in _COLUMNS.items()},
    **{f"dataset.{name}": under(names) for name, names in _NAMES.items()},
    "dataset.ms_hub_url dataset.om_hub_url dataset.script_url dataset.cloud_file_name dataset.load_from": (
        "datasets are files, or lie on the hub",
        "--dataset FILE_OR_ID",
    ),
    "dataset.folder": "it stands behind the id: --dataset id/FOLDER",
    "dataset.file_sha1": NOTHING,
    "dataset.mix_strategy dataset.interleave_probs": unneeded(
        "--dataset has the shares, here of the rows; an epoch ends once every dataset was gone through"
    ),
    "dataset.num_samples": ("a dataset is taken whole, or by its share of the rows", "--dataset a:0.7,b:0.3"),
    "template": unneeded(
        "a conversation is rendered with the tokenizer's own template",
        at={"chatml": sets(chat_template="chatml")},
    ),
    **renamed(cutoff_len="sequence_length", buffer_size="shuffle_rows"),
    **same("train_on_prompt streaming max_samples packing"),
    "neat_packing": sets(packing=True, isolate_documents=True),
    "mask_history": missing("each answer of a conversation is learned", "--train_on last", train_on="last"),
    "mix_strategy interleave_probs": missing(
        "shares are said with the datasets, as a port of the file writes them",
        "--dataset a.jsonl:0.7,b.jsonl:0.3",
        at={"concat": DEFAULT},
    ),
    "tokenized_path data_shared_file_system": CACHED,
    "preprocessing_batch_size": LOADER,
    "ignore_pad_token_for_loss": "padding is never learned",
    "val_size": HELD_OUT,
    "eval_on_each_dataset": ("sets are evaluated by their names", "--eval_dataset chat=a.jsonl,code=b.jsonl"),
    "tool_format": "the tokenizer's template writes tools",
    "default_system": NO_SYSTEM,
    "enable_thinking": unneeded(AS_IT_IS),
    "preserve_thinking": "--train_on says of which turns the reasoning is learned",
    # what is trained, and how
    "stage": missing(
        "there is no such objective here",
        "--objective sft, dpo, ipo, orpo, simpo, kto or reward",
        at={
            "sft": sets(objective="sft"),
            "pt": fills("texts, joined and learned whole", objective="sft", packing=True),
            "dpo": fills(objective="dpo"),
            "kto": sets(objective="kto"),
            "rm": sets(objective="reward"),
            "ppo": RL,
        },
    ),
    "finetuning_type": missing(
        "weights are trained whole or by LoRA",
        "--lora_r 8, or no such option",
        at={
            "full": DEFAULT,
            "lora": fills("LoRA with LLaMA-Factory's own rank", lora_r=8),
            "freeze": NO_FREEZE,
        },
    ),
    **same("lora_alpha lora_dropout use_rslora use_dora"),
    "lora_target": listed("lora_target", at={"all": sets("all linear layers", lora_target="all-linear")}),
    "additional_target": listed("modules_to_save"),
    "pissa_init": sets(init_lora_weights="pissa"),
    "pissa_iter pissa_convert": unneeded(
        "--init_lora_weights pissa_niter_16 says the first; an adapter is written as PEFT reads it"
    ),
    "loraplus_lr_ratio loraplus_lr_embedding": ("all factors have one learning rate", "--learning_rate"),
    "freeze_trainable_layers freeze_trainable_modules freeze_extra_modules use_llama_pro": NO_FREEZE,
    **renamed(
        pref_beta="beta",
        dpo_label_smoothing="label_smoothing",
        kto_chosen_weight="desirable_weight",
        kto_rejected_weight="undesirable_weight",
    ),
    "pref_loss": missing(
        "there is no such loss here",
        "--objective dpo, ipo, orpo, simpo or kto",
        at={
            "sigmoid": sets(objective="dpo"),
            "hinge": sets(objective="dpo", loss_type="hinge"),
            **{name: sets(objective=name) for name in ("ipo", "orpo", "simpo")},
        },
    ),
    "pref_ftx": WITH_CHOSEN,
    "pref_bco_weight": ("there is no BCO here", "--objective dpo"),
    **same("simpo_gamma"),
    "ref_model": OTHER_REFERENCE,
    "ref_model_adapters ref_model_quantization_bit": REFERENCE,
    (
        "ppo_buffer_size ppo_epochs ppo_score_norm ppo_target ppo_whiten_rewards reward_model reward_model_adapters "
        "reward_model_quantization_bit reward_model_type"
    ): RL,
    "ld_alpha": ALIKE,
    (
        "use_galore galore_target galore_rank galore_update_interval galore_scale use_apollo apollo_target apollo_rank "
        "use_badam badam_mode use_adam_mini"
    ): ("there is no GaLore, APOLLO or BAdam here", "--lora_r 16, or --optim adafactor"),
    "use_muon": sets(optim="muon"),
    "pure_bf16": sets("weights in bfloat16", bf16=True, weight_dtype="bfloat16"),
    "use_dft_loss use_asft_loss use_eaft_loss": ("there is no such loss here", "--objective sft"),
    "swanlab_project swanlab_workspace swanlab_run_name swanlab_mode swanlab_api_key": WANDB,
    "use_swanlab": sets(report_to="swanlab"),
    "compute_accuracy": "an evaluation has the share of tokens guessed right",
    "disable_shuffling": ("the order is drawn anew for each epoch", "--seed, which draws the same one again"),
    "early_stopping_steps": STOPPED,
    "plot_loss": "the curve is in OUTPUT_DIR/report.html",
    "include_effective_tokens_per_second": "the log has tokens a second",
    "ray_num_workers ray_init_kwargs ray_run_name ray_storage_path resources_per_worker placement_strategy": unneeded(
        "scripts/launch.py ray starts a run on Ray"
    ),
    "truncation_side": CUT,
    "do_sample temperature top_p top_k num_beams max_new_tokens repetition_penalty predict_with_generate": unneeded(
        "--sample_temperature and --sample_top_p say how sample answers are drawn"
    ),
    "fp8": NO_FP8,
}
