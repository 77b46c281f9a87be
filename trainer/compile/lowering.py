"""The training step without weights: placeholders → HLO with the plan's shardings.

The step is the very one that `Trainer` runs (:func:`trainer.step.build.build`), on an abstract mesh: its tensors have
shapes and layouts and no data, so a model of any size is lowered in seconds, in the memory of its graph.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Collection
from dataclasses import dataclass

import torch
import torch_xla
from transformers import PretrainedConfig

from models import jax_call
from models.layers import DecoderLayers
from trainer.arguments import TrainingArguments
from trainer.layout.partition import PartitionSpec
from trainer.layout.plan import ShardingPlan
from trainer.layout.recipe import Recipe
from trainer.model import meta_model
from trainer.step.build import build
from trainer.step.train_step import MOMENTS
from trainer.weights.sources import state_dict_weights
from trainer.xla.mesh import AbstractMesh
from trainer.xla.runtime import init_runtime


@dataclass(frozen=True)
class Argument:
    """One parameter of the lowered step's HLO, in order.

    Args:
        name: as the recipe says it, ``model.layers.*.mlp.experts.gate_up_proj``, its moments with " first moment", ….
        kind: ``weights``, ``optimizer``, ``batch`` or ``other``.
        shape: global.
        sharding: HLO's text, ``{devices=[8,1]<=[8]}`` or ``{replicated}``.
        output: the output that takes its place in memory; None: not donated.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    sharding: str
    output: int | None


@dataclass(frozen=True)
class Lowered:
    """A training step as HLO, before it is partitioned.

    Args:
        hlo: a serialised HloModuleProto.
        outputs: each output's sharding, HLO's text.
        mesh: axis → size, in mesh order; HLO's device ids are positions in it, row-major.
        layers: how often the loops over the layer stack run.
    """

    hlo: bytes
    arguments: tuple[Argument, ...]
    outputs: tuple[str, ...]
    mesh: dict[str, int]
    layers: int


def lower(
    recipe: Recipe, args: TrainingArguments, config: PretrainedConfig, plan: ShardingPlan, *, platform: str = "tpu"
) -> Lowered:
    """The train step of ``recipe`` and ``args`` on the devices of ``plan``, as HLO.

    Args:
        plan: of the plain model, as `make_plan` gives it.
        platform: what kernels are chosen and lowered for: ``tpu`` or ``cpu``.

    Raises:
        UserError: the recipe's compute policy does not fit the model.
    """
    init_runtime()
    # autograd asks the device for its context, which only a first computation makes
    torch.ones(1, device=torch_xla.device()).cpu()
    mesh = AbstractMesh(plan.mesh)
    try:
        return _lower(recipe, args, config, plan, mesh, platform)
    finally:
        # Tensors without data must not outlive this, for a sync of all that is lazy would try to compute them: kernels
        # bound to the mesh stay registered and keep it, and reference cycles keep the model.
        mesh.placed.clear()
        gc.collect()


def _lower(
    recipe: Recipe,
    args: TrainingArguments,
    config: PretrainedConfig,
    plan: ShardingPlan,
    mesh: AbstractMesh,
    platform: str,
) -> Lowered:
    names = ["input_ids", "labels", *(("segment_ids", "position_ids") if args.isolate_documents else ())]
    rows = args.per_device_train_batch_size * plan.batch_shards * args.gradient_accumulation_steps
    batch = {name: torch.empty(rows, args.sequence_length, dtype=torch.int64, device="meta") for name in names}
    with jax_call.lowering_for(platform):
        built = build(recipe, args, config, plan, mesh, state_dict_weights(meta_model(config).state_dict()))
        built.step.trace(batch, step=1, learning_rate=1.0)
        state = built.step.state
        context = torch_xla._XLAC.lowering.LoweringContext("train_step")
        context.build(list(state.values()))
    hlo = context.hlo()
    known = {context.tensor_parameter_id(placeholder.tensor): placeholder for placeholder in mesh.placed}
    outputs = {name: index for index, name in enumerate(state)}
    specs = {placeholder.name: placeholder.spec for placeholder in mesh.placed}
    arguments = []
    for number, shape in enumerate(jax_call.xla_client.XlaComputation(hlo).program_shape().parameter_shapes()):
        name = known[number].name if number in known else "a constant"
        spec = specs.get(name, (None,) * len(shape.dimensions()))
        arguments.append(
            Argument(
                name=name,
                kind=_kind(name, built.parameters.keys(), batch.keys()),
                shape=tuple(shape.dimensions()),
                dtype=str(shape.numpy_dtype()),
                sharding=sharding_text(plan.mesh, spec),
                output=outputs.get(name),
            )
        )
    stacks = [module for module in built.model.modules() if isinstance(module, DecoderLayers)]
    return Lowered(
        hlo=hlo,
        arguments=tuple(arguments),
        outputs=tuple(sharding_text(plan.mesh, specs[name]) for name in state),
        mesh=dict(plan.mesh),
        layers=next((stack.count for stack in stacks if stack.count), 1),
    )


def sharding_text(mesh: dict[str, int], spec: PartitionSpec) -> str:
    """What ``spec`` means on ``mesh``, in HLO's own notation."""
    axes = [axis for axis, size in mesh.items() if size > 1]
    groups = [() if named is None else (named,) if isinstance(named, str) else named for named in spec]
    sharded = [axis for group in groups for axis in group if axis in axes]
    if not sharded:
        return "{replicated}"
    rest = [axis for axis in axes if axis not in sharded]
    tiles = [math.prod(mesh[axis] for axis in group) for group in groups]
    copies = math.prod(mesh[axis] for axis in rest)
    if copies > 1:
        tiles.append(copies)
    order = f"[{math.prod(mesh[axis] for axis in axes)}]"
    # Only where it says something: of a result's sharding that ends in `<=[8]T(0)` MLIR makes {replicated}, silently.
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
