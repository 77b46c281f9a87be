"""The job of a proof: the run's own recipe and options on a shrunk model, mesh and batch; and what can't be proved."""

import importlib.metadata
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig

from shardwright.arguments.adapter_options import PACKED, SAME
from shardwright.arguments.training import Settings, TrainingArguments
from shardwright.errors import UserError, in_short
from shardwright.job import Job
from shardwright.layout.auto import AUTO, auto_recipe
from shardwright.layout.mesh import Mesh, mesh_factors
from shardwright.layout.recipe import Recipe, matches
from shardwright.model.classifier import reward_config
from shardwright.model.facts import ModelFacts, facts_of
from shardwright.models.tiny import shrunk
from shardwright.prove.formulas import FORMULAS
from shardwright.prove.reference_optimizers import REFEREES
from shardwright.report.units import mesh_text

STEPS, DEVICES = 10, 8
LENGTH, PAIR_LENGTH = 32, 48  # tokens of a row; windows and chunks of a shrunk model are shorter
RATE = 3e-4  # where --learning_rate is not given
_RANK = 4
MOST_TAUGHT = 64  # of the 256 tokens of a shrunk vocabulary
# options that change the loss or the update and that no referee has here, with why
_NO_REFEREE = {
    "train_mtp": "transformers' models leave MTP layers out",
    "neftune_noise_alpha": "the noise is drawn from keys of our own",
    "router_z_loss_coef": "transformers has no such loss",
    "router_balance_coef": "transformers has no such loss",
    "router_bias_update_rate": "transformers moves no biases of routers",
}
_OF_DPO = ("loss_type", "loss_weights", "label_smoothing", "f_divergence_type")  # of which the plain loss is proved


@dataclass(frozen=True)
class SmallJob:
    """The run's job, the proof's, and what the proof's has smaller: (what, the run's, the proof's)."""

    run: Job
    job: Job
    smaller: tuple[tuple[str, str, str], ...]

    @property
    def learning_rate(self) -> float:
        return self.job.args.learning_rate or RATE

    @property
    def referee(self) -> str:
        """The other side, in words."""
        args, version = self.job.args, importlib.metadata.version
        parts = [f"transformers {version('transformers')}, eager, whole, on the CPU", REFEREES[args.optim].title]
        parts += [f"PEFT {version('peft')}"] if args.has_adapter else []
        parts += [f"the formula of {args.entry.title}"] if args.entry.parts else []
        return "; ".join(parts)


def small_job(run: Job) -> SmallJob:
    """The job that proves ``run``; UserError for options that no referee computes, or a model that can't shrink."""
    check_provable(run.args)
    config = small_config(run)
    mesh = small_mesh(run.plan.mesh)
    args = _small_args(run.args)
    if args.gradient_accumulation_steps > 1 and args.goal.groups is not None:
        raise unproved(
            f"--objective {args.objective} with --gradient_accumulation_steps",
            "micro-batches of answers",
            "its formula takes a whole batch",
            "--gradient_accumulation_steps 1",
        )
    try:
        facts = facts_of(config)
    except UserError as error:
        raise unproved(error.asked, error.found, error.why, error.instead) from error
    recipe = _small_recipe(run, facts, Mesh(dcn=None, **mesh))
    more: dict[str, Any] = {"dtype": "float32"}
    if recipe.compute.remat == "auto":
        more["remat"] = "full"
    if recipe.compute.experts == "capacity" and facts.routing is not None:  # nothing is dropped, as in the plain model
        more["capacity_factor"] = facts.routing[1] / facts.routing[0]
    try:
        job = Job(recipe.computing(**more), args, math.prod(mesh.values()), facts)
    except UserError as error:
        raise unproved(error.asked, f"of the shrunk model: {error.found}", error.why, error.instead) from error
    return SmallJob(run, job, tuple(_smaller(run, job)))


def in_bfloat16(run: Job) -> bool:
    """Whether bfloat16 is asked for; a recipe that says nothing computes in it on a TPU alone."""
    return run.recipe.compute.dtype == "bfloat16"


def check_provable(args: TrainingArguments) -> None:
    """Raises UserError for an option that changes the numbers and that nothing outside this program computes."""
    for name, why in _NO_REFEREE.items():
        value = getattr(args, name, None)
        default = TrainingArguments.__dataclass_fields__[name].default
        if value != default:
            raise unproved(
                f"--{name} {value}",
                f"no referee: {why}",
                "a proof compares with what others compute",
                f"no --{name}, which proves all the rest",
            )
    for name, known, of, plain, what in (
        ("optim", REFEREES, "referee", "adamw", "update"),
        ("objective", FORMULAS, "formula", "sft", "loss"),
    ):
        if (value := getattr(args, name)) not in known:
            raise unproved(
                f"--{name} {value}",
                f"no {of} of its {what} here",
                f"there are those of {', '.join(known)}",
                f"--{name} {plain}, which proves all but the {what}",
            )
    defaults = TrainingArguments.__dataclass_fields__
    if args.objective == "dpo" and (odd := [n for n in _OF_DPO if getattr(args, n) not in (None, defaults[n].default)]):
        raise unproved(
            f"--{odd[0]} {getattr(args, odd[0])}",
            "no formula of that loss here",
            "of dpo the loss of its paper is written down",
            f"no --{odd[0]}",
        )
    if args.base_dtype in (*PACKED, SAME):
        raise unproved(
            f"--base_dtype {args.base_dtype}",
            "weights in fewer bits",
            "PEFT's model here has whole weights",
            "--base_dtype bfloat16, which proves all but the packing",
        )


def unproved(asked: str, found: str, why: str, instead: str) -> UserError:
    return UserError(asked=f"to prove {asked}", found=found, why=f"it can't be proved: {why}", instead=instead)


def small_config(run: Job) -> PretrainedConfig:
    """The config of the run's model, shrunk; its text part's where it has several. UserError if it can't be."""
    text = run.model.config.get_text_config()
    if type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise unproved(
            f"a {run.model.config.model_type} model",
            f"{type(run.model).__name__}, and no class of its text alone",
            "the plain model here is one of text alone",
            "the same recipe and options with a model of text of the same layers",
        )
    try:
        return reward_config(shrunk(text)) if run.args.entry.scores_texts else shrunk(text)
    except Exception as error:  # a family's own checks of its config raise what they like
        raise unproved(
            f"a {text.model_type} model",
            in_short(error),
            "its sizes can't be shrunk by rule",
            "a --model with a small config.json of your own",
        ) from error


def small_mesh(sizes: Mapping[str, int]) -> dict[str, int]:
    """Axis → devices, at most :data:`DEVICES` together where that can be: an axis that splits goes on splitting."""
    small = {axis: 1 << (size.bit_length() - 1) for axis, size in sizes.items()}
    while math.prod(small.values()) > DEVICES and max(small.values()) > 2:
        small[max(small, key=lambda axis: small[axis])] //= 2
    return small


def _small_args(args: Settings) -> Settings:
    length = PAIR_LENGTH if args.goal.groups is not None else LENGTH
    more: dict[str, Any] = {"lora_r": min(args.lora_r, _RANK)} if args.lora_r is not None else {}
    if args.rank_pattern is not None:
        more["rank_pattern"] = ",".join(f"{part.partition('=')[0]}=2" for part in args.rank_pattern.split(","))
    if args.has_adapter:
        more["base_dtype"] = "float32"
    if args.objective == "distill":
        more["teacher_top_k"] = min(int(args.goal.numbers["teacher_top_k"]), MOST_TAUGHT)
    return replace(
        args,
        model=None,
        sequence_length=length,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=min(args.gradient_accumulation_steps, 2),
        asked_batch=(),
        steps_of_epochs=0,
        weight_dtype="float32",
        optimizer_dtype="float32",
        max_steps=STEPS,
        num_train_epochs=None,
        warmup_steps=0,
        lr_scheduler_type="constant",
        lr_scheduler_kwargs=None,
        streaming=False,
        sample_prompts=None,
        teacher=None,
        profile_steps=None,
        **more,
    )


def _small_recipe(run: Job, facts: ModelFacts, mesh: Mesh) -> Recipe:
    """The run's recipe on ``mesh``; one that was made from the model is made again from the small one."""
    recipe = run.recipe
    if run.args.recipe == AUTO and recipe.name == AUTO:
        made = auto_recipe(facts.model, facts.experts, mesh_factors(mesh.axes), math.prod(mesh.axes.values())).recipe
        return replace(made, compute=recipe.compute)
    names = [name for name, _ in facts.model.named_parameters()]
    gone = {k: v for k, v in recipe.parameters.items() if not any(matches(k, name) for name in names)}
    kept = {k: v for k, v in recipe.parameters.items() if k not in gone}
    return replace(recipe, mesh=mesh, parameters=kept, optional={**recipe.optional, **gone})


def _smaller(run: Job, job: Job) -> list[tuple[str, str, str]]:
    was, now = run.model.config.get_text_config().to_dict(), job.config.to_dict()
    rows = [
        (name, str(was[name]), str(value))
        for name, value in now.items()
        if name in was and was[name] != value and isinstance(value, int | float) and not name.endswith("_token_id")
    ]
    rows += [
        ("mesh", mesh_text(run.plan.mesh), mesh_text(job.plan.mesh)),
        ("tokens a row", f"{run.args.sequence_length:,}", str(job.args.sequence_length)),
        ("rows a step", f"{run.rows:,}", str(job.rows)),
        ("rank", str(run.args.lora_r), str(job.args.lora_r)),
    ]
    return [row for row in rows if row[1] != row[2]]
