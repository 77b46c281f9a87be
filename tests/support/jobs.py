"""Jobs for tests: a recipe on a config, resolved as a run resolves them."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from shardwright.arguments.training import Settings
from shardwright.job import Job
from shardwright.layout.load_recipe import load_recipe
from shardwright.layout.recipe import Recipe
from shardwright.model.facts import facts_of
from shardwright.model.meta_model import load_config

# of a config for which a model is made whole on the CPU, and trained for a few steps
SIZES: dict[str, Any] = {
    "vocab_size": 304,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def job_of(recipe: Recipe | str, config: PretrainedConfig | None = None, devices: int = 8, **options: Any) -> Job:
    """The job of ``recipe`` on ``config`` (default: its own model), with ``options`` of TrainingArguments."""
    recipe = load_recipe(recipe) if isinstance(recipe, str) else recipe
    config = config or load_config(None, recipe)
    return Job(
        recipe,
        Settings(recipe=recipe.name or "unnamed", **options),
        devices,
        facts_of(config, options.get("train_mtp", False)),
    )
