"""The smallest slice of each generation that holds a model's training, by the plan: an estimate before a compile."""

from collections.abc import Iterator
from dataclasses import dataclass

from shardwright.arguments.training import TrainingArguments
from shardwright.errors import UserError
from shardwright.layout.auto import auto_recipe
from shardwright.model.facts import ModelFacts
from shardwright.model.lora_options import lora_of, plan_of
from shardwright.models.adapters.lora import Lora
from shardwright.xla.chips import CHIPS, Chip, Topology, topologies

SHARE = 0.75  # of a chip's HBM for weights, gradients and optimizer state; the rest is left for a step's values


@dataclass(frozen=True)
class Fit:
    """A slice, and the bytes a chip that the plan of the recipe ``auto`` puts there."""

    topology: Topology
    bytes_a_chip: int


def smallest_slices(facts: ModelFacts, args: TrainingArguments) -> Iterator[tuple[Chip, Fit | None]]:
    """For each generation the smallest slice whose chips hold the plan within :data:`SHARE`; None: no slice does."""
    lora = lora_of(args, facts)
    for chip in CHIPS.values():
        yield chip, next((fit for t in topologies(chip) if (fit := _fit(facts, args, lora, t)) is not None), None)


def _fit(facts: ModelFacts, args: TrainingArguments, lora: Lora | None, topology: Topology) -> Fit | None:
    """The plan's bytes on a slice; None: too many, or the model's shapes don't divide over its chips."""
    room = SHARE * topology.chip.hbm_bytes
    # bytes of a weight, and of its gradient, at least: a plan of a large model takes seconds
    trained = 8 if args.weight_dtype == "float32" else 4
    stored = trained if lora is None else 2 if args.base_dtype == "bfloat16" else 0.5
    if facts.parameters * stored > room * topology.devices:
        return None
    try:
        made = auto_recipe(facts.model, facts.experts, devices=topology.devices)
        plan = plan_of(made.recipe, facts, lora, topology.devices, args)
    except UserError:
        return None
    total = sum(plan.totals.values())
    return Fit(topology, total) if total <= room else None
