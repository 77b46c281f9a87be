"""Recipe + plan + config → the train step: kernels chosen, layers stacked, activations laid out, state placed.

One way to it, for a run on the mesh's devices and for a lowering without them (an abstract mesh).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch_xla.distributed.spmd as xs
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from models import jax_call, layers, scopes
from models.attention import interface as attention_interface
from models.attention.interface import NAME
from models.attention.splash import KernelLayout
from models.experts import interface as experts_interface
from models.experts.capacity import Capacity
from models.experts.dropless import Dropless
from models.partial_gradients import SUFFIX
from trainer.arguments import TrainingArguments
from trainer.errors import UserError
from trainer.layout.partition import partition_spec
from trainer.layout.plan import ShardingPlan
from trainer.layout.recipe import Layout, Recipe, matches
from trainer.model import experts_modules, meta_model
from trainer.step.loss import Loss
from trainer.step.optimizer import AdamW, decay_names
from trainer.step.reduction import partial_gradients_of, token_axes
from trainer.step.train_step import TrainStep
from trainer.weights.place import place_parameters
from trainer.weights.sources import Source
from trainer.xla import sharding
from trainer.xla.mesh import device_order

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Assembly:
    """A model ready to train: ``plan`` is that of ``parameters`` as they are stored."""

    model: PreTrainedModel
    plan: ShardingPlan
    parameters: dict[str, torch.Tensor]
    loss: Loss
    step: TrainStep


def build(
    recipe: Recipe,
    args: TrainingArguments,
    config: PretrainedConfig,
    plain_plan: ShardingPlan,
    mesh: xs.Mesh,
    source: Source,
    restored: Source | None = None,
) -> Assembly:
    """The model with its weights from ``source`` placed on ``mesh``, and its train step.

    Args:
        restored: values of moments and metrics, of a run to go on with; see `TrainStep`.

    Raises:
        UserError: the recipe's compute policy does not fit the model.
    """
    if args.isolate_documents and recipe.compute.attention != NAME:
        raise UserError(
            asked=f"--isolate_documents with attention={recipe.compute.attention!r}",
            found="an attention of transformers' own",
            why="it does not know documents by their segment_ids: tokens would see other documents",
            instead=f"attention={NAME!r}, the default",
        )
    model, plan = assemble(recipe, plain_plan, config, mesh)
    parameters = place_parameters(model, plan, mesh, source)
    loss = make_loss(model, recipe, plain_plan, mesh)
    step = TrainStep(
        loss,
        parameters,
        {p.name: partition_spec(p.layout, len(p.shape), tuple(plan.mesh)) for p in plan.parameters},
        mesh,
        recipe.batch,
        AdamW(args.adam_beta1, args.adam_beta2, args.adam_epsilon, args.weight_decay, decay_names(model)),
        accumulation=args.gradient_accumulation_steps,
        max_grad_norm=args.max_grad_norm,
        moment_dtype=args.state_dtypes["optimizer_dtype"],
        restored=restored,
        seed=args.seed,
    )
    return Assembly(model, plan, parameters, loss, step)


def assemble(
    recipe: Recipe, plain_plan: ShardingPlan, config: PretrainedConfig, mesh: xs.Mesh
) -> tuple[PreTrainedModel, ShardingPlan]:
    """The model to run, on meta, and the plan of its parameters as they are stored (stacked, where layers are scanned).

    Args:
        plain_plan: the plan of transformers' own model of ``config``.

    Raises:
        UserError: the recipe's compute policy does not fit the model.
    """
    compute, model, plan = recipe.compute, meta_model(config), plain_plan
    model.set_attn_implementation(compute.attention)
    if compute.attention == NAME:
        attention_interface.bind(model, _kernel_layout(plain_plan, mesh))
    if compute.experts is not None:
        _set_experts(recipe, plain_plan, model, mesh)
    try:
        if compute.scan:
            plan = plan.stacked(*layers.stack_layers(model))
        elif compute.remat != "none":
            layers.wrap_layers(model)
    except ValueError as error:
        raise UserError(
            asked=f"recipe {recipe.name}: Compute(scan={compute.scan}, remat={compute.remat!r})",
            found=str(error),
            why="only equal layers, in a list named `layers`, run as one",
            instead='Compute(scan=False, remat="none"), which leaves the model as it is',
        ) from error
    scopes.annotate(model)
    for pattern, layout in recipe.activations.items():
        for name, module in model.named_modules():
            if matches(pattern, name):
                module.register_forward_hook(_constrain_output(layout, mesh, tuple(plan.mesh)))
    return model, plan


def make_loss(model: PreTrainedModel, recipe: Recipe, plain_plan: ShardingPlan, mesh: xs.Mesh) -> Loss:
    """The loss of an assembled model: its parameters cast to the compute dtype and laid out just before use."""
    dtype = DTYPES[recipe.compute.dtype or ("bfloat16" if jax_call.target() == "tpu" else "float32")]
    axes = tuple(plain_plan.mesh)
    partials = partial_gradients_of(model, recipe, plain_plan, mesh)
    experts_inside = experts_modules(model)

    def prepare(name: str, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        if name.endswith(SUFFIX):
            spec = partials[name.removesuffix(SUFFIX)].spec
            return {name: sharding.constrain(parameter, mesh, spec[-parameter.dim() :])}
        # cast first: what is gathered across devices is then the smaller dtype
        entry, partial = plain_plan[name.replace(".*.", ".0.")], partials.get(name)
        placed = sharding.constrain(parameter.to(dtype), mesh, partition_spec(entry.layout, len(entry.shape), axes))
        if recipe.compute.experts == "dropless" and name.rpartition(".")[0] in experts_inside:
            return {name: placed}  # it gathers them itself
        # Then whole along the axes that split the tokens, and said so: a gather of the weight, and for its gradient a
        # reduction. Left to itself the partitioner gathers the tokens of the whole batch where that seems shorter.
        split = token_axes(name, entry, recipe, experts_inside)
        whole = {axis: placement for axis, placement in entry.layout.items() if axis not in split}
        prepared = {name: sharding.constrain(placed, mesh, partition_spec(whole, len(entry.shape), axes))}
        if partial is not None and partial.scatters:
            prepared[name + SUFFIX] = partial.layer.leaf(placed)
        return prepared

    inside: frozenset[str] = frozenset()
    for module in model.modules():
        if isinstance(module, layers.DecoderLayers):
            module.configure(prepare, recipe.compute.remat)
            inside |= frozenset(f"{module.name}.{name}" for name, _ in module.named_parameters())
    kept = partials if recipe.compute.reduce_gradients == "step" else {}
    inside |= frozenset(name + SUFFIX for name in kept if name in inside)
    return Loss(
        model, prepare, inside, {name + SUFFIX: partial for name, partial in kept.items()}, recipe.compute.router_loss
    )


def _set_experts(recipe: Recipe, plan: ShardingPlan, model: PreTrainedModel, mesh: xs.Mesh) -> None:
    names = experts_modules(model)
    if not names:
        raise UserError(
            asked=f"recipe {recipe.name}: Compute(experts={recipe.compute.experts!r})",
            found=f"{type(model).__name__} has no experts",
            why="there is nothing to route tokens to",
            instead="Compute(experts=None), or a mixture-of-experts model",
        )
    kind = str(recipe.compute.experts)
    model.set_experts_implementation(kind)
    if kind == "dense":
        return
    expert_axes = plan[f"{names[0]}.down_proj"].axes_of(0)
    kernel: Capacity | Dropless
    if kind == "capacity":
        kernel = Capacity(
            factor=recipe.compute.capacity_factor,
            groups=plan.batch_shards,
            batch_axes=recipe.batch,
            expert_axes=expert_axes,
            constrain=lambda tensor, axes: sharding.constrain(tensor, mesh, tuple(a or None for a in axes)),
        )
    else:
        parameters = [key for key, _ in model.get_submodule(names[0]).named_parameters()]
        entries = {key: plan[f"{names[0]}.{key}"] for key in parameters}
        specs = {key: partition_spec(e.layout, len(e.shape), tuple(plan.mesh)) for key, e in entries.items()}
        kernel = Dropless(
            axes=tuple(plan.mesh.items()),
            batch_axes=recipe.batch,
            expert_axes=expert_axes,
            weight_specs=specs,
            order=device_order(mesh),
        )
    experts_interface.bind(model, names, kernel)


def _kernel_layout(plan: ShardingPlan, mesh: xs.Mesh) -> KernelLayout:
    """How the attention kernel's inputs lie on ``mesh``: rows split by the batch axes, heads by the others."""
    heads = tuple(axis for axis in plan.mesh if axis not in plan.batch)
    return KernelLayout(tuple(plan.mesh.items()), plan.batch, heads, device_order(mesh))


def _constrain_output(layout: Layout, mesh: xs.Mesh, axes: tuple[str, ...]) -> Callable[[nn.Module, Any, Any], Any]:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        first = output[0] if isinstance(output, tuple) else output
        placed = sharding.constrain(first, mesh, partition_spec(layout, first.dim(), axes))
        return (placed, *output[1:]) if isinstance(output, tuple) else placed

    return hook
