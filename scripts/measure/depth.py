"""Prints how the time to trace and to compile a step grows with the number of layers, with the scan and without.

python scripts/measure/depth.py      2, 8 and 32 layers

Each measurement is a process of its own. docs/records/speed.md has the table as it was on one machine.
"""

import statistics
import sys
import time

from rich.console import Console
from rich.table import Table

from shardwright.arguments.command_line import Parser
from shardwright.hosts.output_streams import exit_code
from shardwright.scripts.measure.tables import in_fresh_process, job_here, own_config

ROWS, LENGTH, STEPS = 8, 64, 6


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--recipe", default="mixtral_ep", help="the recipe whose own small model runs (mixtral_ep)")
    recipe = parser.parse_args().recipe
    table = Table("layers", "scan", "first step (trace + compile)", "trace a step", title=f"{recipe}, hidden size 64")
    for layers in (2, 8, 32):
        for scan in (True, False):
            first, later = in_fresh_process(steps, recipe, layers, scan)
            table.add_row(str(layers), "yes" if scan else "no", f"{first:.1f} s", f"{later * 1000:.0f} ms")
    Console().print(table)
    return 0


def steps(recipe: str, layers: int, scan: bool) -> tuple[float, float]:
    """Seconds of a first step, to its end, and the host's median for the call of a later one."""
    import torch

    from shardwright.step.build import place_model
    from shardwright.step.train_step import TrainStep
    from shardwright.weights.weight_sources import seeded_init
    from shardwright.xla.device_mesh import build_mesh
    from shardwright.xla.runtime import wait_for_devices

    config = own_config(recipe, num_hidden_layers=layers, hidden_size=64, intermediate_size=128)
    options = {"sequence_length": LENGTH, "per_device_train_batch_size": ROWS // 8, "compute": f"scan={scan}"}
    job = job_here(recipe, config, **options)
    step = TrainStep(place_model(job, build_mesh(job.recipe.mesh), seeded_init(job.model, 0)))
    ids = torch.randint(0, config.vocab_size, (ROWS, LENGTH))
    calls, first = list[float](), 0.0
    for number in range(1, STEPS + 1):
        started = time.perf_counter()
        step({"input_ids": ids, "labels": ids}, step=number, learning_rate=1e-4)
        calls.append(time.perf_counter() - started)
        wait_for_devices()
        first = first or time.perf_counter() - started
    return first, statistics.median(calls[1:])


if __name__ == "__main__":
    sys.exit(exit_code(main))
