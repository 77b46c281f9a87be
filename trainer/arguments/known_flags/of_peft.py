"""Fields of peft's LoraConfig (0.21)."""

from shardwright.arguments.known_flags.entry import Cells, joined, listed, missing, ours, same, unneeded

PLACE = "the run writes it into the adapter's config itself"
PLAIN = ("an adapter is LoRA, DoRA or rsLoRA here", "--lora_r 16, with --use_dora or --use_rslora if wanted")
DATA_STARTS = missing("its factors come from the training data, in a pass before it", "--init_lora_weights pissa")
PARAMETERS = listed("lora_target", "experts' weights by their names")
TARGETS = listed("lora_target", at={"none": "all linear layers are adapted"})

ARGUMENTS: Cells = {
    **same("lora_dropout use_rslora use_dora lora_alpha"),
    "r": ours("lora_r"),
    "target_modules": TARGETS,
    "target_parameters": PARAMETERS,
    **{
        name: listed(name)
        for name in ("exclude_modules", "modules_to_save", "layers_to_transform", "trainable_token_indices")
    },
    **{name: ours(name, read=joined) for name in ("rank_pattern", "alpha_pattern")},
    "init_lora_weights": ours(
        "init_lora_weights",
        at={
            "false": ("factors that begin at random train nothing sooner", "--init_lora_weights true"),
            "eva": missing(DATA_STARTS.why, "--adapter with the folder of PEFT's own start"),
            "corda lora_ga": DATA_STARTS,
            "loftq orthogonal": ("factors don't begin so here", "--init_lora_weights pissa or olora"),
        },
    ),
    "task_type": unneeded(
        "",
        at={
            "causal_lm": PLACE,
            "none": PLACE,
            "seq_cls": ("models are causal language models", "--objective reward"),
        },
    ),
    "peft_type auto_mapping peft_version base_model_name_or_path revision inference_mode runtime_config": PLACE,
    "layers_pattern": "layers are found by themselves",
    "fan_in_fan_out": "a weight's shape says it",
    "bias": missing(
        "biases are frozen with the rest",
        "--modules_to_save, which trains whole modules",
        at={"none": "biases are frozen with the rest"},
    ),
    "lora_bias": PLAIN,
    "megatron_config megatron_core": "the recipe lays factors out over the devices",
    "loftq_config": ("a base is stored in few bits as it is", "--base_dtype nf4 --init_lora_weights pissa"),
    "eva_config corda_config lora_ga_config": DATA_STARTS,
    "velora_config monteclora_config arrow_config kasa_config use_bdlora use_qalora": PLAIN,
    "alora_invocation_tokens": PLAIN,
    "layer_replication": ("a model is trained with its own layers", "a checkpoint that has them"),
    "qalora_group_size": "it says something of QALoRA alone",
    "ensure_weight_tying": "tied weights stay tied",
}
