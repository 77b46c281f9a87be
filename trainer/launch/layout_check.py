"""The run's recipe against its model and the slices, before anything is started."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from shardwright.xla.chips import Topology

if TYPE_CHECKING:
    from shardwright.arguments.training import TrainingArguments


def check_layout(args: TrainingArguments, topology: Topology) -> None:
    """Raises UserError for what each host would refuse, of a model whose config is here and needs no network."""
    from shardwright.layout.auto import AUTO, UNMADE, auto_recipe
    from shardwright.layout.copies import fitted
    from shardwright.layout.load_recipe import load_recipe
    from shardwright.model.classifier import reward_config
    from shardwright.model.facts import facts_of
    from shardwright.model.lora_options import lora_of, plan_of
    from shardwright.model.meta_model import load_config
    from shardwright.model.model_checks import check_model

    folders = [each for each in (args.model, args.adapter) if each is not None]
    if not all(os.path.exists(os.path.expanduser(each)) for each in folders):
        return
    recipe = None if args.recipe == AUTO else load_recipe(args.recipe)
    config = load_config(args.model, recipe or UNMADE)
    facts = facts_of(reward_config(config) if args.entry.scores_texts else config, args.train_mtp)
    if recipe is None:
        recipe = auto_recipe(facts.model, facts.experts, args.mesh, topology.devices).recipe
    elif args.mesh is not None:
        recipe = recipe.with_mesh(args.mesh)
    recipe = recipe if args.compute is None else recipe.with_compute(args.compute)
    check_model(recipe, args, facts)
    recipe, _ = fitted(recipe, facts.model, topology.devices)
    plan_of(recipe, facts, lora_of(args, facts), topology.devices, args)
    recipe.mesh.over_slices(topology.slices, topology.devices)
