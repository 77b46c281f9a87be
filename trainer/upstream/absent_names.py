"""Names of transformers' and trl's trainers that this one has not, each with what takes its place.

Of transformers 5.23 (trainer.py) and trl 1.16 (trainer/*_trainer.py).
"""

import re
from collections.abc import Iterable

import transformers

from shardwright.errors import UserError, did_you_mean

_LOSS = "compute_loss_func=, which is traced into the step"
_BATCHES = "train_dataset= and eval_dataset=; a stream keeps its order with --shuffle_rows 1; data_collator="
_OPTIMIZER = "--optim: TrainingArguments(optim=…, learning_rate=…), or a file of your own in trainer/optimizers/"
_RATES = "--lr_scheduler_type: TrainingArguments(lr_scheduler_type=…, lr_scheduler_kwargs=…, warmup_steps=…)"
_METRICS = "compute_metrics=, which is traced into the evaluation"
_MESH = "recipe=, which says how the model is divided; TrainingArguments(mesh=…) for the sizes of its axes"
_NEFTUNE = "TrainingArguments(neftune_noise_alpha=…)"
_SWEEP = "a Trainer for each set of values, each with an output_dir of its own"
_REFERENCE = (
    "nothing: the reference is the starting weights, whose log-probabilities are computed before the first step"
)
_ROUTER = "the recipe's Compute(router_loss=…); --router_balance_coef and --router_z_loss_coef"
_RECORDS = "train_dataset= with records of a shape that docs/data.md lists; formatting_func=; data_collator="
_LENGTH = "TrainingArguments(sequence_length=…)"
_GIVEN_MODEL = "model= as a hub id or folder; --bf16, --weight_dtype and the recipe's Compute say the rest"


def _each(names: str, text: str) -> dict[str, str]:
    """The same text for each of ``names``, with blanks between them."""
    return dict.fromkeys(names.split(), text)


# attribute or method of their trainers → what takes its place; {name} is its name
ATTRIBUTES = {
    # the step
    **_each("training_step compute_loss compute_loss_context_manager model_accepts_loss_kwargs can_return_loss", _LOSS),
    "autocast_smart_context_manager": "--bf16, or the recipe's Compute(dtype=…)",
    "label_smoother": "TrainingArguments(label_smoothing_factor=…)",
    "neftune_hook_handle": _NEFTUNE,
    "model_wrapped": "trainer.model",
    "loss_is_scaled_for_ga": "nothing: a loss is divided by num_items_in_batch, of all micro-batches together",
    "current_gradient_accumulation_steps": "trainer.args.gradient_accumulation_steps",
    "maybe_activation_offload_context": "the recipe's Compute(remat=…)",
    # batches
    **_each("get_train_dataloader get_eval_dataloader get_batch_samples", _BATCHES),
    "get_test_dataloader": "predict(dataset)",
    "num_examples": "len(trainer.train_dataset)",
    "label_names": "records with labels, or data_collator=",
    "padding_free": "TrainingArguments(packing=True), the default",
    "chat_template": "processing_class=, whose chat template is used",
    "completion_only_loss": "TrainingArguments(train_on_prompt=…); without it the loss is on completions alone",
    # the optimizer
    **_each(
        "optimizer create_optimizer create_optimizer_and_scheduler get_optimizer_cls_and_kwargs get_optimizer_group",
        _OPTIMIZER,
    ),
    "get_decay_parameter_names": "TrainingArguments(weight_decay=…), which spares biases and norms",
    "create_scheduler": _RATES,
    "get_learning_rates": "trainer.lr_scheduler.get_last_lr()",
    # evaluation
    "evaluation_loop": f"evaluate(dataset); {_METRICS}",
    "prediction_step": f"predict(dataset); {_METRICS}",
    "gather_function": _METRICS,
    # logs, and what is written
    "log": "a callback's on_log, which is told of each log entry; save_metrics() for a file of your own",
    **_each("store_flos floating_point_ops current_flos", "the log's mfu and tokens_per_second"),
    "model_preparation_time": "the first lines of a run, and its report.html",
    "metrics_format": "log_metrics()",
    "init_hf_repo": "push_to_hub(), which makes the repository if need be",
    "push_in_progress": "nothing: push_to_hub() returns once the hub has it",
    # the devices
    **_each(
        "create_accelerator_and_postprocess deepspeed is_deepspeed_enabled is_fsdp_enabled is_fsdp_xla_enabled "
        "is_fsdp_xla_v1_enabled is_fsdp_xla_v2_enabled is_model_parallel place_model_on_device get_cp_size get_sp_size "
        "get_tp_size",
        f"the devices are one mesh: {_MESH}",
    ),
    "is_distributed_loading_by_transformers": _GIVEN_MODEL,
    "get_total_train_batch_size": "trainer.loop.job.rows, of a step",
    "set_initial_training_values": "trainer.state.max_steps",
    "is_in_train": "a callback: on_train_begin and on_train_end",
    # searches
    **_each("hyperparameter_search hp_name hp_search_backend hp_space compute_objective", _SWEEP),
    "objective": "trainer.args.objective; for a search, " + _SWEEP,
    "call_model_init": "model_init=, which is called once, when the Trainer is made",
    # trl's
    **_each("ref_model precompute_ref_logps compute_ref_log_probs", _REFERENCE),
    **_each("aux_loss_enabled router_aux_loss_coef", _ROUTER),
    "beta": "trainer.args.beta",
    **_each(
        "neftune_noise_alpha label_smoothing loss_type loss_weights f_divergence_type f_alpha_divergence_coef "
        "desirable_weight undesirable_weight",
        "TrainingArguments({name}=…) sets it, and trainer.args has it",
    ),
    "loss_types": "TrainingArguments(loss_type=…) sets it, and trainer.args has it",
    "ld_alpha": "--objective simpo, whose rewards do not grow with an answer's length",
    "use_weighting": "--objective dpo without weights of pairs",
    "calculate_KL": "nothing: --objective kto computes what its loss needs",
}

# methods that trl's trainers call of themselves, now or in an earlier version, beside transformers'
TRLS_METHODS = {
    *("_compute_kl_logps", "_compute_loss", "_precompute_ref_logps", "_prepare_dataset", "concatenated_forward"),
    *("concatenated_inputs", "dpo_loss", "get_batch_logps", "get_batch_loss_metrics", "kto_loss", "process_row"),
    *("tokenize_row", "visualize_samples"),
}
# transformers' methods that nothing but a user's program calls, here as there
CALLED_BY_USERS = {"train", "predict", "push_to_hub", "add_callback"}

# keyword of their constructors, now or in an earlier version → what takes its place
KEYWORDS = {
    "preprocess_logits_for_metrics": f"{_METRICS}, and sees the logits there",
    **_each(
        "ref_model ref_model_init_kwargs precompute_ref_log_probs ref_adapter_name force_use_ref_model", _REFERENCE
    ),
    **_each("model_kwargs model_init_kwargs", _GIVEN_MODEL),
    **_each("max_seq_length max_length max_target_length num_of_sequences chars_per_token", _LENGTH),
    "max_prompt_length": f"{_LENGTH}, of prompt and answer together; --overflow says what becomes of longer ones",
    "dataset_text_field": "TrainingArguments(text_column=…)",
    **_each("dataset_num_proc dataset_batch_size", "nothing: rows are made as fast as they are read, and cached"),
    "dataset_kwargs": "records of a shape that docs/data.md lists",
    "infinite": "TrainingArguments(max_steps=…), which may go through the data several times",
    "eval_packing": "TrainingArguments(packing=…), for both",
    "neftune_noise_alpha": _NEFTUNE,
    **_each(
        "reward_processing_classes reward_funcs",
        "RewardTrainer, which learns rewards; no objective here samples answers",
    ),
    "label_pad_token_id": "nothing: labels of -100 are not scored",
    "padding_value": "nothing: rows are packed, or padded without an effect on the loss",
    "is_encoder_decoder": "a causal language model",
    "disable_dropout": "a config without dropout",
    "generate_during_eval": "TrainingArguments(sample_prompts=…)",
    "model_adapter_name": "peft_config=, or TrainingArguments(adapter=…)",
}

_RANKED = "DPOTrainer or KTOTrainer on answers ranked before: nothing is generated while a run trains"
_STUDENT = 'Trainer with TrainingArguments(objective="distill", teacher=…), on answers given'
# class of theirs, without Trainer, Config or TrainingArguments → what takes its place
CLASSES = {
    **_each("GRPO RLOO PPO PPOv2 OnlineDPO XPO NashMD AsyncGRPO", _RANKED),
    **_each("GKD Distillation MiniLLM", _STUDENT),
    **_each("ORPO", 'Trainer with TrainingArguments(objective="orpo")'),
    **_each("CPO", 'Trainer with TrainingArguments(objective="simpo"), or "orpo"'),
    **_each("BCO", 'KTOTrainer, of single answers; DPOConfig(loss_type="bco_pair"), of pairs'),
    **_each("PRM", "RewardTrainer, which learns a reward for a whole answer"),
    **_each("Seq2Seq", "Trainer and TrainingArguments, with a causal model; sample_prompts=… for its answers"),
}

# parts of the names of further methods, for a class of one's own that has one → what takes their place
_PARTS = {
    "loss": _LOSS,
    "dataloader": _BATCHES,
    "sampler": "train_dataset= as an IterableDataset in the order wanted, with --shuffle_rows 1",
    "optimizer": _OPTIMIZER,
    "scheduler": _RATES,
    "dataset": _RECORDS,
    "row": _RECORDS,
    "concatenated": _RECORDS,
    "log": "a callback's on_log",
    "eval": f"{_METRICS}; a callback's on_evaluate",
    "prediction": f"{_METRICS}; predict()",
    "save": "a callback's on_save; save_model() after train()",
}


class NotHere(UserError, AttributeError):
    """An attribute of transformers' or trl's trainers that this trainer has not: ``hasattr`` is False."""


def in_place_of(name: str) -> str | None:
    """The words on what stands for the attribute or method ``name`` of their trainers; None: it is none of them."""
    found = ATTRIBUTES.get(name) or next((text for part, text in _PARTS.items() if part in name), None)
    return found and found.format(name=name)


def is_theirs(name: str) -> bool:
    """Whether their trainers would use an attribute ``name`` that a program gives one, and this one never does."""
    if name.startswith("__") or name in CALLED_BY_USERS:
        return False
    return name in ATTRIBUTES or name in TRLS_METHODS or hasattr(transformers.Trainer, name)


def no_attribute(name: str, known: Iterable[str]) -> AttributeError:
    """The error of an attribute ``name`` that a trainer has not; ``known`` are those that it has."""
    if name.startswith("_") or name not in ATTRIBUTES:
        return AttributeError(f"a Trainer has no attribute {name!r}; {did_you_mean(name, known)}".rstrip("; "))
    return NotHere(
        asked=f"trainer.{name}",
        found="an attribute of transformers' or trl's trainers",
        why="here a step is one computation on a mesh, made of what the trainer is given",
        instead=ATTRIBUTES[name].format(name=name),
    )


def check_class(name: str) -> None:
    """Refuse the import of a class of theirs that is not here.

    It is an ImportError, since ``from shardwright import`` keeps nothing of an AttributeError.
    """
    kind = re.sub(r"(Trainer|TrainingArguments|Config)\Z", "", name)
    if kind in CLASSES:
        raise ImportError(f"shardwright has no {name}; instead: {CLASSES[kind]}", name=name)


def no_keyword(name: str, known: Iterable[str], options: Iterable[str]) -> UserError:
    """The error of a keyword that ``Trainer`` does not take.

    ``known`` are those that it takes, and ``options`` the names of TrainingArguments.
    """
    instead, found = KEYWORDS.get(name), "a keyword of transformers' or trl's trainers"
    if instead is None:
        found = "no keyword of Trainer"
        at = f"TrainingArguments({name}=…)" if name in {*options} else ""
        instead = at or f"{did_you_mean(name, known)}one of {', '.join(known)}"
    return UserError(
        asked=f"Trainer(…, {name}=…)",
        found=found,
        why="what a run does stands in its arguments, and the layout in its recipe",
        instead=instead,
    )
