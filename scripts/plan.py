"""Print where a recipe puts every parameter of a model, and what a device holds; needs no device, no weights.

python scripts/plan.py --recipe mixtral_ep --model docs/configs/mixtral_8x7b.json --devices 64
"""

from __future__ import annotations

import json
import os
import sys

# No device is needed, so transformers must not import torch_xla: that takes seconds and opens one.
os.environ["USE_TORCH_XLA"] = "0"

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trainer.cli import Parser
from trainer.errors import exit_code
from trainer.layout.load import load_recipe
from trainer.layout.plan import ParameterPlan, ShardingPlan, make_plan
from trainer.layout.recipe import layout_text
from trainer.model import load_config, meta_model
from trainer.report.lines import say
from trainer.report.units import size


def main() -> int | None:
    parser = Parser(__doc__)
    parser.add_argument("--recipe", required=True, help="name in recipes/, or path of a .py file")
    parser.add_argument("--model", help="hub id, folder, or config.json; default: the recipe's own small model")
    parser.add_argument("--devices", type=int, default=8, help="devices in the mesh (default: 8)")
    parser.add_argument("--mesh", help="other ICI factors for the recipe's axes, e.g. fsdp=2,expert=4")
    parser.add_argument("--json", action="store_true", help="print JSON alone")
    arguments = parser.parse_args()
    recipe = load_recipe(arguments.recipe)
    if arguments.mesh:
        recipe = recipe.with_mesh(arguments.mesh)
    plan = make_plan(recipe, meta_model(load_config(arguments.model, recipe)), arguments.devices)
    if arguments.json:
        print(json.dumps(plan.as_json(), indent=2))
    else:
        print_plan(plan)
    return None


def print_plan(plan: ShardingPlan) -> None:
    """Prints the plan as a table that fits the terminal, or as wide as it needs where the output is piped."""
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=200)
    sizes = " × ".join(f"{axis}={size}" for axis, size in plan.mesh.items())
    say(console, f"mesh: {sizes} = {plan.devices} devices\n")
    console.print(_table(_rows(plan), console.width))
    totals = plan.totals
    held = {
        "parameters": totals["parameters_bytes"],
        "gradients": totals["gradients_bytes"],
        "AdamW state": totals["optimizer_bytes"],
        "together": sum(totals.values()),
    }
    say(console, "\na device holds")
    for what, count in held.items():
        say(console, f"  {what:<12} {size(count, decimals=2):>11}")
    axes = " × ".join(f"{axis}={plan.mesh[axis]}" for axis in plan.batch) or "no axis splits it"
    say(console, f"the global batch must be divisible by {plan.batch_shards} ({axes})")


def _rows(plan: ShardingPlan) -> list[list[str]]:
    """The table's cells: a row for each pattern and shape, with the bytes of all its parameters together."""
    groups: dict[tuple[str, tuple[int, ...]], list[ParameterPlan]] = {}
    for parameter in plan.parameters:
        groups.setdefault((parameter.pattern, parameter.shape), []).append(parameter)
    return [
        [
            pattern,
            str(len(parameters)),
            "×".join(map(str, shape)) or "scalar",
            "\n".join(f"{axis}: {text}" for axis, text in layout_text(parameters[0].layout).items()) or "replicated",
            "×".join(map(str, parameters[0].local_shape)) or "scalar",
            size(sum(parameter.bytes_per_device for parameter in parameters), decimals=2),
        ]
        for (pattern, shape), parameters in groups.items()
    ]


def _table(rows: list[list[str]], width: int) -> Table:
    """A table of at most ``width`` characters. Where that is too narrow, patterns are broken at their dots."""
    titles = ["pattern", "match", "shape", "placements", "on a device", "bytes"]
    columns = list(zip(titles, *rows, strict=True))
    widths = [max(len(line) for cell in column for line in cell.split("\n")) for column in columns]
    room = max(width - sum(widths[1:]) - 2 * len(titles), 12)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for title in titles:
        number = title in ("match", "bytes")
        table.add_column(title, justify="right" if number else "left", no_wrap=title != "pattern")
    for pattern, *cells in rows:
        # as Text, since rich would take [qkv] for markup
        table.add_row(Text(_break_at_dots(pattern, room)), *map(Text, cells))
    return table


def _break_at_dots(name: str, width: int) -> str:
    """``name`` in lines of at most ``width`` characters, each after the first indented by one."""
    lines = [""]
    for segment in name.replace(".", ".\0").split("\0"):
        if lines[-1] and len(lines[-1]) + len(segment) > width:
            lines.append(" ")
        lines[-1] += segment
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(exit_code(main))
