"""Names of transformers' and trl's trainers that this one has not, each with what takes its place.

Of transformers 5.23 (trainer.py) and trl 1.16 (trainer/*_trainer.py).
"""

from collections.abc import Iterable

from shardwright.errors import UserError, did_you_mean

_LOSS = "compute_loss_func=, which is traced into the step"
_BATCHES = "train_dataset= and eval_dataset=, in the order that --shuffle_rows false keeps; data_collator="
_OPTIMIZER = "TrainingArguments(optim=…, learning_rate=…), or a file of your own in trainer/optimizers/"
_RATES = "TrainingArguments(lr_scheduler_type=…, lr_scheduler_kwargs=…, warmup_steps=…)"
_METRICS = "compute_metrics=, which is traced into the evaluation"
_MESH = "recipe=, which says how the model is divided; TrainingArguments(mesh=…) for the sizes of its axes"
_LAYOUT = f"the devices are one mesh: {_MESH}"
_REMAT = "the recipe's Compute(remat=…)"
_SWEEP = "a Trainer for each set of values, each with an output_dir of its own"
_REFERENCE = (
    "nothing: the reference is the starting weights, whose log-probabilities are computed before the first step"
)
_ROUTER = "the recipe's Compute(router_loss=…); --router_balance_coef and --router_z_loss_coef"
_SET = "TrainingArguments({name}=…) sets it, and trainer.args has it"
_LENGTH = "TrainingArguments(sequence_length=…)"
_GIVEN_MODEL = "model= as a hub id or folder; --bf16, --weight_dtype and the recipe's Compute say the rest"

# attribute or method of their trainers → what takes its place; {name} is its name
ATTRIBUTES = {
    # the step
    "training_step": _LOSS,
    "compute_loss": _LOSS,
    "compute_loss_context_manager": _LOSS,
    "autocast_smart_context_manager": "--bf16, or the recipe's Compute(dtype=…)",
    "label_smoother": "TrainingArguments(label_smoothing_factor=…)",
    "neftune_hook_handle": "TrainingArguments(neftune_noise_alpha=…)",
    "neftune_noise_alpha": _SET,
    "model_wrapped": "trainer.model",
    "model_accepts_loss_kwargs": _LOSS,
    "loss_is_scaled_for_ga": "nothing: a loss is divided by num_items_in_batch, of all micro-batches together",
    "can_return_loss": _LOSS,
    "current_gradient_accumulation_steps": "trainer.args.gradient_accumulation_steps",
    "maybe_activation_offload_context": _REMAT,
    # batches
    "get_train_dataloader": _BATCHES,
    "get_eval_dataloader": _BATCHES,
    "get_test_dataloader": "predict(dataset)",
    "get_batch_samples": _BATCHES,
    "num_examples": "len(trainer.train_dataset)",
    "label_names": "records with labels, or data_collator=",
    "padding_free": "TrainingArguments(packing=True), the default",
    "chat_template": "processing_class=, whose chat template is used",
    "completion_only_loss": "TrainingArguments(train_on_prompt=…); without it the loss is on completions alone",
    # the optimizer
    "optimizer": _OPTIMIZER,
    "create_optimizer": f"--optim: {_OPTIMIZER}",
    "create_optimizer_and_scheduler": f"--optim: {_OPTIMIZER}",
    "get_optimizer_cls_and_kwargs": _OPTIMIZER,
    "get_optimizer_group": _OPTIMIZER,
    "get_decay_parameter_names": "TrainingArguments(weight_decay=…), which spares biases and norms",
    "create_scheduler": f"--lr_scheduler_type: {_RATES}",
    "get_learning_rates": "trainer.lr_scheduler.get_last_lr()",
    # evaluation
    "evaluation_loop": f"evaluate(dataset); {_METRICS}",
    "prediction_step": f"predict(dataset); {_METRICS}",
    "gather_function": _METRICS,
    # logs, and what is written
    "log": "a callback's on_log, which is told of each log entry; save_metrics() for a file of your own",
    "store_flos": "the log's mfu and tokens_per_second",
    "floating_point_ops": "the log's mfu and tokens_per_second",
    "current_flos": "the log's mfu and tokens_per_second",
    "model_preparation_time": "the first lines of a run, and its report.html",
    "metrics_format": "log_metrics()",
    "init_hf_repo": "push_to_hub(), which makes the repository if need be",
    "push_in_progress": "nothing: push_to_hub() returns once the hub has it",
    # the devices
    "create_accelerator_and_postprocess": _LAYOUT,
    "deepspeed": _LAYOUT,
    "is_deepspeed_enabled": _LAYOUT,
    "is_fsdp_enabled": _LAYOUT,
    "is_fsdp_xla_enabled": _LAYOUT,
    "is_fsdp_xla_v1_enabled": _LAYOUT,
    "is_fsdp_xla_v2_enabled": _LAYOUT,
    "is_model_parallel": _LAYOUT,
    "is_distributed_loading_by_transformers": _GIVEN_MODEL,
    "place_model_on_device": _LAYOUT,
    "get_cp_size": _LAYOUT,
    "get_sp_size": _LAYOUT,
    "get_tp_size": _LAYOUT,
    "get_total_train_batch_size": "trainer.loop.job.rows, of a step",
    "set_initial_training_values": "trainer.state.max_steps",
    "is_in_train": "a callback: on_train_begin and on_train_end",
    # searches
    "hyperparameter_search": _SWEEP,
    "hp_name": _SWEEP,
    "hp_search_backend": _SWEEP,
    "hp_space": _SWEEP,
    "compute_objective": _SWEEP,
    "objective": "trainer.args.objective; for a search, " + _SWEEP,
    "call_model_init": "model_init=, which is called once, when the Trainer is made",
    # trl's
    "ref_model": _REFERENCE,
    "precompute_ref_logps": _REFERENCE,
    "compute_ref_log_probs": _REFERENCE,
    "aux_loss_enabled": _ROUTER,
    "router_aux_loss_coef": _ROUTER,
    "beta": "trainer.args.beta",
    "label_smoothing": _SET,
    "loss_type": _SET,
    "loss_types": "TrainingArguments(loss_type=…) sets it, and trainer.args has it",
    "loss_weights": "one loss a run: TrainingArguments(loss_type=…)",
    "f_divergence_type": "the reverse KL divergence, which is --objective dpo's",
    "f_alpha_divergence_coef": "the reverse KL divergence, which is --objective dpo's",
    "ld_alpha": "--objective simpo, whose rewards do not grow with an answer's length",
    "use_weighting": "--objective dpo without weights of pairs",
    "calculate_KL": "nothing: --objective kto computes what its loss needs",
    "desirable_weight": _SET,
    "undesirable_weight": _SET,
}

# keyword of their constructors, now or in an earlier version → what takes its place
KEYWORDS = {
    "preprocess_logits_for_metrics": f"{_METRICS}, and sees the logits there",
    "ref_model": _REFERENCE,
    "model_kwargs": _GIVEN_MODEL,
    "model_init_kwargs": _GIVEN_MODEL,
    "ref_model_init_kwargs": _REFERENCE,
    "max_seq_length": _LENGTH,
    "max_length": _LENGTH,
    "max_prompt_length": f"{_LENGTH}, of prompt and answer together; --overflow says what becomes of longer ones",
    "max_target_length": _LENGTH,
    "dataset_text_field": "TrainingArguments(text_column=…)",
    "dataset_num_proc": "nothing: rows are made as fast as they are read, and cached",
    "dataset_batch_size": "nothing: rows are made as fast as they are read, and cached",
    "dataset_kwargs": "records of a shape that docs/data.md lists",
    "num_of_sequences": _LENGTH,
    "chars_per_token": _LENGTH,
    "infinite": "TrainingArguments(max_steps=…), which may go through the data several times",
    "eval_packing": "TrainingArguments(packing=…), for both",
    "neftune_noise_alpha": "TrainingArguments(neftune_noise_alpha=…)",
    "reward_processing_classes": "RewardTrainer, which learns rewards; no objective here samples answers",
    "reward_funcs": "RewardTrainer, which learns rewards; no objective here samples answers",
    "label_pad_token_id": "nothing: labels of -100 are not scored",
    "padding_value": "nothing: rows are packed, or padded without an effect on the loss",
    "precompute_ref_log_probs": _REFERENCE,
    "is_encoder_decoder": "a causal language model",
    "disable_dropout": "a config without dropout",
    "generate_during_eval": "TrainingArguments(sample_prompts=…)",
    "model_adapter_name": "peft_config=, or TrainingArguments(adapter=…)",
    "ref_adapter_name": _REFERENCE,
    "force_use_ref_model": _REFERENCE,
}

# parts of the names of further methods, for a class of one's own that has one → what takes their place
_PARTS = {
    "loss": _LOSS,
    "dataloader": _BATCHES,
    "sampler": "train_dataset= in the order wanted, with --shuffle_rows false",
    "optimizer": f"--optim: {_OPTIMIZER}",
    "scheduler": f"--lr_scheduler_type: {_RATES}",
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
