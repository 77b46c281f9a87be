"""Our step against the plain transformers model: eager, unsharded, dropless, on the CPU.

python tests/parity.py                 the table of docs/records/parity.md
python tests/parity.py qwen3_next_ep   the rows of some recipes alone
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault("CPU_NUM_DEVICES", "8")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, str(Path(__file__).parents[1]))

from rich.console import Console
from rich.table import Table

from shardwright.report.units import mesh_text
from tests.support.cases import RECIPES, after_steps, make_batch, make_case, relative


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", metavar="recipe", help=", ".join(RECIPES))
    names = parser.parse_args().recipes or list(RECIPES)
    if unknown := set(names) - set(RECIPES):
        parser.error(f"no recipe {', '.join(sorted(unknown))}; there are {', '.join(RECIPES)}")
    table = Table("recipe", "mesh", "loss", "gradients", "worst gradient", "weights after 10 AdamW steps")
    for name in names:
        case = make_case(name)
        batch = make_batch(case.config)
        ours, gradients = case.gradients(batch)
        theirs, expected = case.reference_gradients(batch)
        worst, where = relative(gradients, expected)
        mesh = mesh_text(case.plan.mesh)
        steps = after_steps(case, 10)[0]
        table.add_row(name, mesh, f"{abs(ours - theirs) / theirs:.1e}", f"{worst:.1e}", where, f"{steps:.1e}")
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
