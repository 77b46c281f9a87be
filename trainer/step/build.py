"""A job on a mesh → its model, weights and steps: kernels bound to the mesh, activations laid out, state placed.

There is one way to it, for a run on this process's devices and for a lowering without any (an abstract mesh).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from models import jax_call, mixers, scopes
from models.attention import interface as attention
from models.attention.splash import KernelLayout
from models.experts import interface as experts
from models.experts.capacity import Capacity
from models.experts.dropless import Dropless
from models.experts.routing import selection_biases
from models.layers import DecoderLayers, number_layers
from models.partial_gradients import SUFFIX, Tensors
from trainer.arrays import Array, Stack
from trainer.job import Job
from trainer.layout.partition import partition_spec
from trainer.layout.recipe import Layout, matches
from trainer.layout.stacking import first_name
from trainer.model import experts_modules
from trainer.step.eval_step import EvalStep, PreferenceEvalStep
from trainer.step.loss import Loss
from trainer.step.optimizer import AdamW, decay_names
from trainer.step.placed import Placed
from trainer.step.preference import Preference
from trainer.step.reduction import PartialGradient, partial_gradients_of, token_axes
from trainer.step.routing import make_routing, router_losses, watch_routing
from trainer.step.train_step import StepOptions, TrainStep
from trainer.weights.place import place_parameters
from trainer.weights.sources import Source
from trainer.xla import sharding
from trainer.xla.mesh import DeviceMesh, device_order

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Built:
    """A job on its mesh, ready to run."""

    model: PreTrainedModel
    placed: Placed
    step: TrainStep
    evaluation: EvalStep


def build(job: Job, mesh: DeviceMesh, source: Source, restored: Source | None = None) -> Built:
    """The job's model with its weights from ``source`` placed on ``mesh``, and its steps.

    Args:
        restored: values of moments and metrics, of a run to go on with; see `TrainStep`.
    """
    unused, _ = job.unused  # before anything is placed, since a loss of no parameter is refused
    trained = {e.name: [name not in unused for name in job.stored.members(e.name)] for e in job.stored.parameters}
    model = copy.deepcopy(job.assembled)
    _bind_kernels(job, model, mesh)
    scopes.annotate(model)
    if not any(isinstance(module, DecoderLayers) for module in model.modules()):
        number_layers(model)
    for pattern, layout in job.recipe.activations.items():
        for name, module in model.named_modules():
            if matches(pattern, name):
                module.register_forward_hook(_constrain_output(layout, mesh))
    parameters = place_parameters(model, job.stored, mesh, source)
    placed = Placed(mesh, job.recipe.batch, parameters, job.stored.specs)
    loss, args = _make_loss(job, model, mesh), job.args
    optimizer = AdamW(args.adam_beta1, args.adam_beta2, args.adam_epsilon, args.weight_decay, decay_names(model))
    options = StepOptions(
        args.gradient_accumulation_steps, args.max_grad_norm, args.state_dtypes["optimizer_dtype"], args.seed
    )
    moments = restored and _with_zeros(job, restored)
    step = TrainStep(loss, placed, optimizer, options, moments, make_routing(job, model, placed), trained)
    objective = loss.objective
    evaluation = (
        PreferenceEvalStep(loss, placed, objective) if isinstance(objective, Preference) else EvalStep(loss, placed)
    )
    return Built(model, placed, step, evaluation)


def _with_zeros(job: Job, restored: Source) -> Source:
    """``restored``, with zeros for the moments of what took no part in the loss when they were saved: it had none."""

    def source(name: str) -> Array:
        parameter, _, moment = name.partition(" ")
        members, layers = job.stored.members(parameter) if moment else [], []
        try:
            return restored(name)
        except KeyError:
            if not members:
                raise
        entry = job.stored[parameter]
        for member in members:
            try:
                layers.append(restored(f"{member} {moment}"))
            except KeyError:
                shape = entry.shape if members == [parameter] else entry.shape[1:]
                layers.append(torch.zeros(()).expand(shape))
        return layers[0] if members == [parameter] else Stack(layers)

    return source


def _bind_kernels(job: Job, model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Tell the model's kernels how their tensors lie on ``mesh``."""
    plan, axes, order = job.plan, tuple(job.plan.mesh.items()), device_order(mesh)
    heads = tuple(axis for axis in plan.mesh if axis not in plan.batch)
    attention.bind(model, KernelLayout(axes, plan.batch, heads, order))
    mixers.bind(model)
    watch_routing(job, model, mesh)
    names = experts_modules(job.model)
    if job.recipe.compute.experts not in ("capacity", "dropless"):
        return
    expert_axes = plan[f"{names[0]}.down_proj"].axes_of(0)
    kernel: Capacity | Dropless
    if job.recipe.compute.experts == "capacity":
        kernel = Capacity(
            factor=job.recipe.compute.capacity_factor,
            groups=plan.batch_shards,
            batch_axes=plan.batch,
            expert_axes=expert_axes,
            constrain=lambda tensor, axes: sharding.constrain(tensor, mesh, tuple(a or None for a in axes)),
        )
    else:
        keys = [key for key, _ in job.adapted.get_submodule(names[0]).named_parameters()]
        kernel = Dropless(
            axes=axes,
            batch_axes=plan.batch,
            expert_axes=expert_axes,
            weight_specs={key: plan.specs[f"{names[0]}.{key}"] for key in keys},
            order=order,
        )
    experts.bind(model, experts_modules(model), kernel)


def _make_loss(job: Job, model: PreTrainedModel, mesh: DeviceMesh) -> Loss:
    """The model's loss, its parameters cast to the compute dtype and laid out just before use."""
    compute = job.recipe.compute
    partials = partial_gradients_of(job, model, mesh)
    prepare = _Prepare(job, mesh, partials)
    inside: frozenset[str] = frozenset()
    for module in model.modules():
        if isinstance(module, DecoderLayers):
            module.configure(prepare, compute.remat)
            inside |= frozenset(f"{module.name}.{name}" for name, _ in module.named_parameters())
    kept = partials if compute.reduce_gradients == "step" else {}
    inside |= frozenset(name + SUFFIX for name in kept if name in inside)
    leaves = {name + SUFFIX: partial for name, partial in kept.items()}
    return Loss(model, prepare, inside, leaves, compute.router_loss, router_losses(job), _objective(job))


def _objective(job: Job) -> Preference | None:
    """What the job learns besides the next token; None: nothing."""
    args = job.args
    pairs = args.most_pairs(args.sequence_length)
    return Preference(args.objective, args.beta, args.simpo_gamma, pairs) if pairs else None


class _Prepare:
    """(name, parameter) → what the forward uses, by name: the parameter cast and laid out, and its gradient's leaf."""

    def __init__(self, job: Job, mesh: DeviceMesh, partials: dict[str, PartialGradient]) -> None:
        self.job, self.mesh, self.partials = job, mesh, partials
        default = "bfloat16" if jax_call.target() == "tpu" else "float32"
        self.dtype = DTYPES[job.recipe.compute.dtype or default]
        self.experts_inside = experts_modules(job.assembled)
        self.biases = selection_biases(job.model, experts_modules(job.model))

    def __call__(self, name: str, parameter: torch.Tensor) -> Tensors:
        if name.endswith(SUFFIX):
            spec = self.partials[name.removesuffix(SUFFIX)].spec
            return {name: sharding.constrain(parameter, self.mesh, spec[-parameter.dim() :])}
        # cast first, so that what is gathered across devices is the smaller dtype
        entry, partial = self.job.plan[first_name(name)], self.partials.get(name)
        # what routers add for selection stays as it is: in bfloat16 a step of 0.001 would be lost
        cast = parameter if entry.name in self.biases else parameter.to(self.dtype)
        placed = self._constrain(cast, entry.layout)
        recipe = self.job.recipe
        if recipe.compute.experts == "dropless" and name.rpartition(".")[0] in self.experts_inside:
            return {name: placed}  # the kernel gathers it itself
        # Then whole along the axes that split the tokens, and said so: this gathers the weight, and reduces its
        # gradient. Left to itself the partitioner gathers the tokens of the whole batch where that seems shorter.
        split = token_axes(name, entry, recipe, self.experts_inside)
        whole = {axis: placement for axis, placement in entry.layout.items() if axis not in split}
        prepared = {name: self._constrain(placed, whole)}
        if partial is not None and partial.scatters:
            prepared[name + SUFFIX] = partial.layer.leaf(placed)
        return prepared

    def _constrain(self, tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
        return sharding.constrain(tensor, self.mesh, partition_spec(layout, tensor.dim(), tuple(self.mesh.shape())))


def _constrain_output(layout: Layout, mesh: DeviceMesh) -> Callable[[nn.Module, Any, Any], Any]:
    """A forward hook that lays out a module's output, or the first of its outputs."""

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        several = isinstance(output, (tuple, list))
        first = output[0] if several else output
        placed = sharding.constrain(first, mesh, partition_spec(layout, first.dim(), tuple(mesh.shape())))
        return type(output)([placed, *output[1:]]) if several else placed

    return hook
