"""What a run leaves of its weights: the model in the hub's format, or its adapter."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from trainer.report.lines import waiting
from trainer.storage import Folder
from trainer.weights.adapters import files_of
from trainer.weights.hub_write import export
from trainer.weights.peft_files import save_adapter
from trainer.weights.sources import Source, part_and_rest

if TYPE_CHECKING:  # it loads torch_xla, and an export needs no device
    from trainer.job import Job


def write_model(
    job: Job, folder: Folder, weights: Source, base: Source, tokenizer: PreTrainedTokenizerBase, console: Console
) -> None:
    """Write the job's model in the hub's format, or the adapter that it trains in PEFT's.

    Args:
        weights: under the names of ``job.model``.
        base: of what is not trained, under the names of ``job.whole``.
    """
    with waiting(console, f"writing {folder} …"):
        if job.lora is not None:
            save_adapter(folder, files_of(job), weights, tokenizer, console)
            return
        # a copy, since a model's config is written with the dtype of its weights
        whole = part_and_rest(weights, base, job.names_in_whole)
        export(folder, copy.deepcopy(job.whole), whole, tokenizer, console=console)
