"""trl's trainers on the plain CPU, in a process without torch_xla: the losses of given batches, one by one.

python scripts/measure/trl_plain.py init FOLDER     a tiny model's weights and tokenizer, and PEFT's first factors
python scripts/measure/trl_plain.py train FOLDER    FOLDER/batches.json through trl; FOLDER/losses.json

`trl_parity.py` calls it. FOLDER/case.json says what is trained, and how.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["USE_TORCH_XLA"] = "0"  # accelerate would take the virtual devices
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as Decoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

MODEL, ADAPTER = "model", "adapter"
END = "<end>"


def write_start(folder: Path, case: dict[str, Any]) -> None:
    """Write what both sides start from: weights, a tokenizer of bytes, and the factors that PEFT itself begins with."""
    backend = Tokenizer(BPE({letter: i for i, letter in enumerate(sorted(ByteLevel.alphabet()))}, []))
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False, use_regex=False), Decoder()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, pad_token="<pad>")
    tokenizer.save_pretrained(folder / MODEL)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**case["config"]), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():  # of such a width that attention and experts are far from uniform
            if parameter.dim() > 1:
                parameter.normal_(std=0.8 * parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder / MODEL)
    if case["lora"]:
        get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **case["lora"])).save_pretrained(folder / ADAPTER)


def train(folder: Path, case: dict[str, Any]) -> list[dict[str, float]]:
    """What trl logs of each step, unrounded, when it is given the batches of ``folder`` in their order."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder / MODEL, dtype=torch.float32, attn_implementation="eager")
    if case["lora"]:
        model = PeftModel.from_pretrained(model, folder / ADAPTER, is_trainable=True)
    batches = json.loads((folder / "batches.json").read_text())
    base, options = _trainer(case["objective"])
    numbers = _numbers(batches)

    class Given(base):  # type: ignore[misc, valid-type]
        """trl's trainer on batches that are given, whatever their sizes."""

        found: list[dict[str, float]] = []

        def get_train_dataloader(self) -> Any:
            columns = [name for name in self.train_dataset.column_names if name in batches[0][0]]
            data = self.train_dataset.select_columns(columns) if columns else self.train_dataset
            loader = DataLoader(data, batch_sampler=list(numbers), collate_fn=self.data_collator)
            return self.accelerator.prepare(loader)

        def _prepare_dataset(self, dataset: Dataset, *args: Any, **kwargs: Any) -> Dataset:
            return dataset  # it is tokenised

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            metrics = getattr(self, "_metrics", None) or getattr(self, "_stored_metrics", {})
            last = {name: values[-1] for name, values in metrics["train"].items() if name.startswith("rewards/")}
            self.found.append({"loss": loss.item(), **{name: float(value) for name, value in last.items()}})
            return loss

    args = {**case["training"], **options(case), "max_steps": len(batches), "output_dir": str(folder / "trl")}
    if hasattr(model.config, "output_router_logits"):
        model.config.output_router_logits = True
    config = _config(base)(**args)
    trainer = Given(
        model=model,
        args=config,
        train_dataset=Dataset.from_list([sample for batch in batches for sample in batch]),
        processing_class=AutoTokenizer.from_pretrained(folder / MODEL),
    )
    trainer.train()
    return trainer.found


def _numbers(batches: list[list[Any]]) -> Iterator[list[int]]:
    first = 0
    for batch in batches:
        yield list(range(first, first + len(batch)))
        first += len(batch)


def _config(base: type) -> Any:
    import importlib

    module = importlib.import_module(base.__module__)
    return getattr(module, base.__name__.replace("Trainer", "Config"))


def _trainer(objective: str) -> tuple[type, Any]:
    """The class of ``objective``, and what its config is told of a case."""
    if objective == "sft":
        from trl import SFTTrainer

        return SFTTrainer, lambda case: {"max_length": None, **case.get("router", {})}
    if objective in ("dpo", "ipo"):
        from trl import DPOTrainer

        kind = {"dpo": "sigmoid", "ipo": "ipo"}[objective]
        return DPOTrainer, lambda case: {"loss_type": kind, "beta": case["beta"], "max_length": None, **case["router"]}
    raise ValueError(objective)


def main(what: str, folder: Path) -> None:
    case = json.loads((folder / "case.json").read_text())
    if what == "init":
        write_start(folder, case)
    else:
        (folder / "losses.json").write_text(json.dumps(train(folder, case)))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
