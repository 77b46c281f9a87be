"""A plan as the rows of a table, and printed."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from shardwright.layout.plan import ShardingPlan
from shardwright.layout.recipe import layout_text
from shardwright.optimizers import OPTIMIZERS
from shardwright.report.lines import Terminal, say
from shardwright.report.units import mesh_text, size

PLAN_HEADER = ("pattern", "match", "shape", "placements", "on a device", "bytes")


def plan_rows(plan: ShardingPlan) -> list[list[str]]:
    """A row under :data:`PLAN_HEADER` for each pattern and shape, with the bytes of all its parameters."""
    return [
        [
            first.pattern,
            str(1 + len(others)),
            shape_text(first.shape),
            "\n".join(f"{axis}: {text}" for axis, text in layout_text(first.layout).items()) or "replicated",
            shape_text(first.local_shape),
            size(sum(each.bytes_per_device for each in (first, *others)), decimals=2),
        ]
        for first, *others in plan.kinds
    ]


def shape_text(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape)) or "scalar"


def held_by_a_device(plan: ShardingPlan) -> list[tuple[str, int]]:
    """(name, bytes on a device) of weights, gradients and optimizer state."""
    names = ("parameters", "gradients", f"{OPTIMIZERS[plan.optim].title} state")
    return list(zip(names, plan.totals.values(), strict=True))


def print_plan(plan: ShardingPlan) -> None:
    """Prints the plan as a table that fits the terminal, or as wide as it needs where the output is piped."""
    console = Terminal()
    say(console, f"mesh: {mesh_text(plan.mesh)} = {plan.devices} devices\n")
    console.print(_table(plan_rows(plan), console.width))
    held = held_by_a_device(plan)
    say(console, "\na device holds")
    width = max(12, *(len(what) for what, _ in held))
    for what, count in [*held, ("together", sum(count for _, count in held))]:
        say(console, f"  {what:<{width}} {size(count, decimals=2):>11}")
    axes = mesh_text(plan.mesh, plan.batch) or "no axis splits it"
    say(console, f"the global batch must be divisible by {plan.batch_shards} ({axes})")


def _table(rows: list[list[str]], width: int) -> Table:
    """A table of at most ``width`` characters. Where that is too narrow, patterns are broken at their dots."""
    columns = list(zip(PLAN_HEADER, *rows, strict=True))
    widths = [max(len(line) for cell in column for line in cell.split("\n")) for column in columns]
    room = max(width - sum(widths[1:]) - 2 * len(PLAN_HEADER), 12)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for title in PLAN_HEADER:
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
