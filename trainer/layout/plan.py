"""Recipe × model × devices → plan: where every parameter goes, checked before a byte is allocated. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Shard

from trainer.errors import UserError
from trainer.layout.checks import check_activations, check_dimensions, check_divisible, check_tied, match_lines
from trainer.layout.partition import PartitionSpec, partition_spec, shards_of
from trainer.layout.recipe import Layout, Placement, Recipe, layout_text
from trainer.layout.stacking import is_stacked, layer_names

_MOMENTS = 2  # that AdamW keeps of every weight


@dataclass(frozen=True)
class ParameterPlan:
    """One parameter: its global ``shape``, the layout that ``pattern`` gives it, and what one device holds.

    ``layout`` names the sharding axes only, in mesh order; ``bytes_per_device`` counts the weight alone.
    """

    name: str
    pattern: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: dict[str, Placement]
    local_shape: tuple[int, ...]
    bytes_per_device: int

    def axes_of(self, dim: int) -> tuple[str, ...]:
        """The axes that split a dimension, in mesh order."""
        return tuple(axis for axis, placement in self.layout.items() if placement == Shard(dim))


@dataclass(frozen=True)
class ShardingPlan:
    """A recipe resolved against one model's shapes and one mesh.

    Args:
        mesh: axis → devices along it, in mesh order.
        batch: axes that split the batch's rows.
        parameters: each distinct parameter once, under the name that ``named_parameters()`` gives it.
        aliases: a tied parameter's other name → the name it is listed under.
        activations: pattern of module names → layout of that module's output.
        optimizer_dtype: what AdamW's two moments of every weight are stored in.
    """

    mesh: dict[str, int]
    batch: tuple[str, ...]
    parameters: tuple[ParameterPlan, ...]
    aliases: dict[str, str]
    activations: Mapping[str, Layout]
    optimizer_dtype: torch.dtype = torch.float32

    @cached_property
    def _by_name(self) -> dict[str, ParameterPlan]:
        return {parameter.name: parameter for parameter in self.parameters}

    def __getitem__(self, name: str) -> ParameterPlan:
        """The parameter of that name or alias; KeyError if the plan has none."""
        return self._by_name[self.aliases.get(name, name)]

    def members(self, name: str) -> list[str]:
        """The model's own names behind a listed one: itself, or its layers' where it is stacked."""
        return layer_names(name, self[name].shape[0]) if is_stacked(name) else [name]

    @cached_property
    def specs(self) -> dict[str, PartitionSpec]:
        """Name → partition spec of every parameter."""
        axes = tuple(self.mesh)
        return {entry.name: partition_spec(entry.layout, len(entry.shape), axes) for entry in self.parameters}

    @property
    def devices(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def batch_shards(self) -> int:
        """How many ways the batch's rows are split: what the global batch must be divisible by."""
        return math.prod(self.mesh[axis] for axis in self.batch)

    @property
    def totals(self) -> dict[str, int]:
        """Bytes per device. Gradients have the weights' dtype and layout; AdamW's moments theirs."""
        weights = sum(parameter.bytes_per_device for parameter in self.parameters)
        elements = sum(math.prod(parameter.local_shape) for parameter in self.parameters)
        return {
            "parameters_bytes": weights,
            "gradients_bytes": weights,
            "optimizer_bytes": elements * _MOMENTS * self.optimizer_dtype.itemsize,
        }

    def as_json(self) -> dict[str, Any]:
        """JSON-able: the mesh, each parameter's layout and share, and totals in bytes per device."""
        return {
            "mesh": self.mesh,
            "parameters": [
                {
                    "name": parameter.name,
                    "pattern": parameter.pattern,
                    "shape": list(parameter.shape),
                    "layout": layout_text(parameter.layout),
                    "local_shape": list(parameter.local_shape),
                    "bytes_per_device": parameter.bytes_per_device,
                }
                for parameter in self.parameters
            ],
            "totals": self.totals,
        }

    def stacked(self, prefix: str, count: int) -> ShardingPlan:
        """The plan of a scanned model: ``PREFIX.<i>.REST`` for i < ``count`` become one ``PREFIX.*.REST``.

        The stacked parameter has shape ``[count, ...]``; its shards move up by one dimension.

        Raises:
            UserError: the layers differ in parameters, shapes or layouts, or share a parameter.
        """
        layers: list[dict[str, ParameterPlan]] = [{} for _ in range(count)]
        place = {f"{prefix}.{index}": layer for index, layer in enumerate(layers)}
        depth = prefix.count(".") + 2

        def split(name: str) -> tuple[str, str]:
            parts = name.split(".")
            return ".".join(parts[:depth]), ".".join(parts[depth:])

        for name in (name for pair in self.aliases.items() for name in pair):
            if split(name)[0] in place:
                raise _not_alike(prefix, f"{name} is tied to another parameter")
        for parameter in self.parameters:
            layer_name, rest = split(parameter.name)
            if layer_name in place:
                place[layer_name][rest] = parameter
        for index, layer in enumerate(layers):
            _check_alike(prefix, layers[0], layer, index)
        parameters: list[ParameterPlan] = []
        for parameter in self.parameters:
            layer_name, rest = split(parameter.name)
            if layer_name not in place:
                parameters.append(parameter)
            elif layer_name == f"{prefix}.0":
                parameters.append(_stack(f"{prefix}.*.{rest}", parameter, count))
        return replace(self, parameters=tuple(parameters))


def _check_alike(prefix: str, first: dict[str, ParameterPlan], layer: dict[str, ParameterPlan], index: int) -> None:
    for rest in sorted(first.keys() ^ layer.keys()) or ([] if first else ["any parameter"]):
        raise _not_alike(prefix, f"layers 0 and {index} do not both have {rest}")
    for rest, one in first.items():
        other = layer[rest]
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            shapes = f"{list(one.shape)} {one.dtype} and {list(other.shape)} {other.dtype}"
            raise _not_alike(prefix, f"{rest} is {shapes} in layers 0 and {index}")
        if one.layout != other.layout:
            layouts = f"{layout_text(one.layout)} and {layout_text(other.layout)}"
            raise _not_alike(prefix, f"{rest} is placed as {layouts} in layers 0 and {index}")


def _not_alike(prefix: str, found: str) -> UserError:
    return UserError(
        asked=f"scan over {prefix}",
        found=found,
        why="scanned layers are stored stacked, one tensor a parameter: they must be alike and share nothing",
        instead="Compute(scan=False), or one recipe line for all layers where only the layouts differ",
    )


def _stack(name: str, layer: ParameterPlan, count: int) -> ParameterPlan:
    return replace(
        layer,
        name=name,
        shape=(count, *layer.shape),
        layout={axis: Shard(placement.dim + 1) for axis, placement in shards_of(layer.layout).items()},
        local_shape=(count, *layer.local_shape),
        bytes_per_device=layer.bytes_per_device * count,
    )


def check_global_batch(plan: ShardingPlan, rows: int) -> None:
    """Raise UserError unless the batch axes divide ``rows``, the global batch's number of sequences."""
    if rows < 1 or rows % plan.batch_shards:
        axes = " × ".join(f"{axis}={plan.mesh[axis]}" for axis in plan.batch)
        below = max(rows - rows % plan.batch_shards, plan.batch_shards)
        raise UserError(
            asked=f"a global batch of {rows} rows",
            found=f"the batch axes split it {plan.batch_shards} ways ({axes})",
            why="every device along the batch axes takes the same number of rows",
            instead=f"{below} or {below + plan.batch_shards} rows",
        )


def make_plan(
    recipe: Recipe,
    model: nn.Module,
    devices: int,
    *,
    weight_dtype: torch.dtype | None = None,
    optimizer_dtype: torch.dtype = torch.float32,
) -> ShardingPlan:
    """Resolve ``recipe`` for ``model`` (any module, also on meta) on ``devices`` devices; allocates nothing.

    Args:
        weight_dtype: what weights are stored in; None: each as ``model`` has it.
        optimizer_dtype: what AdamW's moments are stored in.

    Raises:
        UserError: the mesh does not fit; a parameter that no line or two lines match; a line that matches
            nothing; a dimension out of range or not divisible; tied names whose layouts differ.
    """
    mesh = recipe.mesh.sizes(devices)
    names = dict(model.named_parameters(remove_duplicate=False))
    canonical = {id(parameter): name for name, parameter in model.named_parameters()}
    aliases = {name: canonical[id(p)] for name, p in names.items() if canonical[id(p)] != name}
    pattern_of = match_lines(recipe, names)
    table = {**recipe.parameters, **recipe.optional}
    layouts = {name: _in_mesh_order(table[pattern], mesh) for name, pattern in pattern_of.items()}
    check_tied(recipe, aliases, layouts)
    for name, parameter in names.items():
        check_dimensions(recipe, name, tuple(parameter.shape), layouts[name])
    check_divisible(recipe, names, layouts, mesh)
    check_activations(recipe, model)
    plans = tuple(
        _plan_parameter(
            name, pattern_of[name], tuple(parameter.shape), weight_dtype or parameter.dtype, layouts[name], mesh
        )
        for name, parameter in names.items()
        if name not in aliases
    )
    return ShardingPlan(mesh, recipe.batch, plans, aliases, dict(recipe.activations), optimizer_dtype)


def _in_mesh_order(layout: Layout, mesh: Mapping[str, int]) -> dict[str, Placement]:
    shards = shards_of(layout)
    return {axis: shards[axis] for axis in mesh if axis in shards}


def _plan_parameter(
    name: str,
    pattern: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    layout: dict[str, Placement],
    mesh: Mapping[str, int],
) -> ParameterPlan:
    local = list(shape)
    for axis, shard in shards_of(layout).items():
        local[shard.dim] //= mesh[axis]
    size = math.prod(local) * dtype.itemsize
    return ParameterPlan(name, pattern, shape, dtype, layout, tuple(local), size)
