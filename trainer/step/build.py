"""A job on a mesh → its model, weights and steps: kernels bound to the mesh, activations laid out, state placed.

There is one way to it, for a run on this process's devices and for a lowering without any (an abstract mesh).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from models import jax_call, kernel_work, mixers, scopes
from models.attention import interface as attention
from models.attention.kernel_layout import KernelLayout
from models.experts import interface as experts
from models.experts.capacity import Capacity
from models.experts.dropless import Dropless
from models.experts.routing import selection_biases
from models.in_turn import prepare_in_turn
from models.int8 import SCALE, from_int8
from models.layers import DecoderLayers, number_layers
from models.partial_gradients import SUFFIX, Tensors
from models.stored_layout import as_stored
from trainer.arrays import Array, Stack
from trainer.job import Job
from trainer.layout.mesh import SEQUENCE
from trainer.layout.partition import partition_spec
from trainer.layout.plan import ShardingPlan
from trainer.layout.recipe import Layout, matches
from trainer.layout.stacking import first_name, is_stacked
from trainer.model import experts_modules
from trainer.step.decoders import CachedDecoder, RowDecoder, unstacked
from trainer.step.eval_step import EvalStep, PreferenceEvalStep
from trainer.step.generate import GenerationShape, Generator, Sampling, can_cache, check_positions
from trainer.step.loss import Loss, LossFunction
from trainer.step.measures import Measures
from trainer.step.optimizer import make_optimizer
from trainer.step.placed import Placed
from trainer.step.preference import Preference
from trainer.step.reduction import PartialGradient, partial_gradients_of, token_axes
from trainer.step.routing import make_routing, router_losses, watch_routing
from trainer.step.row_pieces import RowPieces
from trainer.step.spikes import spike_watch
from trainer.step.train_step import StepOptions, TrainStep
from trainer.weights.live import LiveWeights
from trainer.weights.place import place_buffers, place_parameters
from trainer.weights.sources import Source
from trainer.xla import sharding
from trainer.xla.mesh import DeviceMesh, chip_of, device_order

_LONGEST_RING = 4  # it lies along one dimension of the torus: few are shorter, and all are its multiples
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Built:
    """A job on its mesh, ready to run."""

    model: PreTrainedModel
    placed: Placed
    step: TrainStep
    evaluation: EvalStep


def build(
    job: Job,
    mesh: DeviceMesh,
    source: Source,
    restored: Source | None = None,
    *,
    compute_loss: LossFunction | None = None,
    measures: Measures | None = None,
) -> Built:
    """The job's model with its weights from ``source`` placed on ``mesh``, and its steps.

    Args:
        restored: values of the optimizer's state and of metrics, of a run to go on with; see `TrainStep`.
        compute_loss: in place of the model's loss; see `Loss`.
        measures: what an evaluation measures beside the loss.
    """
    trained = job.trained  # before anything is placed, since a loss of no parameter is refused
    evaluation = build_evaluation(job, mesh, source, compute_loss=compute_loss, measures=measures)
    loss, placed, args = evaluation.loss, evaluation.placed, job.args
    optimizer = make_optimizer(args, job.stored, mesh, loss.model)
    options = StepOptions(
        args.gradient_accumulation_steps,
        args.max_grad_norm,
        args.state_dtypes["optimizer_dtype"],
        args.seed,
        job.row_lengths,
        spike_watch(args),
    )
    moments = restored and _with_zeros(job, restored)
    step = TrainStep(loss, placed, optimizer, options, moments, make_routing(job, loss.model, placed), trained)
    return Built(loss.model, placed, step, evaluation)


def build_evaluation(
    job: Job,
    mesh: DeviceMesh,
    source: Source,
    *,
    compute_loss: LossFunction | None = None,
    measures: Measures | None = None,
) -> EvalStep:
    """The job's model with its weights from ``source`` placed on ``mesh``, to be evaluated: nothing else is placed."""
    model = _on_mesh(job, mesh, job.recipe.activations)
    parameters = place_parameters(model, job.stored, mesh, source)
    placed = Placed(mesh, job.recipe.batch, parameters, job.stored.specs)
    loss = _make_loss(job, model, mesh, compute_loss)
    if isinstance(loss.objective, Preference):
        return PreferenceEvalStep(loss, placed, loss.objective)
    return EvalStep(loss, placed, measures)


def build_generator(job: Job, step: EvalStep, shape: GenerationShape, sampling: Sampling) -> Generator:
    """What continues texts with the model and the weights of ``step``, which stay where they are.

    With a cache the layers run one by one, each on its slice of a stack: a cache is a tensor for each layer. Where
    transformers has no cache of one shape for the model, each token is computed from the whole row.

    Raises:
        UserError: the model has not as many positions as ``shape``.
    """
    mesh, batch = step.placed.mesh, job.recipe.batch
    heads = tuple(axis for axis in job.plan.mesh if axis not in (*batch, SEQUENCE))
    check_positions(job.model, shape.length)
    if not can_cache(job.model):
        return Generator(RowDecoder(step.loss, step.placed, shape, sampling), shape)
    plain = replace(job, recipe=replace(job.recipe, compute=replace(job.recipe.compute, scan=False, remat="none")))
    by_rows = {
        pattern: {axis: placement for axis, placement in layout.items() if placement.is_shard(0)}
        for pattern, layout in job.recipe.activations.items()
    }
    model = _on_mesh(plain, mesh, by_rows)  # a decoded token has no sequence to split
    attention.choose(model, attention.MASKED)
    live = LiveWeights(step.loss.model, job.stored, mesh, step.placed.parameters)

    def parameters() -> Tensors:
        place_buffers(model, mesh, live)
        return unstacked(job.stored, step.placed.parameters)

    loss = _make_loss(plain, model, mesh, None)
    loss.pieces = None
    loss.inside = prepare_in_turn(model, loss.prepare)
    return Generator(CachedDecoder(loss, parameters, mesh, (batch, heads), shape, sampling), shape)


def _on_mesh(job: Job, mesh: DeviceMesh, activations: Mapping[str, Layout]) -> PreTrainedModel:
    """A copy of the job's assembled model, its kernels bound to ``mesh`` and its activations laid out."""
    model = copy.deepcopy(job.assembled)
    _add_scales(model, job.stored)
    _bind_kernels(job, model, mesh)
    scopes.annotate(model)
    if not any(isinstance(module, DecoderLayers) for module in model.modules()):
        number_layers(model)
    for pattern, layout in activations.items():
        for name, module in model.named_modules():
            if matches(pattern, name):
                module.register_forward_hook(_constrain_output(layout, mesh))
    return model


def _add_scales(model: PreTrainedModel, plan: ShardingPlan) -> None:
    """Give ``model``, in place, the scales of its weights in int8, on meta: transformers knows of none."""
    for entry in plan.parameters:
        if entry.dtype == torch.int8:
            owner, _, key = (entry.name + SCALE).rpartition(".")
            scale = torch.empty(plan[entry.name + SCALE].shape, device="meta")
            model.get_submodule(owner).register_parameter(key, nn.Parameter(scale, requires_grad=False))


def _with_zeros(job: Job, restored: Source) -> Source:
    """``restored``, with zeros for the optimizer's state of what took no part in the loss when saved: it had none."""

    def source(name: str) -> Array:
        parameter, _, moment = name.partition(" ")
        members, layers = job.stored.members(parameter) if moment else [], []
        try:
            return restored(name)
        except KeyError:
            if not members:
                raise
        (kept,) = (kept for kept in job.stored.state_of(parameter) if kept.name == moment)
        for member in members:
            try:
                layers.append(restored(f"{member} {moment}"))
            except KeyError:
                shape = kept.shape if members == [parameter] else kept.shape[1:]
                layers.append(torch.zeros(()).expand(shape))
        return layers[0] if members == [parameter] else Stack(layers)

    return source


def _bind_kernels(job: Job, model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Tell the model's kernels how their tensors lie on ``mesh``."""
    plan, axes, order = job.plan, tuple(job.plan.mesh.items()), device_order(mesh)
    heads = tuple(axis for axis in plan.mesh if axis not in (*plan.batch, SEQUENCE))
    attention.bind(model, KernelLayout(axes, plan.batch, heads, order, plan.sequence))
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
            groups=plan.token_shards,
            batch_axes=plan.token_axes,
            expert_axes=expert_axes,
            constrain=lambda tensor, axes: sharding.constrain(tensor, mesh, tuple(a or None for a in axes)),
        )
    else:
        chip = chip_of(mesh)
        flops_a_byte = 0.0 if chip is None else chip.flops_a_byte
        keys = [key for key, _ in job.adapted.get_submodule(names[0]).named_parameters()]
        remat = job.recipe.compute.remat
        kernel = Dropless(
            axes=axes,
            batch_axes=plan.batch,
            expert_axes=expert_axes,
            weight_specs={key: plan.specs[f"{names[0]}.{key}"] for key in keys},
            order=order,
            # on virtual devices what is kept goes through memory, and takes longer than to make it again
            keep=jax_call.has_links() and (not isinstance(remat, str) or remat == "none"),
            # a loop over layers would copy it into a stack and out of it, which takes longer than to make it again
            keep_all=not job.recipe.compute.scan,
            flops_a_byte=flops_a_byte,
            buffer_bytes=kernel_work.buffer_bytes(flops_a_byte),
        )
        if jax_call.gathers_beside():
            kernel = kernel.in_rings(_LONGEST_RING)
    experts.bind(model, experts_modules(model), kernel)


def _make_loss(job: Job, model: PreTrainedModel, mesh: DeviceMesh, own: LossFunction | None) -> Loss:
    """The model's loss, or ``own`` of its outputs, its parameters cast to the compute dtype and laid out before use."""
    compute = job.recipe.compute
    partials = partial_gradients_of(job, model, mesh)
    prepare = _Prepare(job, mesh, partials)
    inside: frozenset[str] = frozenset()
    for module in model.modules():
        if isinstance(module, DecoderLayers):
            module.configure(prepare.in_a_loop if compute.scan else prepare, compute.remat)
            inside |= frozenset(f"{module.name}.{name}" for name, _ in module.named_parameters())
    kept = partials if compute.reduce_gradients == "step" else {}
    inside |= frozenset(name + SUFFIX for name in kept if name in inside)
    leaves = {name + SUFFIX: partial for name, partial in kept.items()}
    axis = job.plan.sequence
    pieces = None if axis is None else RowPieces(mesh, job.plan.batch, axis)
    return Loss(model, prepare, inside, leaves, compute.router_loss, router_losses(job), own, _objective(job), pieces)


def _objective(job: Job) -> Preference | None:
    """What the job learns besides the next token; None: nothing."""
    args = job.args
    pairs = args.most_pairs(args.sequence_length)
    return Preference(args.objective, args.beta, args.simpo_gamma, pairs) if pairs else None


class _Prepare:
    """Parameters → what the forward uses, by name: each cast and laid out, and the leaf of its partial gradient."""

    def __init__(self, job: Job, mesh: DeviceMesh, partials: dict[str, PartialGradient]) -> None:
        self.job, self.mesh, self.partials = job, mesh, partials
        default = "bfloat16" if jax_call.target() == "tpu" else "float32"
        self.dtype = DTYPES[job.recipe.compute.dtype or default]
        self.experts_inside = experts_modules(job.assembled)
        self.biases = selection_biases(job.model, experts_modules(job.model))

    def __call__(self, parameters: Tensors) -> Tensors:
        prepared: Tensors = {}
        scales = {name + SCALE for name, parameter in parameters.items() if parameter.dtype == torch.int8}
        for name, parameter in parameters.items():  # leaves come last: one that is given replaces one that is made here
            if name.endswith(SUFFIX):
                spec = self.partials[name.removesuffix(SUFFIX)].spec
                prepared[name] = sharding.constrain(parameter, self.mesh, spec[-parameter.dim() :])
            elif parameter.dtype == torch.int8:
                # multiplied out last, so that what is gathered across devices is the smallest dtype
                values, scale = (self._whole(n, self._placed(n, parameters[n])) for n in (name, name + SCALE))
                prepared[name] = from_int8(values, scale, self.dtype)
            elif name not in scales:
                prepared |= self._cast(name, parameter)
        return prepared

    def in_a_loop(self, parameters: Tensors) -> Tensors:
        """The same for a layer's slices of stacks, which are first kept from choosing the layouts of whole stacks.

        One that is cast first chooses none.
        """
        if jax_call.target() != "tpu":
            return self(parameters)
        return self({name: self._as_stored(name, parameter) for name, parameter in parameters.items()})

    def _cast(self, name: str, parameter: torch.Tensor) -> Tensors:
        # cast first, so that what is gathered across devices is the smaller dtype
        entry, partial = self.job.plan[first_name(name)], self.partials.get(name)
        # what routers add for selection stays as it is: in bfloat16 a step of 0.001 would be lost
        cast = parameter if entry.name in self.biases else parameter.to(self.dtype)
        placed = self._placed(name, cast)
        prepared = {name: self._whole(name, placed)}
        if partial is not None and partial.scatters:
            prepared[name + SUFFIX] = partial.layer.leaf(placed)
        return prepared

    def _placed(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        return self._constrain(parameter, self.job.plan[first_name(name)].layout)

    def _whole(self, name: str, placed: torch.Tensor) -> torch.Tensor:
        """``placed`` whole along the axes that split the tokens, and said so: this gathers the weight, and reduces
        its gradient. Left to itself the partitioner gathers the tokens of the whole batch where that seems shorter.
        """
        entry, recipe = self.job.plan[first_name(name)], self.job.recipe
        if recipe.compute.experts == "dropless" and name.rpartition(".")[0] in self.experts_inside:
            return placed  # the kernel gathers it itself
        split = (*token_axes(name, entry, recipe, self.experts_inside), SEQUENCE)
        return self._constrain(placed, {axis: place for axis, place in entry.layout.items() if axis not in split})

    def _as_stored(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        as_used = parameter.dtype in (self.dtype, torch.int8)
        if parameter.dim() < 2 or not as_used or name.endswith(SUFFIX):
            return parameter
        sizes = self.mesh.shape()
        spec = partition_spec(self.job.plan[first_name(name)].layout, parameter.dim(), tuple(sizes))
        manual = jax_call.Manual(tuple(sizes.items()), (spec,), (spec,), device_order(self.mesh))
        return as_stored(parameter, manual, self.job.stored[name].shape[0] if is_stacked(name) else 0)

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
