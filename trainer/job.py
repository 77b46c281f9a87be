"""Job: what a run is, resolved once and handed on whole: recipe, arguments, config, model on meta, plan.

Whatever can be refused without data, weights or a device is refused here: nothing but the recipe and the config is
read, and nothing is allocated.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from models.attention.interface import NAME as OUR_ATTENTION
from models.experts import interface as experts
from models.layers import stack_layers, wrap_layers
from trainer.arguments import TrainingArguments
from trainer.errors import UserError
from trainer.layout.load import load_recipe
from trainer.layout.plan import ShardingPlan, make_plan
from trainer.layout.recipe import Recipe
from trainer.model import experts_modules, load_config, meta_model


@dataclass(frozen=True)
class Job:
    """One training job, checked. ``replace(job, recipe=…)`` or ``replace(job, args=…)`` makes a checked neighbour.

    Args:
        recipe: with what the arguments override (:func:`effective_recipe`).
        args: what the run does besides layout.
        devices: devices in the mesh.
        config: the model's.
        model: transformers' own model of ``config`` on meta, as :func:`trainer.model.meta_model` gives it.

    Attributes:
        plan: where each of ``model``'s parameters goes.
        assembled: the model that runs, on meta: kernels chosen, layers stacked where they are scanned. It is a
            template, and :func:`trainer.step.build.build` fills a copy.
        stored: the plan of ``assembled``'s parameters, as they are stored.

    Raises:
        UserError: the recipe's mesh, layouts or compute policy do not fit the model or the arguments.
    """

    recipe: Recipe
    args: TrainingArguments
    devices: int
    config: PretrainedConfig = field(repr=False)
    model: PreTrainedModel = field(repr=False)
    plan: ShardingPlan = field(init=False, repr=False)
    assembled: PreTrainedModel = field(init=False, repr=False)
    stored: ShardingPlan = field(init=False, repr=False)

    @classmethod
    def resolve(cls, args: TrainingArguments, count_devices: Callable[[], int]) -> Job:
        """The job that ``args`` describe. ``count_devices`` is asked last: it may have to open the devices.

        Raises:
            UserError: as the class; no such recipe or model.
        """
        recipe = effective_recipe(args)
        config = load_config(args.model, recipe)
        model = meta_model(config)
        _assemble(recipe, args, model)  # what the model itself can't do is refused before a device is asked for
        return cls(recipe, args, count_devices(), config, model)

    def __post_init__(self) -> None:
        assembled, stack = _assemble(self.recipe, self.args, self.model)
        plan = make_plan(self.recipe, self.model, self.devices, **self.args.state_dtypes)
        object.__setattr__(self, "assembled", assembled)
        object.__setattr__(self, "plan", plan)
        object.__setattr__(self, "stored", plan.stacked(*stack) if stack else plan)

    @property
    def micro_batch_rows(self) -> int:
        """Rows of a micro-batch on all devices together; an evaluation's batch has as many."""
        return self.args.per_device_train_batch_size * self.plan.batch_shards

    @property
    def rows(self) -> int:
        """Rows of a step: of all its micro-batches, on all devices together."""
        return self.micro_batch_rows * self.args.gradient_accumulation_steps

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.rows * self.args.sequence_length

    @property
    def parameters(self) -> int:
        """How many numbers the model's parameters are."""
        return sum(math.prod(parameter.shape) for parameter in self.plan.parameters)

    def as_texts(self) -> dict[str, Any]:
        """File name → JSON-able content of what tells, in the output folder, what was run."""
        return {
            "recipe.json": self.recipe.as_dict(),
            "training_args.json": self.args.as_dict(),
            "plan.json": self.plan.as_json(),
        }


def effective_recipe(args: TrainingArguments) -> Recipe:
    """The recipe that ``args`` name, with what they override (``--mesh``, ``--compute``, ``--bf16``).

    Raises:
        UserError: no such recipe, or an override that it can't take.
    """
    recipe = load_recipe(args.recipe)
    if args.mesh is not None:
        recipe = recipe.with_mesh(args.mesh)
    if args.compute is not None:
        recipe = recipe.with_compute(args.compute)
    if args.bf16 is not None:
        recipe = replace(recipe, compute=replace(recipe.compute, dtype="bfloat16" if args.bf16 else "float32"))
    return recipe


def _assemble(
    recipe: Recipe, args: TrainingArguments, model: PreTrainedModel
) -> tuple[PreTrainedModel, tuple[str, int] | None]:
    """A copy of ``model`` with kernels chosen and layers stacked; and the stack's name and depth, if there is one."""
    _check_isolation(recipe, args)
    model = copy.deepcopy(model)
    compute = recipe.compute
    model.set_attn_implementation(compute.attention)
    if compute.experts is not None:
        _check_experts(recipe, model)
        experts.choose(model, compute.experts)
    try:
        if compute.scan:
            return model, stack_layers(model)
        if compute.remat != "none":
            wrap_layers(model)
        return model, None
    except ValueError as error:
        raise UserError(
            asked=f"recipe {recipe.name}: Compute(scan={compute.scan}, remat={compute.remat!r})",
            found=str(error),
            why="only equal layers, in a list named `layers` and without saved buffers, run as one",
            instead='Compute(scan=False, remat="none"), which leaves the model as it is',
        ) from error


def _check_isolation(recipe: Recipe, args: TrainingArguments) -> None:
    if args.isolate_documents and recipe.compute.attention != OUR_ATTENTION:
        raise UserError(
            asked=f"--isolate_documents with attention={recipe.compute.attention!r}",
            found="an attention of transformers' own",
            why="it does not know documents by their segment_ids: tokens would see other documents",
            instead=f"attention={OUR_ATTENTION!r}, the default",
        )


def _check_experts(recipe: Recipe, model: PreTrainedModel) -> None:
    if not experts_modules(model):
        raise UserError(
            asked=f"recipe {recipe.name}: Compute(experts={recipe.compute.experts!r})",
            found=f"{type(model).__name__} has no experts",
            why="there is nothing to route tokens to",
            instead="Compute(experts=None), or a mixture-of-experts model",
        )
