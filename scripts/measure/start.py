"""Prints a table of what a start costs: CPU seconds of imports, beside those of the packages alone, in turns.

python scripts/measure/start.py        of three rounds the least, which others on the machine disturb least
"""

from __future__ import annotations

import resource
import subprocess
import sys

from rich.console import Console
from rich.table import Table

from shardwright.hosts.output_streams import exit_code

ROUNDS = 3
# name → its imports, in a fresh Python
SIDES = {
    "torch": "import torch",
    "torch, torch_xla": "import torch, torch_xla",
    "torch, torch_xla, transformers, jax, datasets": (
        "import torch, torch_xla, transformers.modeling_utils, transformers.trainer_callback, jax, datasets"
    ),
    "shardwright.run, as scripts/train.py imports it": (
        "from shardwright.xla import light_imports\nwith light_imports.uncollected():\n    import shardwright.run"
    ),
}


def main() -> int:
    seconds: dict[str, list[float]] = {name: [] for name in SIDES}
    for _ in range(ROUNDS):
        for name, code in SIDES.items():
            seconds[name].append(_spent(code))
    least = {name: min(found) for name, found in seconds.items()}
    table = Table("", "CPU s", "ratio", title="imports")
    for name, found in least.items():
        table.add_row(name, f"{found:.2f}", f"{found / list(least.values())[2]:.2f}")
    Console().print(table)
    return 0


def _spent(code: str) -> float:
    """User and system seconds of a Python that runs ``code``."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    sys.exit(exit_code(main))
