"""Job: what a run is, resolved once and handed on whole: recipe, arguments, config, model on meta, plan.

Whatever can be refused without data, weights or a device is refused here: nothing but the recipe and the config is
read, and nothing is allocated.
"""

from __future__ import annotations

import copy
import functools
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from shardwright.arguments.training import TrainingArguments
from shardwright.errors import UserError
from shardwright.hosts.versions import code_digest, versions
from shardwright.layout.auto import AUTO, UNMADE, auto_recipe
from shardwright.layout.load_recipe import load_recipe
from shardwright.layout.plan import ShardingPlan
from shardwright.layout.recipe import Recipe
from shardwright.model import lora_options as lora_options
from shardwright.model import model_checks
from shardwright.model.attention_probe import our_attention
from shardwright.model.facts import experts_modules, routing_of
from shardwright.model.meta_model import is_multimodal, load_config, meta_model, names_in_whole, whole_model
from shardwright.model.unused_parameters import unused_parameters
from shardwright.models.adapters.lora import Lora
from shardwright.models.attention import attention_interface as attention
from shardwright.models.experts import experts_interface as experts
from shardwright.models.experts.capacity import Capacity
from shardwright.models.layers.decoder_layers import DecoderLayers, stack_layers, wrap_layers

HALVINGS, SHORTEST = 3, 32  # of the rows of a batch without packing


@dataclass(frozen=True)
class Job:
    """One training job, checked. ``replace(job, recipe=…)`` or ``replace(job, args=…)`` makes a checked neighbour.

    Args:
        recipe: with what the arguments override (:func:`effective_recipe`).
        args: what the run does besides layout.
        devices: devices in the mesh.
        config: the model's.
        model: transformers' own model of ``config`` on meta, as :func:`shardwright.model.meta_model.meta_model` gives
            it.

    Attributes:
        lora: which of ``model``'s weights are adapted; None: all are trained.
        adapted: ``model`` with the factors of ``lora``, on meta; without, ``model`` itself.
        plan: where each of ``adapted``'s parameters goes.
        assembled: the model that runs, on meta: kernels chosen, layers stacked where they are scanned. It is a
            template, and :func:`shardwright.step.build.place_model` fills a copy.
        stored: the plan of ``assembled``'s parameters, as they are stored.
        notice: what a user should know about how the layers run; empty if they run as the recipe says.

    Raises:
        UserError: the recipe's mesh, layouts or compute policy do not fit the model or the arguments.
    """

    recipe: Recipe
    args: TrainingArguments
    devices: int
    config: PretrainedConfig = field(repr=False)
    model: PreTrainedModel = field(repr=False)
    lora: Lora | None = field(init=False, repr=False)
    adapted: PreTrainedModel = field(init=False, repr=False)
    plan: ShardingPlan = field(init=False, repr=False)
    assembled: PreTrainedModel = field(init=False, repr=False)
    stored: ShardingPlan = field(init=False, repr=False)
    notice: str = field(init=False, repr=False)

    @classmethod
    def resolve(
        cls,
        args: TrainingArguments,
        count_devices: Callable[[], int],
        *,
        recipe: Recipe | None = None,
        config: PretrainedConfig | None = None,
    ) -> Job:
        """The job that ``args`` describe. ``count_devices`` is asked last: it may have to open the devices.

        Args:
            recipe: instead of the one that ``args`` name.
            config: instead of that of the model that they name.

        Raises:
            UserError: as the class; no such recipe or model.
        """
        written = None if recipe is None and args.recipe == AUTO else effective_recipe(args, recipe)
        config = config or load_config(args.model, written or UNMADE)
        model = meta_model(config)
        # what the model itself can't do is refused before a device is asked for
        _assemble(written or _made_recipe(args, model), args, model)
        devices = count_devices()
        return cls(written or _made_recipe(args, model, devices), args, devices, config, model)

    def __post_init__(self) -> None:
        model_checks.check_text_part(self.config, self.model)
        lora = lora_options.lora_of(self.args, self.model)
        adapted = self.model if lora is None else lora_options.with_lora(self.model, lora)
        assembled, notice = _assemble(self.recipe, self.args, adapted)
        plan = lora_options.plan_of(self.recipe, self.model, adapted, self.devices, self.args)
        object.__setattr__(self, "lora", lora)
        object.__setattr__(self, "adapted", adapted)
        object.__setattr__(self, "assembled", assembled)
        object.__setattr__(self, "plan", plan)
        object.__setattr__(self, "notice", notice)
        object.__setattr__(self, "stored", _stored(plan, assembled))
        _check_dropless(self)
        model_checks.check_routing(self.args, self.model)
        if lora is not None:
            lora_options.check_use(adapted, self.unused[0], self.args)

    @functools.cached_property
    def whole(self) -> PreTrainedModel:
        """The model of all that a checkpoint holds, on meta: with a multimodal config ``model`` is a part of it."""
        return whole_model(self.config) if is_multimodal(self.config) else self.model

    @functools.cached_property
    def names_in_whole(self) -> dict[str, str]:
        """The whole's name of each of the model's parameters and saved buffers."""
        return names_in_whole(self.model, self.whole) or {}

    @property
    def is_part(self) -> bool:
        """Whether the whole has values that are not trained."""
        return len(self.names_in_whole) < len(self.whole.state_dict())

    @functools.cached_property
    def unused(self) -> tuple[frozenset[str], str | None]:
        """The names of the model's parameters that take no part in the loss, and why that can't be told, if so.

        Raises:
            UserError: none takes part.
        """
        return unused_parameters(self.adapted, self.recipe.compute.router_loss)

    @functools.cached_property
    def untrained(self) -> frozenset[str]:
        """The stored names of the parameters that no gradient reaches, in any layer of a stack."""
        return frozenset(name for name, layers in self.trained.items() if not any(layers))

    @functools.cached_property
    def trained(self) -> dict[str, list[bool]]:
        """Stored name → for each layer of a stack, or the parameter alone, whether a gradient reaches it.

        Raises:
            UserError: none reaches any.
        """
        unused, _ = self.unused
        return {
            entry.name: [entry.trained and name not in unused for name in self.stored.members(entry.name)]
            for entry in self.stored.parameters
        }

    @property
    def micro_batch_rows(self) -> int:
        """Rows of a micro-batch on all devices together."""
        return self.args.per_device_train_batch_size * self.plan.batch_shards

    @property
    def row_lengths(self) -> tuple[int, ...]:
        """The lengths that rows of a training batch may have, in tokens, shortest first; one, but without packing.

        Each is a compile, and a row of fewer tokens than the shortest saves next to nothing.
        """
        length, sharers = self.args.sequence_length, self.devices // self.plan.batch_shards  # of a row
        halves = [length >> n for n in range(HALVINGS + 1) if length % (1 << n) == 0] if not self.args.packing else []
        return tuple(sorted({length} | {half for half in halves if half >= SHORTEST and half % sharers == 0}))

    @property
    def row_shards(self) -> int:
        """What divides the rows of a graph that takes one token of each.

        It is the ways in which the mesh splits a batch's tokens; or the devices, where experts take equally many tokens
        on each of them.
        """
        return self.devices if self.recipe.compute.experts == "dropless" else self.plan.token_shards

    @property
    def evaluation_rows(self) -> int:
        """Rows of an evaluation's batch, on all devices together: those of a micro-batch, or fewer with a capacity.

        An evaluation drops no token, so each expert has a slot for every one. With twice the train step's slots it
        takes no more than that, whose backward keeps a gradient beside each tensor of slots.
        """
        rows, length, compute = self.args.per_device_train_batch_size, self.args.sequence_length, self.recipe.compute
        routing = routing_of(self.model, self.config)
        if compute.experts == "capacity" and routing is not None:
            slots = Capacity(compute.capacity_factor).slots(rows * length, *routing)
            rows = min(rows, max(1, 2 * slots // length))
        return rows * self.plan.batch_shards

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
        """How many numbers the model's parameters are, without factors beside them."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def fingerprint(self) -> dict[str, str]:
        """What must be equal on every host of the job, as texts: the arguments, the recipe, the model, the code.

        Two programs that are not the same and wait for each other would do so for ever.
        """
        own = ("output_dir", "staging_dir")  # which the first host chooses for all, and each for itself
        arguments = {f"--{name}": json.dumps(value) for name, value in self.args.as_dict().items() if name not in own}
        texts = {f"the job's {name}": json.dumps(content, default=str) for name, content in self.as_texts().items()}
        return {
            **arguments,
            "whether --staging_dir is given": str(self.args.staging_dir is not None),
            "the model's config": json.dumps(self.config.to_dict(), default=str),
            "Python": sys.version.split()[0],
            **versions(),
            "Shardwright's code": code_digest(),
            **{name: text for name, text in texts.items() if "training_args" not in name},
        }

    def as_texts(self) -> dict[str, Any]:
        """File name → JSON-able content of what tells, in the output folder, what was run."""
        texts = {
            "recipe.json": self.recipe.as_dict(),
            "training_args.json": self.args.as_dict(),
            "plan.json": self.plan.as_json(),
        }
        if self.lora is not None:
            texts[lora_options.CONFIG] = lora_options.as_config(self.lora, self.model, self.args.model, {})
        return texts


def effective_recipe(args: TrainingArguments, recipe: Recipe | None = None) -> Recipe:
    """``recipe``, or the one that ``args`` name, with what they override (``--mesh``, ``--compute``, ``--bf16``).

    Raises:
        UserError: no such recipe, or an override that it can't take.
    """
    recipe = recipe or load_recipe(args.recipe)
    return _overridden(recipe if args.mesh is None else recipe.with_mesh(args.mesh), args)


def _made_recipe(args: TrainingArguments, model: PreTrainedModel, devices: int | None = None) -> Recipe:
    """The recipe made for ``model``, on the axes that ``--mesh`` asks for, with what else ``args`` override."""
    return _overridden(auto_recipe(model, experts_modules(model), args.mesh, devices).recipe, args)


def _overridden(recipe: Recipe, args: TrainingArguments) -> Recipe:
    if args.compute is not None:
        recipe = recipe.with_compute(args.compute)
    if args.bf16 is not None:
        recipe = replace(recipe, compute=replace(recipe.compute, dtype="bfloat16" if args.bf16 else "float32"))
    return recipe


def _assemble(recipe: Recipe, args: TrainingArguments, model: PreTrainedModel) -> tuple[PreTrainedModel, str]:
    """A copy of ``model`` with kernels chosen and layers stacked; and what a user should know about the layers."""
    model_checks.check_heads(model)
    name = _attention(recipe, args, model)
    if args.isolate_documents:
        model_checks.check_isolation(recipe, model.config, name)
    model_checks.check_split_rows(recipe, model.config, name)
    model_checks.check_positions(args, model)
    model_checks.check_causal(name, model)
    model = copy.deepcopy(model)
    compute = recipe.compute
    attention.choose(model, name)
    model_checks.check_experts(recipe, model)
    if compute.experts is not None:
        experts.choose(model, compute.experts)
    return model, _group_layers(recipe, model)


def _group_layers(recipe: Recipe, model: PreTrainedModel) -> str:
    """Stack or wrap the layers as the recipe says, in place, and return what should be said about it."""
    compute, notice = recipe.compute, ""
    try:
        if compute.scan:
            stack_layers(model)
        elif compute.remat != "none":
            wrap_layers(model)
    except ValueError as error:
        notice = f"its layers run one by one: {error}"
        if compute.remat != "none":
            wrap_layers(model)
    return notice


def _stored(plan: ShardingPlan, model: PreTrainedModel) -> ShardingPlan:
    """The plan of the parameters of ``model``, assembled, from that of the plain model's."""
    for module in model.modules():
        if isinstance(module, DecoderLayers):
            return plan.stacked(module.name, module.stacks, len(module))
    return plan


def _attention(recipe: Recipe, args: TrainingArguments, model: PreTrainedModel) -> str:
    """The name of the recipe's attention in transformers' registry: of our two, the one that the model needs."""
    asked = recipe.compute.attention
    if asked != attention.NAME:
        return asked
    try:
        return our_attention(model, args.sequence_length)
    except attention.Unsupported as error:
        raise UserError(
            asked=f"a model of type {model.config.model_type!r} with attention={asked!r}",
            found=str(error),
            why="it would change the model's numbers",
            instead="--compute attention=eager, which holds the scores of every head",
        ) from error


def _check_dropless(job: Job) -> None:
    tokens = job.micro_batch_rows * job.args.sequence_length
    if job.recipe.compute.experts == "dropless" and tokens % job.devices:
        raise UserError(
            asked=f"recipe {job.recipe.name}: Compute(experts='dropless')",
            found=f"micro-batches of {job.micro_batch_rows} rows × {job.args.sequence_length} tokens on {job.devices} "
            "devices",
            why="every device sorts as many tokens as the next",
            instead=f"--sequence_length {math.ceil(job.args.sequence_length / job.devices) * job.devices}, "
            f"or --per_device_train_batch_size {job.devices // math.gcd(tokens, job.devices)} times as large",
        )
