"""Job: recipe + arguments + config + model + plan, resolved once."""

from __future__ import annotations

from dataclasses import replace

from trainer.arguments import TrainingArguments
from trainer.layout.load import load_recipe
from trainer.layout.recipe import Recipe


def effective_recipe(args: TrainingArguments) -> Recipe:
    """The recipe that ``args`` name, with what they override (``--mesh``, ``--compute``, ``--bf16``)."""
    recipe = load_recipe(args.recipe)
    if args.mesh is not None:
        recipe = recipe.with_mesh(args.mesh)
    if args.compute is not None:
        recipe = recipe.with_compute(args.compute)
    if args.bf16 is not None:
        recipe = replace(recipe, compute=replace(recipe.compute, dtype="bfloat16" if args.bf16 else "float32"))
    return recipe
