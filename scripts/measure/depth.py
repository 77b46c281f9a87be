"""Prints how the time to trace and to compile a step grows with the number of layers, with the scan and without.

python scripts/measure/depth.py depth      2, 8 and 32 layers

Each measurement is a process of its own. docs/records/speed.md has the table as it was on one machine.
"""

import statistics
import sys
import time
from typing import Any

from rich.table import Table

from shardwright.hosts.output_streams import exit_code
from shardwright.scripts.measure.tables import model_config, resolved_job, run, worker

JOB = {"sequence_length": 64, "rows": 8, "steps": 6, "hidden_size": 64, "intermediate_size": 128}


def main() -> int:
    return run({"depth": depth}, {"steps": steps}, str(__doc__))


def depth(recipe: str, rounds: int) -> Table:
    """The table; measured once, whatever ``rounds``."""
    table = Table("layers", "scan", "first step (trace + compile)", "trace a step", title=f"{recipe}, hidden size 64")
    for layers in (2, 8, 32):
        for scan in (True, False):
            result = worker(recipe, {"side": "steps", "num_hidden_layers": layers, "scan": scan, **JOB}, __file__)
            first, trace = f"{result['first']:.1f} s", f"{result['trace'] * 1000:.0f} ms"
            table.add_row(str(layers), "yes" if scan else "no", first, trace)
    return table


def steps(job: dict[str, Any]) -> dict[str, float]:
    """Seconds of the trainer's first step, and the host's median for a later one."""
    import datasets
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    from shardwright.data.corpus import Corpus
    from shardwright.data.rows.rows import StoredRows
    from shardwright.loop import TrainingLoop
    from shardwright.xla.runtime import wait_for_devices

    config = model_config(job)
    ids = torch.randint(0, config.vocab_size, (job["rows"], job["sequence_length"]))
    rows = StoredRows(datasets.Dataset.from_dict({"input_ids": ids.tolist()}))
    corpus = Corpus(rows, {"": rows}, PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE())))
    options = {
        "sequence_length": job["sequence_length"],
        "per_device_train_batch_size": job["rows"] // 8,
        "max_steps": job["steps"],
    }
    trainer, begun, traces = TrainingLoop(resolved_job(job, config, **options), corpus), time.perf_counter(), []
    for step in range(1, job["steps"] + 1):
        started = time.perf_counter()
        trainer.train_step({"input_ids": ids, "labels": ids}, step=step, learning_rate=1e-4)
        traces.append(time.perf_counter() - started)
        wait_for_devices()
        if step == 1:
            first = time.perf_counter() - begun
    return {"first": first, "trace": statistics.median(traces[1:])}


if __name__ == "__main__":
    sys.exit(exit_code(main))
