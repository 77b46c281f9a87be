"""trl's trainers on the plain CPU, in a process without torch_xla: the losses of given batches, one by one.

python scripts/measure/trl_plain.py init FOLDER     a tiny model's weights and tokenizer, and PEFT's first factors
python scripts/measure/trl_plain.py train FOLDER    FOLDER/batches.json through trl; FOLDER/losses.json

`trl_parity.py` calls it. FOLDER/case.json says what is trained, and how.
"""

from __future__ import annotations

import importlib
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
    """Write the start of both sides: weights, a tokenizer of bytes, and PEFT's own initial factors."""
    backend = Tokenizer(BPE({letter: i for i, letter in enumerate(sorted(ByteLevel.alphabet()))}, []))
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False, use_regex=False), Decoder()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, pad_token="<pad>")
    tokenizer.save_pretrained(folder / MODEL)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**case["config"]), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():  # so wide that attention and experts are far from uniform
            if parameter.dim() > 1:
                parameter.normal_(std=0.8 * parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder / MODEL)
    if case["lora"]:
        get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **case["lora"])).save_pretrained(str(folder / ADAPTER))


def train(folder: Path, case: dict[str, Any]) -> list[dict[str, float]]:
    """trl's log of each step, unrounded, on the batches of ``folder`` in their order."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder / MODEL, dtype=torch.float32, attn_implementation="eager")
    if case["lora"]:
        model = PeftModel.from_pretrained(model, folder / ADAPTER, is_trainable=True)
    batches = json.loads((folder / "batches.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(folder / MODEL)
    if "tokens" in batches[0][0]:
        texts = lambda parts: {k: tokenizer.decode(v, skip_special_tokens=True) for k, v in parts.items()}  # noqa: E731
        batches = [[texts(pair["tokens"]) for pair in batch] for batch in batches]
    base, options = _trainer(case["objective"])
    found: list[dict[str, float]] = []

    class Given(base):  # type: ignore[misc, valid-type]
        """trl's trainer on the given batches, whatever their sizes."""

        def get_train_dataloader(self) -> Any:
            sampler = list(_numbers(batches))
            loader = DataLoader(self.train_dataset, batch_sampler=sampler, collate_fn=self.data_collator)
            return self.accelerator.prepare(loader)

        def _prepare_dataset(self, dataset: Dataset, *args: Any, **kwargs: Any) -> Dataset:
            return dataset  # it is tokenised already

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            metrics = getattr(self, "_stored_metrics", None) or self._metrics
            last = {name: values[-1] for name, values in metrics["train"].items() if name.startswith("rewards/")}
            found.append({"loss": loss.item(), **{name: float(value) for name, value in last.items()}})
            return loss

    args = {**case["training"], **options(case), "max_steps": len(batches), "output_dir": str(folder / "trl")}
    if hasattr(model.config, "output_router_logits"):
        model.config.output_router_logits = True
    config = _config(base)(**args)
    trainer = Given(
        model=model,
        args=config,
        train_dataset=Dataset.from_list([sample for batch in batches for sample in batch]),
        processing_class=tokenizer,
    )
    trainer.train()
    return found


def _numbers(batches: list[list[Any]]) -> Iterator[list[int]]:
    first = 0
    for batch in batches:
        yield list(range(first, first + len(batch)))
        first += len(batch)


def _config(base: type) -> Any:
    return getattr(importlib.import_module(base.__module__), base.__name__.replace("Trainer", "Config"))


def _trainer(objective: str) -> tuple[type, Any]:
    """The trainer class of ``objective``, and a function from a case to its config's own options."""
    known: dict[str, tuple[str, str, dict[str, Any]]] = {
        "sft": ("trl", "SFTTrainer", {"max_length": None}),
        "dpo": ("trl", "DPOTrainer", {"loss_type": "sigmoid", "max_length": None}),
        "ipo": ("trl", "DPOTrainer", {"loss_type": "ipo", "max_length": None}),
        "orpo": ("trl.experimental.orpo", "ORPOTrainer", {"max_length": 128}),
        "simpo": ("trl.experimental.cpo", "CPOTrainer", {"max_length": 128, "loss_type": "simpo", "cpo_alpha": 0.0}),
    }
    module, name, own = known[objective]

    def options(case: dict[str, Any]) -> dict[str, Any]:
        # the configs of the two older trainers have no such coefficient: they use the model's
        router = case["router"] if objective in ("sft", "dpo", "ipo") else {}
        return {**own, **router, **case["numbers"], "remove_unused_columns": False}

    return getattr(importlib.import_module(module), name), options


def main(what: str, folder: Path) -> None:
    case = json.loads((folder / "case.json").read_text())
    torch.set_num_threads(1)  # for so small a model more threads only wait for one another
    if what == "init":
        write_start(folder, case)
    else:
        (folder / "losses.json").write_text(json.dumps(train(folder, case)))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
