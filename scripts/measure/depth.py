"""Prints how the time to trace and to compile a step grows with the number of layers, with the scan and without.

python scripts/measure/depth.py depth      2, 8 and 32 layers

Each measurement is a process of its own. docs/numbers.md has the table as it was on one machine.
"""

from __future__ import annotations

import statistics
import sys
import time

import datasets
import torch
from rich.table import Table
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from shardwright.data.corpus import Corpus
from shardwright.data.rows.rows import StoredRows
from shardwright.hosts.output_streams import exit_code
from shardwright.loop import TrainingLoop
from shardwright.scripts.measure import tables
from shardwright.xla.runtime import wait_for_devices

LENGTH, STEPS = 64, 6


def depth(rounds: int) -> Table:
    """The table; measured once, whatever ``rounds``."""
    heading = f"{tables.RECIPE}, hidden size 64"
    table = Table("layers", "scan", "first step (trace + compile)", "trace a step", title=heading)
    for layers in (2, 8, 32):
        for scan in (True, False):
            first, trace = tables.apart(step_seconds, layers, scan)
            table.add_row(str(layers), "yes" if scan else "no", f"{first:.1f} s", f"{trace * 1000:.0f} ms")
    return table


def step_seconds(layers: int, scan: bool) -> tuple[float, float]:
    """Seconds of the trainer's first step, and the host's median for a later one."""
    config = tables.model_config(num_hidden_layers=layers, hidden_size=64, intermediate_size=128)
    ids = torch.randint(0, config.vocab_size, (tables.DEVICES, LENGTH))
    rows = StoredRows(datasets.Dataset.from_dict({"input_ids": ids.tolist()}))
    corpus = Corpus(rows, rows, PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE())))
    job = tables.job_of(config, scan, sequence_length=LENGTH, per_device_train_batch_size=1, max_steps=STEPS)
    trainer, begun, first, traces = TrainingLoop(job, corpus), time.perf_counter(), 0.0, []
    for step in range(1, STEPS + 1):
        started = time.perf_counter()
        trainer.train_step({"input_ids": ids, "labels": ids}, step=step, learning_rate=1e-4)
        traces.append(time.perf_counter() - started)
        wait_for_devices()
        first = first or time.perf_counter() - begun
    return first, statistics.median(traces[1:])


def main() -> None:
    tables.run({"depth": depth}, __doc__)


if __name__ == "__main__":
    sys.exit(exit_code(main))
