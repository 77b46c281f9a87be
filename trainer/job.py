"""Job: a run resolved once and handed on whole: recipe, arguments, config, model on meta, plan.

It refuses whatever can be refused without data, weights or a device. It reads only the recipe and the config, and
allocates nothing.
"""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from shardwright.arguments.adapter_options import SAME
from shardwright.arguments.training import Settings, TrainingArguments
from shardwright.errors import UserError
from shardwright.files.hub_names import pinned
from shardwright.hosts.versions import versions
from shardwright.layout.auto import AUTO, UNMADE, auto_recipe
from shardwright.layout.copies import fitted
from shardwright.layout.load_recipe import load_recipe
from shardwright.layout.plan import ShardingPlan
from shardwright.layout.recipe import Recipe
from shardwright.model import assembly, lora_options, meta_model, model_checks, peft_config, unused_parameters
from shardwright.model.classifier import reward_config
from shardwright.model.facts import ModelFacts, facts_of
from shardwright.model.trained_rows import rows_needed
from shardwright.models.adapters.lora import Lora
from shardwright.models.experts.capacity import Capacity
from shardwright.models.layers.decoder_layers import DecoderLayers
from shardwright.objectives.objective import RecordShape

# rows that are not packed: the most halvings of their length, each of which costs a compile, and their fewest tokens
HALVINGS, SHORTEST = 3, 32


@dataclass(frozen=True)
class Job:
    """One training job, checked. ``replace(job, recipe=…)`` or ``replace(job, args=…)`` makes a checked neighbour.

    A neighbour shares the model's facts, which hold every result of trying the model. ``recipe`` has the overrides
    ``--mesh``, ``--compute`` and ``--bf16`` of ``args``. It may have got an axis ``data`` to fit so many devices; then
    ``copies`` is the reason, in words.

    Raises:
        UserError: the recipe's mesh, layouts or compute policy do not fit the model or the arguments.
    """

    recipe: Recipe
    args: Settings
    devices: int
    facts: ModelFacts = field(repr=False)
    copies: str = ""

    @classmethod
    def resolve(
        cls,
        args: TrainingArguments,
        count_devices: Callable[[], int],
        *,
        recipe: Recipe | None = None,
        config: PretrainedConfig | None = None,
    ) -> Job:
        """The job that ``args`` describe, with ``recipe`` and ``config`` in place of theirs; raises as the class."""
        settings = Settings.of(args)
        if config is None and settings.model is not None:  # from here on all of it is of one commit
            settings = replace(settings, model=pinned(settings.model))
        written = _written_recipe(args, recipe)
        config = config or meta_model.load_config(settings.model, written or UNMADE)
        facts = facts_of(reward_config(config) if args.entry.scores_texts else config, args.train_mtp)
        facts = lora_options.with_adapters_tokens(args, facts)
        # a job that the model can't do is refused before a device is asked for, which may have to open the devices
        model_checks.check_model(written or _made_recipe(args, facts), settings, facts)
        devices = count_devices()
        used, copies = fitted(written or _made_recipe(args, facts, devices), facts.model, devices)
        return cls(used, settings, devices, facts, copies)

    def for_records(self, shapes: Sequence[RecordShape]) -> Job:
        """The job of a run on records of ``shapes``: samples, and texts with a row each, are told apart.

        Raises UserError if the model can't tell samples of one row apart.
        """
        if self.args.isolate_documents or (self.args.packing and all(shape.is_text for shape in shapes)):
            return self
        try:
            return replace(self, args=replace(self.args, isolate_documents=True, isolates_samples=True))
        except UserError:
            if self.args.packing:
                raise
            return self  # a row is one sample, and a model that can't tell two apart need not

    def __post_init__(self) -> None:
        model_checks.check_model(self.recipe, self.args, self.facts)
        _ = self.stored
        for pattern in self.recipe.activations:
            assembly.modules_of(self.assembled, pattern)
        rows, length, devices = self.micro_batch_rows, self.args.sequence_length, self.devices
        if self.recipe.compute.experts == "dropless" and rows * length % devices:
            raise UserError(
                asked=f"recipe {self.recipe.name}: Compute(experts='dropless')",
                found=f"micro-batches of {rows} rows × {length} tokens on {devices} devices",
                why="every device sorts as many tokens as the next",
                instead=f"--sequence_length {math.ceil(length / devices) * devices}, "
                f"or --per_device_train_batch_size {self._divided_rows}",
            )
        if self.lora is not None:
            lora_options.check_use(self.adapted, self.unused[0], self.args)

    @property
    def _divided_rows(self) -> int:
        """The least multiple of ``--per_device_train_batch_size`` whose tokens the devices divide."""
        tokens, devices = self.micro_batch_rows * self.args.sequence_length, self.devices
        return self.args.per_device_train_batch_size * (devices // math.gcd(tokens, devices))

    @property
    def config(self) -> PretrainedConfig:
        return self.facts.config

    @property
    def model(self) -> PreTrainedModel:
        """transformers' own model on meta."""
        return self.facts.model

    @functools.cached_property
    def lora(self) -> Lora | None:
        """The weights that LoRA adapts; None: the whole model is trained."""
        return lora_options.lora_of(self.args, self.facts, self.router_loss)

    @property
    def adapter_held(self) -> dict[str, Any]:
        """The factors as the folder of ``--adapter`` describes them, for a cache's key; empty without one."""
        return asdict(self.lora) if self.args.adapter is not None and self.lora is not None else {}

    @property
    def rows_needed(self) -> dict[str, int]:
        """The rows of the whole's embeddings that the base must have, where the adapter has others."""
        return rows_needed(self.lora if self.args.adapter is not None else None, self.facts.part)

    @property
    def packed_as_published(self) -> list[str]:
        """The weights that are packed as the checkpoint has them, by their names in the whole."""
        if self.args.base_dtype != SAME:
            return []
        whole = self.facts.names_in_whole
        return [whole.get(entry.name, entry.name) for entry in self.plan.parameters if entry.packed]

    @property
    def adapted(self) -> PreTrainedModel:
        """The model with the factors of ``lora``, on meta; without, the model itself."""
        return self.facts.adapted(self.lora)

    @functools.cached_property
    def plan(self) -> ShardingPlan:
        """The layout of each of the adapted model's parameters."""
        return lora_options.plan_of(self.recipe, self.facts, self.lora, self.devices, self.args)

    @functools.cached_property
    def _assembled(self) -> tuple[PreTrainedModel, str]:
        """:attr:`assembled`, and why its layers run one by one although the recipe scans them."""
        compute, why = self.recipe.compute, ""
        chosen = self.lora, model_checks.attention_of(self.recipe, self.args, self.facts), compute.experts
        if compute.scan:
            stacked, why = assembly.assembled(self.facts, *chosen, "stacked")
            if not why or compute.remat == "none":
                return stacked, why
        return assembly.assembled(self.facts, *chosen, "plain" if compute.remat == "none" else "wrapped")[0], why

    @property
    def assembled(self) -> PreTrainedModel:
        """The model that runs, on meta, kernels chosen and scanned layers stacked: a template for steps to copy."""
        return self._assembled[0]

    @property
    def notices(self) -> list[str]:
        """Lines for the user of what runs otherwise than the recipe and the options say."""
        found = [f"its layers run one by one: {self._assembled[1]}"] if self._assembled[1] else []
        if self.recipe.compute.router_loss and not self.router_loss:
            found.append("router_loss has no effect: transformers' sequence classification adds none (nor does trl)")
        elif self.router_loss and not hasattr(self.model.config, "output_router_logits"):
            found.append(f"router_loss has no effect: transformers' {type(self.model).__name__} has none")
        return [*found, *self.args.idle]

    @property
    def base(self) -> str | None:
        """The ``--model`` whose weights the run starts from; None: it starts from others."""
        return self.args.model if meta_model.means_weights(self.args.model, self.args.from_scratch) else None

    @functools.cached_property
    def router_loss(self) -> bool:
        """Whether the model's own load-balancing loss is part of the loss."""
        return self.recipe.compute.router_loss and not self.facts.scores_texts

    @functools.cached_property
    def stored(self) -> ShardingPlan:
        """The plan of the assembled model's parameters, as they are stored."""
        for module in self.assembled.modules():
            if isinstance(module, DecoderLayers):
                return self.plan.stacked(module.name, module.stacks, module.depth)
        return self.plan

    @property
    def unused(self) -> tuple[frozenset[str], str | None]:
        """Names of the parameters with no part in the loss, and why, if that can't be told; UserError if it is all."""
        return unused_parameters.unused_parameters(self.facts, self.lora, self.router_loss)

    @functools.cached_property
    def untrained(self) -> frozenset[str]:
        """Stored names of the parameters that no gradient reaches, in any layer of a stack."""
        return frozenset(name for name, layers in self.trained.items() if not any(layers))

    @functools.cached_property
    def trained(self) -> dict[str, list[bool]]:
        """Stored name → whether a gradient reaches it, for each layer of a stack; raises as :attr:`unused`."""
        unused, entries = self.unused[0], self.stored.parameters
        return {e.name: [e.trained and name not in unused for name in self.stored.members(e.name)] for e in entries}

    @functools.cached_property
    def micro_batch_rows(self) -> int:
        """Rows of a micro-batch, on all devices together."""
        return self.args.per_device_train_batch_size * self.plan.batch_shards

    @functools.cached_property
    def row_lengths(self) -> tuple[int, ...]:
        """Lengths that a training batch's rows may have, in tokens, shortest first; with packing only one."""
        length, sharers = self.args.sequence_length, self.devices // self.plan.batch_shards  # devices that share a row
        halves = [length >> n for n in range(HALVINGS + 1) if length % (1 << n) == 0] if not self.args.packing else []
        return tuple(sorted({length} | {half for half in halves if half >= SHORTEST and half % sharers == 0}))

    @property
    def row_shards(self) -> int:
        """Batch divisor of a decode step: the shards of a batch's tokens, or every device for dropless experts."""
        return self.devices if self.recipe.compute.experts == "dropless" else self.plan.token_shards

    @functools.cached_property
    def evaluation_rows(self) -> int:
        """Rows of an evaluation batch: a micro-batch's, or fewer with a capacity.

        An evaluation drops no token, so each expert has a slot for every one. Limited to twice the train step's slots
        it takes no more memory than that step, whose backward keeps a gradient beside each tensor of slots.
        """
        rows, length, compute = self.args.per_device_train_batch_size, self.args.sequence_length, self.recipe.compute
        if compute.experts == "capacity" and self.facts.routing is not None:
            slots = Capacity(compute.capacity_factor).slots(rows * length, *self.facts.routing)
            rows = min(rows, max(1, 2 * slots // length))
        return rows * self.plan.batch_shards

    @functools.cached_property
    def rows(self) -> int:
        """Rows of a step: of all its micro-batches."""
        return self.micro_batch_rows * self.args.gradient_accumulation_steps

    @functools.cached_property
    def tokens(self) -> int:
        return self.rows * self.args.sequence_length

    def training_flops(self, length: int) -> float | None:
        """`ModelFacts.training_flops` of a step on rows of ``length`` tokens, with the adapter if there is one."""
        return self.facts.training_flops(self.rows, length, self.lora)

    def fingerprint(self) -> dict[str, str]:
        """Texts that must be equal on all hosts, or they would wait for each other for ever: arguments, code, …"""
        own = ("output_dir", "staging_dir")  # the first host chooses the output folder; staging is each host's own
        arguments = {f"--{name}": json.dumps(value) for name, value in self.args.as_dict().items() if name not in own}
        texts = {f"the job's {name}": json.dumps(content, default=str) for name, content in self.as_texts().items()}
        del texts["the job's training_args.json"]
        return {
            **arguments,
            "whether --staging_dir is given": str(self.args.staging_dir is not None),
            "the model's config": json.dumps(self.config.to_dict(), default=str),
            "Python": sys.version.split()[0],
            **versions(),
            **texts,
        }

    def as_texts(self) -> dict[str, Any]:
        """File name → JSON content of the files in the output folder that record the run."""
        recipe, args, plan = self.recipe.as_dict(), self.args.as_dict(), self.plan.as_json()
        texts = {"recipe.json": recipe, "training_args.json": args, "plan.json": plan}
        if self.lora is not None:
            texts[peft_config.CONFIG] = peft_config.as_config(self.lora, self.model, self.base, {})
        return texts


def _written_recipe(args: TrainingArguments, recipe: Recipe | None) -> Recipe | None:
    """``recipe``, or the one that ``args`` name, with their overrides; None: it is to be made for the model."""
    if recipe is None and args.recipe == AUTO:
        return None
    recipe = recipe or load_recipe(args.recipe)
    return _overridden(recipe if args.mesh is None else recipe.with_mesh(args.mesh), args)


def _made_recipe(args: TrainingArguments, facts: ModelFacts, devices: int | None = None) -> Recipe:
    return _overridden(auto_recipe(facts.model, facts.experts, args.mesh, devices).recipe, args)


def _overridden(recipe: Recipe, args: TrainingArguments) -> Recipe:
    if args.compute is not None:
        recipe = recipe.with_compute(args.compute)
    if args.bf16 is not None:
        recipe = recipe.computing(dtype="bfloat16" if args.bf16 else "float32")
    return recipe
