"""Defaults of other trainers that decide which numbers come out, and are others than ours; a port writes them down."""

from typing import Any

_TRAINER = {"num_train_epochs": 3.0, "per_device_train_batch_size": 8, "learning_rate": 5e-5, "warmup_steps": 0}
# two answers share a row, and each may have 1024 tokens
_PAIRS = {**_TRAINER, "learning_rate": 1e-6, "sequence_length": 2048, "packing": False}
# program, as the table names it → our options that mean its defaults
DEFAULTS: dict[str, dict[str, Any]] = {
    "transformers": _TRAINER,
    "trl sft": {**_TRAINER, "learning_rate": 2e-5, "sequence_length": 1024, "packing": False},
    "trl dpo": _PAIRS,
    "trl kto": _PAIRS,
    "trl reward": {**_PAIRS, "learning_rate": 1e-4},
    "trl grpo": {},
    "llamafactory": {**_TRAINER, "sequence_length": 2048, "packing": False},
    "axolotl": {
        "num_train_epochs": 1.0,
        "sequence_length": 512,
        "overflow": "drop",
        "packing": False,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0.03,  # and 100 steps at most
    },
}
# programs whose length is that of each answer, in the same words as that of a text; two answers share a row here
PER_ANSWER = ("llamafactory", "axolotl")
# the arguments without which a program trains all weights, whatever else is said of an adapter → their values for one
ADAPTED_BY: dict[str, tuple[str, tuple[str, ...]]] = {
    **{f"trl {name}": ("use_peft", ("true", "yes", "1")) for name in ("sft", "dpo", "kto", "reward", "grpo")},
    "llamafactory": ("finetuning_type", ("lora",)),
    "axolotl": ("adapter", ("lora", "qlora")),
}
