"""Writes a run's weights: the model in the hub's format, or its adapter."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from shardwright.files.folder import Folder
from shardwright.report.lines import waiting
from shardwright.weights.adapter_weights import files_of
from shardwright.weights.hub_write import export
from shardwright.weights.peft_files import save_adapter
from shardwright.weights.weight_sources import Source, part_and_rest

if TYPE_CHECKING:  # it loads torch_xla, and an export needs no device
    from shardwright.job import Job


def write_model(
    job: Job, folder: Folder, weights: Source, base: Source, tokenizer: PreTrainedTokenizerBase, console: Console
) -> None:
    """Writes the job's model in the hub's format, or its adapter in PEFT's.

    Args:
        weights: under the names of ``job.model``.
        base: the untrained weights, under the names of ``job.facts.whole``.
    """
    with waiting(console, f"writing {folder} …"):
        if job.lora is not None:
            save_adapter(folder, files_of(job), weights, tokenizer, console)
            return
        # a copy, since a model's config is written with the dtype of its weights
        whole = part_and_rest(weights, base, job.facts.names_in_whole)
        export(folder, copy.deepcopy(job.facts.whole), whole, tokenizer, console=console)
