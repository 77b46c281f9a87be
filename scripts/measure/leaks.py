"""Show that a long run's memory is flat: a tiny Mixtral that logs, saves and evaluates, on 8 virtual devices.

python scripts/measure/leaks.py                 500 steps, and a table
python scripts/measure/leaks.py --steps 2000    longer

The table has the process's memory, which here is also the devices', the device tensors alive, and the compiles so far.
Nothing is collected by hand: what only the garbage collector frees is counted until it comes by. The exit code is 1 if
memory or tensors still grow: by more than 2 % from the median of the second fifth of the steps to that of the last.
"""

import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault("CPU_NUM_DEVICES", "8")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import torch_xla.debug.metrics as met
from rich.console import Console
from rich.table import Table
from transformers import MixtralConfig, TrainerCallback, TrainerControl, TrainerState
from transformers import logging as transformers_logging

from shardwright.arguments.command_line import Parser
from shardwright.arguments.training import TrainingArguments
from shardwright.hosts.output_streams import exit_code
from shardwright.run import train
from shardwright.xla.runtime import compile_count

MODEL: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_local_experts": 4}
MODEL |= {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 2048, "max_position_embeddings": 256}
RUN: dict[str, Any] = {"recipe": "mixtral_ep", "mesh": "fsdp=4,expert=2", "sequence_length": 64, "logging_steps": 5}
RUN |= {"eval_strategy": "steps", "eval_steps": 50, "max_eval_rows": 16, "save_steps": 50, "save_total_limit": 2}
COLUMNS = ("memory, MiB", "tensors alive", "compiles")
MOST = 0.02  # growth from the second fifth to the last


class Gauge(TrainerCallback):
    """The values of :data:`COLUMNS` after each step."""

    def __init__(self) -> None:
        self.noted: list[tuple[float, ...]] = []

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        memory = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
        made, gone = (met.counter_value(f"{what}XlaTensor") or 0 for what in ("Create", "Destroy"))
        self.noted.append((memory, made - gone, compile_count()))


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--steps", type=int, default=500, help="how many (default: 500)")
    steps = parser.parse_args().steps
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    gauge = Gauge()
    with tempfile.TemporaryDirectory() as folder:
        MixtralConfig(**MODEL).save_pretrained(folder)
        places: dict[str, Any] = {"model": f"{folder}/config.json", "output_dir": f"{folder}/out"}
        train(TrainingArguments(**RUN, **places, max_steps=steps), Console(stderr=True), [gauge])
    table = Table("step", *COLUMNS)
    tenth = max(1, steps // 10)
    for step in range(tenth, steps + 1, tenth):
        table.add_row(str(step), *(f"{value:,.0f}" for value in gauge.noted[step - 1]))
    Console().print(table)
    memory, tensors, _ = zip(*gauge.noted, strict=True)
    grown = {name: _growth(values) for name, values in zip(COLUMNS, (memory, tensors), strict=False)}
    print(", ".join(f"{name}: {value:+.1%}" for name, value in grown.items()))
    return int(any(value > MOST for value in grown.values()))


def _growth(values: tuple[float, ...]) -> float:
    fifth = len(values) // 5
    return statistics.median(values[-fifth:]) / statistics.median(values[fifth : 2 * fifth]) - 1


if __name__ == "__main__":
    sys.exit(exit_code(main))
