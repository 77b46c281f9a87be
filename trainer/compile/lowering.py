"""The training step without weights: placeholders → HLO with the plan's shardings.

The step is the one that `Trainer` runs (:func:`trainer.step.build.build`), on an abstract mesh. Its tensors have shapes
and layouts but no data, so a model of any size is lowered in seconds, in the memory of its graph.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Collection

import torch
import torch_xla

from models import jax_call
from models.layers import DecoderLayers
from trainer.compile.lowered import Argument, Lowered
from trainer.job import Job
from trainer.layout.partition import PartitionSpec, axes_of
from trainer.step.build import Built, build
from trainer.step.train_step import MOMENTS
from trainer.weights.sources import state_dict_weights
from trainer.xla.mesh import AbstractMesh
from trainer.xla.runtime import init_runtime


def lower(job: Job, *, platform: str = "tpu") -> Lowered:
    """The job's train step as HLO.

    Args:
        platform: what kernels are chosen and lowered for: ``tpu`` or ``cpu``.
    """
    init_runtime()
    # autograd asks the device for its context, which only a first computation makes
    torch.ones(1, device=torch_xla.device()).cpu()
    mesh = AbstractMesh(job.plan.mesh)
    try:
        return _lower(job, mesh, platform)
    finally:
        # Tensors without data must not outlive this: a sync of all lazy tensors would try to compute them. The mesh
        # keeps some, and reference cycles keep the model.
        mesh.placed.clear()
        gc.collect()


def _lower(job: Job, mesh: AbstractMesh, platform: str) -> Lowered:
    names = ["input_ids", "labels", *(("segment_ids", "position_ids") if job.args.isolate_documents else ())]
    shape = (job.rows, job.args.sequence_length)
    batch = {name: torch.empty(shape, dtype=torch.int64, device="meta") for name in names}
    with jax_call.lowering_for(platform):
        built = build(job, mesh, state_dict_weights(job.model.state_dict()))
        built.step.trace(batch, step=1, learning_rate=1.0)
        state = built.step.state
        # semi-private: torch_xla/csrc/init_python_bindings.cpp, torch_xla 2.9
        context = torch_xla._XLAC.lowering.LoweringContext("train_step")
        context.build(list(state.values()))
    outputs = {name: number for number, name in enumerate(state)}
    known = {context.tensor_parameter_id(placeholder.tensor): placeholder.name for placeholder in mesh.placed}
    specs = {placeholder.name: placeholder.spec for placeholder in mesh.placed}
    hlo = context.hlo()
    arguments = []
    for number, parameter in enumerate(jax_call.xla_client.XlaComputation(hlo).program_shape().parameter_shapes()):
        name, dimensions = known.get(number, "a constant"), tuple(parameter.dimensions())
        spec = specs.get(name, (None,) * len(dimensions))
        arguments.append(
            Argument(
                name=name,
                kind=_kind(name, built.placed.parameters.keys(), batch.keys()),
                shape=dimensions,
                dtype=str(parameter.numpy_dtype()),
                sharding=sharding_text(job.plan.mesh, spec),
                output=outputs.get(name),
            )
        )
    return Lowered(
        hlo=hlo,
        arguments=tuple(arguments),
        outputs=tuple(sharding_text(job.plan.mesh, specs[name]) for name in state),
        mesh=dict(job.plan.mesh),
        layers=_layers(built),
    )


def _layers(built: Built) -> int:
    stacks = [module for module in built.model.modules() if isinstance(module, DecoderLayers)]
    return next((stack.count for stack in stacks if stack.count), 1)


def sharding_text(mesh: dict[str, int], spec: PartitionSpec) -> str:
    """The sharding that ``spec`` means on ``mesh``, in HLO's own notation."""
    axes = [axis for axis, size in mesh.items() if size > 1]
    groups = [axes_of(entry) for entry in spec]
    sharded = [axis for group in groups for axis in group if axis in axes]
    if not sharded:
        return "{replicated}"
    rest = [axis for axis in axes if axis not in sharded]
    tiles = [math.prod(mesh[axis] for axis in group) for group in groups]
    copies = math.prod(mesh[axis] for axis in rest)
    if copies > 1:
        tiles.append(copies)
    order = f"[{math.prod(mesh[axis] for axis in axes)}]"
    # Transposed only where the order differs: MLIR silently makes {replicated} of a result's `<=[8]T(0)`.
    if [*sharded, *rest] != axes:
        transposed = ",".join(str(axes.index(axis)) for axis in [*sharded, *rest])
        order = f"[{','.join(str(mesh[axis]) for axis in axes)}]T({transposed})"
    return f"{{devices=[{','.join(map(str, tiles))}]<={order}{' last_tile_dim_replicate' if copies > 1 else ''}}}"


def _kind(name: str, parameters: Collection[str], batch: Collection[str]) -> str:
    if name in parameters:
        return "weights"
    if name.endswith(MOMENTS):
        return "optimizer"
    return "batch" if name in batch else "other"
