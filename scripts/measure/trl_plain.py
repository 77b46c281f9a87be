"""trl's trainers on the plain CPU, in a process without torch_xla: the losses of given batches, one by one.

python scripts/measure/trl_plain.py train FOLDER    FOLDER/batches.json through trl; FOLDER/losses.json
python scripts/measure/trl_plain.py train64 FOLDER  the same in float64

`trl_parity.py` calls it. FOLDER/case.json says what is trained, and how.
"""

import importlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ["USE_TORCH_XLA"] = "0"  # accelerate would take the virtual devices
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils.data import DataLoader
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
)

from shardwright.scripts.measure.tables import byte_tokenizer

OPTIONS: dict[str, Any] = {"optim": "adamw_torch", "bf16": False, "use_cpu": True, "gradient_checkpointing": False}
OPTIONS |= {"report_to": "none", "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True}
OPTIONS |= {"remove_unused_columns": False}
# objective → module, trainer, and options of its config
TRAINERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "sft": ("trl", "SFT", {"max_length": None}),
    "dpo": ("trl", "DPO", {"max_length": None, "loss_type": "sigmoid"}),
    "ipo": ("trl", "DPO", {"max_length": None, "loss_type": "ipo"}),
    "kto": ("trl", "KTO", {"max_length": None}),
    "reward": ("trl", "Reward", {"max_length": None}),
    "orpo": ("trl.experimental.orpo", "ORPO", {"max_length": 128}),
    "distill": ("trl.experimental.gkd", "GKD", {"max_length": None, "lmbda": 0.0}),
    "simpo": ("trl.experimental.cpo", "CPO", {"max_length": 128, "loss_type": "simpo", "cpo_alpha": 0.0}),
}


def _kind(case: Mapping[str, Any]) -> tuple[Any, str]:
    """The class of the model, and PEFT's word for its task."""
    scores = case["objective"] == "reward"
    return (AutoModelForSequenceClassification, "SEQ_CLS") if scores else (AutoModelForCausalLM, "CAUSAL_LM")


def write_start(folder: Path, case: Mapping[str, Any]) -> None:
    """Write the start of both sides: weights, a tokenizer of bytes, and PEFT's own initial factors."""
    tokenizer = byte_tokenizer(["<end>", "<pad>"])
    tokenizer.eos_token, tokenizer.pad_token = "<end>", "<pad>"
    tokenizer.save_pretrained(folder / "model")
    if "teacher" in case:
        _drawn(AutoModelForCausalLM, case["teacher"], seed=1, width=1.6).save_pretrained(folder / "teacher")
        tokenizer.save_pretrained(folder / "teacher")
    kind, task = _kind(case)
    model = _drawn(kind, case["config"], seed=0, width=0.8)
    model.save_pretrained(folder / "model")
    if case["lora"]:
        get_peft_model(model, LoraConfig(task_type=task, **case["lora"])).save_pretrained(str(folder / "adapter"))


def _drawn(kind: Any, config: dict[str, Any], seed: int, width: float) -> Any:
    """A model of random weights, so wide that attention and experts are far from uniform."""
    torch.manual_seed(seed)
    sizes = AutoConfig.for_model(**config)
    sizes.num_labels = 1  # of a reward model; no other has labels
    model = kind.from_config(sizes, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=width * parameter.shape[-1] ** -0.5)
    return model


def train(folder: Path, case: dict[str, Any], dtype: torch.dtype) -> list[dict[str, float]]:
    """trl's log of each step, unrounded, on the batches of ``folder`` in their order."""
    kind, _ = _kind(case)
    model: Any = kind.from_pretrained(folder / "model", dtype=dtype, attn_implementation="eager")
    if case["lora"]:
        model = PeftModel.from_pretrained(model, folder / "adapter", is_trainable=True)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    batches = json.loads((folder / "batches.json").read_text())
    samples = [sample for batch in batches for sample in batch]
    if "tokens" in samples[0]:
        parts = [sample["tokens"].items() for sample in samples]
        samples = [{k: tokenizer.decode(v, skip_special_tokens=True) for k, v in items} for items in parts]
    module, name, _ = TRAINERS[case["objective"]]
    base, config = (getattr(importlib.import_module(module), f"{name}{kind}") for kind in ("Trainer", "Config"))
    found: list[dict[str, float]] = []

    class Given(base):  # type: ignore[misc, valid-type]
        """trl's trainer on the given batches, whatever their sizes."""

        def get_train_dataloader(self) -> Any:
            numbers = iter(range(len(samples)))
            sampler = [[next(numbers) for _ in batch] for batch in batches]
            loader = DataLoader(self.train_dataset, batch_sampler=sampler, collate_fn=self.data_collator)
            return self.accelerator.prepare(loader)

        def _prepare_dataset(self, dataset: Dataset, *args: Any, **kwargs: Any) -> Dataset:
            if "chosen" in dataset.column_names:  # texts
                return super()._prepare_dataset(dataset, *args, **kwargs)
            return dataset  # it is tokenised already

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            metrics = getattr(self, "_stored_metrics", None) or self._metrics
            kept = ("rewards/", "kl", "margin", "accuracy", "min_reward", "mean_reward", "max_reward")
            last = {name: values[-1] for name, values in metrics["train"].items() if name.startswith(kept)}
            found.append({"loss": loss.item(), **{name: float(value) for name, value in last.items()}})
            return loss

    arguments = config(**_options(case, model), max_steps=len(batches), output_dir=str(folder / "trl"))
    more: dict[str, Any] = {}
    if "teacher" in case:
        more["teacher_model"] = AutoModelForCausalLM.from_pretrained(folder / "teacher", dtype=torch.float32)
        more["data_collator"] = DataCollatorForSeq2Seq(tokenizer)
    data = Dataset.from_list(samples)
    Given(model=model, args=arguments, train_dataset=data, processing_class=tokenizer, **more).train()
    return found


def _options(case: dict[str, Any], model: Any) -> dict[str, Any]:
    """The options of the case's config in trl; ``model`` is told to return its router's loss, where it has one."""
    numbers = dict(case["numbers"])
    if "loss_type" in numbers and case["objective"] == "dpo":  # whose option in trl is a list
        numbers["loss_type"] = numbers["loss_type"].split(",")
    if "loss_weights" in numbers:
        numbers["loss_weights"] = [float(word) for word in numbers["loss_weights"].split(",")]
    module, _, own = TRAINERS[case["objective"]]
    options = {**OPTIONS, **case["options"], **own, **numbers}
    coefficient = "router_aux_loss_coef"
    if coefficient in case["config"] and case["objective"] != "reward":  # whose class adds no router loss
        model.config.output_router_logits = True
        # the configs of the two older trainers have no such coefficient: they use the model's
        options |= {coefficient: case["config"][coefficient]} if module == "trl" else {}
    return options


if __name__ == "__main__":
    what, folder = sys.argv[1], Path(sys.argv[2])
    case = json.loads((folder / "case.json").read_text())
    torch.set_num_threads(1)  # for so small a model more threads only wait for one another
    losses = train(folder, case, torch.float64 if what == "train64" else torch.float32)
    (folder / "losses.json").write_text(json.dumps(losses))
