"""Prints where the time goes from a run's start to its first step, in wall and CPU seconds, part by part.

python scripts/measure/start.py                      the default job: tiny Mixtral on 8 virtual devices
python scripts/measure/start.py --rounds 3           medians of so many runs

CPU seconds are those of all threads; on a machine that others use they say more than the wall's. The first run of a
machine also trains the tokenizer and tokenises the data, which later ones find in the cache.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.table import Table

from shardwright.arguments.command_line import Parser
from shardwright.hosts.output_streams import exit_code
from shardwright.report.lines import Terminal

SCRIPTS = Path(__file__).parents[1]

# part of the start → the beginning of the line that ends it
PARTS = {
    "imports, options, recipe and model on meta": "page:",
    "devices": "weights:",
    "data: read, tokenised and packed": "data:",
    "weights placed": "output:",
    "evaluation before the first step, with its compile": "step      0  held-out",
    "the first step, with its compile": "step      1  loss",
}


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--recipe", default="mixtral_ep", help="the recipe whose own small model runs (mixtral_ep)")
    parser.add_argument("--rounds", type=int, default=1, help="runs, whose medians are shown (1)")
    asked = parser.parse_args()
    found = [_start(asked.recipe) for _ in range(asked.rounds)]
    table = Table("", "wall s", "CPU s", title=f"{asked.recipe}: from the command to the end of the first step")
    for number, name in enumerate(PARTS):
        table.add_row(name, *(f"{statistics.median(run[number][kind] for run in found):.1f}" for kind in (0, 1)))
    sums = [[sum(part[kind] for part in run) for kind in (0, 1)] for run in found]
    table.add_row("together", *(f"{statistics.median(run[kind] for run in sums):.1f}" for kind in (0, 1)))
    Terminal().print(table)
    return 0


def _start(recipe: str) -> list[tuple[float, float]]:
    """(wall, CPU) seconds of each part of a run of one step, which is killed then."""
    parts: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        options = ["--recipe", recipe, "--output_dir", f"{folder}/run", "--logging_steps", "1", "--save_strategy", "no"]
        command = [sys.executable, "-u", str(SCRIPTS / "train.py"), *options]
        before = time.perf_counter(), 0.0
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
            assert run.stdout is not None
            said, awaited = [], list(PARTS.values())
            for line in run.stdout:
                said.append(line)
                if line.startswith(awaited[len(parts)]):
                    now = time.perf_counter(), _cpu(run.pid)
                    parts.append((now[0] - before[0], now[1] - before[1]))
                    before = now
                    if len(parts) == len(awaited):
                        break
            run.kill()
    if len(parts) < len(PARTS):
        raise RuntimeError("the run ended before its first step:\n" + "".join(said)[-4000:])
    return parts


def _cpu(process: int) -> float:
    """CPU seconds of a process and its threads so far."""
    with open(f"/proc/{process}/stat") as file:
        user, system = file.read().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(exit_code(main))
