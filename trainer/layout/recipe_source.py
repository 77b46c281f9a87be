"""Writes a recipe as the source of a file, as a person would, in the format of `ruff format`."""

import json
from collections.abc import Sequence

from shardwright.layout.auto import AutoRecipe
from shardwright.layout.recipe import Compute, Layout, layout_source, layout_text

_WIDTH = 120


def recipe_source(made: AutoRecipe, docstring: str) -> str:
    """Python that `shardwright.layout.load_recipe.load_recipe` reads, with comments, under ``docstring``."""
    recipe = made.recipe
    batch = ", ".join(map(json.dumps, recipe.batch)) + ("," if len(recipe.batch) == 1 else "")
    table: list[str] = []
    for pattern, layout in recipe.parameters.items():
        notes = [found[pattern] for found in (made.notes, made.undivided) if pattern in found]
        table += _entry(pattern, layout, notes)
    pinned = ", ".join(
        f"{json.dumps(pattern)}: {layout_source(layout)}" for pattern, layout in recipe.activations.items()
    )
    body = [
        "recipe = Recipe(",
        f"    mesh={recipe.mesh},",
        f"    batch=({batch}),",
        "    parameters={",
        *(f"        {line}" for line in table),
        "    },",
        f"    activations={{{pinned}}},",
        f"    compute={_compute(recipe.compute)},",
        ")",
    ]
    names = "Compute, Mesh, Recipe, Shard" if any("Shard(" in line for line in body) else "Compute, Mesh, Recipe"
    quoted = docstring.replace("\\", "\\\\").replace('"""', '\\"""')
    return "\n".join([f'"""{quoted}"""', "", f"from shardwright import {names}", "", *body, ""])


def _entry(pattern: str, layout: Layout, notes: Sequence[str]) -> list[str]:
    """A table entry with its note behind, or above if that is too long; the axes of a long one, a line each."""
    room, note = _WIDTH - 8, "# " + "; ".join(notes) if notes else ""
    line = f"{json.dumps(pattern)}: {layout_source(layout)},"
    if len(line) > room:
        axes = [f"    {json.dumps(axis)}: {text}," for axis, text in layout_text(layout).items()]
        return [*filter(None, [note]), f"{json.dumps(pattern)}: {{", *axes, "},"]
    behind = f"{line}  {note}".rstrip()
    return [behind] if len(behind) <= room else [note, line]


def _compute(compute: Compute) -> str:
    """The call that makes ``compute``, with remat, scan and all else that is not the default."""
    default = vars(Compute())
    shown = {k: value for k, value in vars(compute).items() if k in ("remat", "scan") or value != default[k]}
    texts = (f"{name}={json.dumps(value) if isinstance(value, str) else value}" for name, value in shown.items())
    return f"Compute({', '.join(texts)})"
