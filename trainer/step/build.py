"""A job on a mesh → its model, weights and steps: kernels bound to the mesh, activations laid out, state placed.

A run on this process's devices and a lowering without any (an abstract mesh) go the same way.
"""

import copy
import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from shardwright.errors import UserError, a_type
from shardwright.job import Job
from shardwright.layout.mesh import SEQUENCE
from shardwright.layout.partition import PartitionSpec, partition_spec
from shardwright.layout.plan import ShardingPlan
from shardwright.layout.recipe import Layout
from shardwright.model.assembly import modules_of
from shardwright.models.adapters.packings.registry import SCALE
from shardwright.models.attention import attention_interface as attention
from shardwright.models.attention.kernel_layout import KernelLayout
from shardwright.models.experts import experts_interface as experts
from shardwright.models.experts.capacity import Capacity
from shardwright.models.experts.dropless import Dropless
from shardwright.models.experts.expert_families import experts_modules
from shardwright.models.experts.unpacking import unpacking_of
from shardwright.models.layers.decoder_layers import DecoderLayers, number_layers
from shardwright.models.mixers import bind as mixers
from shardwright.models.ops import jax_call, kernel_cost, scopes
from shardwright.models.ops.partial_gradients import SUFFIX
from shardwright.step import eval_step, gradient_reduction, prepare_parameters, router_load, split_rows
from shardwright.step.eval_metrics import Measures
from shardwright.step.loss import Loss, LossFunction
from shardwright.step.placed_model import PlacedModel
from shardwright.weights.place import place_parameters
from shardwright.weights.weight_sources import Source
from shardwright.xla import sharding
from shardwright.xla.device_mesh import DeviceMesh, chip_of, device_order

_LONGEST_RING = 4  # devices along a dimension of the torus: few dimensions are shorter, and all are multiples of it


def place_model(job: Job, mesh: DeviceMesh, source: Source, loss: LossFunction | None = None) -> PlacedModel:
    """The job's model, its weights from ``source`` placed on ``mesh``, and nothing else; ``loss`` replaces its own."""
    model = on_mesh(job, mesh, job.recipe.activations)
    parameters = place_parameters(model, job.stored, mesh, source)
    return PlacedModel(job, mesh, model, parameters, loss_of(job, model, mesh, loss))


def evaluation_step(placed: PlacedModel, measures: Measures | None = None) -> eval_step.EvalStep:
    """``measures`` apply only where the loss is that of tokens."""
    return eval_step.ObjectiveEvalStep(placed) if placed.loss.objective.parts else eval_step.EvalStep(placed, measures)


def on_mesh(job: Job, mesh: DeviceMesh, activations: Mapping[str, Layout]) -> PreTrainedModel:
    """A copy of the job's assembled model, its kernels bound to ``mesh`` and its activations laid out."""
    model = copy.deepcopy(job.assembled)
    _add_scales(model, job.stored)
    _bind_kernels(job, model, mesh)
    scopes.annotate(model)
    if not any(isinstance(module, DecoderLayers) for module in model.modules()):
        number_layers(model)
    for pattern, layout in activations.items():
        for module in modules_of(model, pattern):
            module.register_forward_hook(functools.partial(_constrain_output, pattern, layout, mesh))
    return model


def _add_scales(model: PreTrainedModel, plan: ShardingPlan) -> None:
    """Give ``model``, in place, the scales of its packed weights, on meta: transformers knows of none."""
    for entry in plan.parameters:
        if entry.packed is not None:
            owner, _, key = (entry.name + SCALE).rpartition(".")
            scale = torch.empty(plan[entry.name + SCALE].shape, device="meta")
            model.get_submodule(owner).register_parameter(key, nn.Parameter(scale, requires_grad=False))


def _bind_kernels(job: Job, model: PreTrainedModel, mesh: DeviceMesh) -> None:
    plan, axes, order = job.plan, tuple(job.plan.mesh.items()), device_order(mesh)
    heads = tuple(axis for axis in plan.mesh if axis not in (*plan.batch, SEQUENCE))
    attention.bind(model, KernelLayout(axes, plan.batch, heads, order, plan.sequence))
    mixers.bind(model)
    router_load.watch_routing(job, model, mesh)
    compute, names = job.recipe.compute, job.facts.experts
    if compute.experts not in ("capacity", "dropless"):
        return
    expert_axes = plan[f"{names[0]}.down_proj"].axes_of(0)
    kernel: Capacity | Dropless
    if compute.experts == "capacity":
        kernel = Capacity(
            factor=compute.capacity_factor,
            groups=plan.token_shards,
            batch_axes=plan.token_axes,
            expert_axes=expert_axes,
            constrain=lambda tensor, axes: sharding.constrain(tensor, mesh, tuple(a or None for a in axes)),
        )
    else:
        chip = chip_of(mesh)
        flops_a_byte = 0.0 if chip is None else chip.flops_a_byte
        # of all layers: some may have factors that the first lacks
        keys = {key: name for name in names[::-1] for key, _ in job.adapted.get_submodule(name).named_parameters()}
        kernel = Dropless(
            axes=axes,
            batch_axes=plan.batch,
            expert_axes=expert_axes,
            weight_specs={key: _spec_in_kernel(plan, f"{name}.{key}") for key, name in keys.items()},
            packed=_packed_in_kernel(job),
            order=order,
            keep=not isinstance(compute.remat, str) or compute.remat == "none",
            # a loop over layers would copy them into a stack and back, which takes longer than recomputing them
            keep_all=not compute.scan,
            flops_a_byte=flops_a_byte,
            buffer_bytes=kernel_cost.buffer_bytes(flops_a_byte),
        )
        if jax_call.gathers_beside():
            kernel = kernel.in_rings(_LONGEST_RING)
    experts.bind(model, experts_modules(model), kernel)


def _spec_in_kernel(plan: ShardingPlan, name: str) -> PartitionSpec:
    """The layout in which the kernel of dropless experts gets a parameter: a packed one comes gathered."""
    packed = plan[name].packed
    return plan.specs[name] if packed is None else (plan.specs[name][0], *[None] * (len(packed.used.shape) - 1))


def _packed_in_kernel(job: Job) -> dict[str, Any]:
    """The packed parameters of any of the experts modules, as `Dropless` takes them."""
    dtype = prepare_parameters.compute_dtype(job)
    found = {}
    for name in job.facts.experts:
        for key, _ in job.adapted.get_submodule(name).named_parameters():
            if packed := job.plan[f"{name}.{key}"].packed:
                unpacking = functools.partial(unpacking_of, packed.packing, packed.weight, dtype)
                found[key] = (packed.weight.shape, unpacking)
    return found


def loss_of(job: Job, model: PreTrainedModel, mesh: DeviceMesh, own: LossFunction | None) -> Loss:
    """The model's loss, or ``own`` of its outputs, its parameters cast to the compute dtype and laid out before use."""
    compute = job.recipe.compute
    partials = gradient_reduction.partial_gradients_of(job, model, mesh)
    prepare = prepare_parameters.Prepare(job, mesh, partials)
    inside: frozenset[str] = frozenset()
    for module in model.modules():
        if isinstance(module, DecoderLayers):
            module.configure(prepare.in_a_loop if compute.scan else prepare, compute.remat)
            inside |= frozenset(f"{module.name}.{name}" for name, _ in module.named_parameters())
    kept = partials if compute.reduce_gradients == "step" else {}
    inside |= frozenset(name + SUFFIX for name in kept if name in inside)
    leaves = {name + SUFFIX: partial for name, partial in kept.items()}
    pieces = None if job.plan.sequence is None else split_rows.RowPieces(mesh, job.plan.batch, job.plan.sequence)
    goal, routers = job.args.goal, router_load.router_losses(job)
    further = job.args.mtp_loss_weight if job.args.train_mtp else None
    noise = job.args.neftune_noise_alpha or 0.0
    return Loss(model, prepare, inside, leaves, job.router_loss, goal, routers, own, further, pieces, noise)


def _constrain_output(pattern: str, layout: Layout, mesh: DeviceMesh, module: nn.Module, args: Any, output: Any) -> Any:
    """A forward hook that lays out a module's output, or the first of its outputs, as the line ``pattern`` says."""
    key: Any = next(iter(output), None) if isinstance(output, dict) else 0  # transformers' outputs are dictionaries
    several = isinstance(output, (tuple, list, dict)) and len(output) > 0
    first = output[key] if several else output
    asked = f"activations line {pattern!r}"
    if not isinstance(first, torch.Tensor):
        raise UserError(
            asked=asked,
            found=f"a {type(module).__name__}, whose output is {a_type(first)}",
            why="only a tensor is laid out",
            instead="a line for a module inside it, or around it",
        )
    try:
        spec = partition_spec(layout, first.dim(), tuple(mesh.shape()))
    except UserError as error:
        raise error.retold(asked=f"{asked}: {error.asked}") from None
    placed = sharding.constrain(first, mesh, spec)
    if not several:
        return placed
    if isinstance(output, dict):
        output[key] = placed
        return output
    return type(output)([placed, *output[1:]])
