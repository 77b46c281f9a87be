"""Recipe × model × devices → plan: where every parameter goes, checked before a byte is allocated. Pure."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Shard

from trainer.errors import UserError, did_you_mean
from trainer.recipe import Layout, Placement, Recipe, layout_text, matches

PartitionSpec = tuple[str | tuple[str, ...] | None, ...]

_MOMENTS = 2  # that AdamW keeps of every weight
_LISTED = 16  # kinds of parameter; a decoder has fewer, so an empty recipe is answered with all of them


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
        prefix, star, rest = name.partition(".*.")
        return [f"{prefix}.{i}.{rest}" for i in range(self[name].shape[0])] if star else [name]

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
        layout={axis: Shard(placement.dim + 1) for axis, placement in _shards(layer.layout).items()},
        local_shape=(count, *layer.local_shape),
        bytes_per_device=layer.bytes_per_device * count,
    )


def _shards(layout: Layout) -> dict[str, Shard]:
    return {axis: placement for axis, placement in layout.items() if isinstance(placement, Shard)}


def partition_spec(layout: Layout, rank: int, mesh_axes: Sequence[str]) -> PartitionSpec:
    """``layout`` in torch_xla's convention: per dimension None, an axis, or a tuple of axes in mesh order.

    Args:
        layout: axis → placement.
        rank: dimensions of the tensor.
        mesh_axes: every axis of the mesh, in its order.

    Raises:
        UserError: a dimension the tensor lacks, or an axis the mesh lacks.
    """
    shards = _shards(layout)
    for axis, shard in shards.items():
        if axis not in mesh_axes or shard.dim >= rank:
            raise UserError(
                asked=f"layout {layout_text(layout)}",
                found=f"a tensor of {rank} dimensions on a mesh of {', '.join(mesh_axes)}",
                why=f"axis {axis!r} cannot split dimension {shard.dim} of it",
                instead=f"a dimension below {rank}, an axis of the mesh, or leave the axis out to replicate",
            )
    axes_of_dim = [
        tuple(axis for axis in mesh_axes if axis in shards and shards[axis].dim == dim) for dim in range(rank)
    ]
    return tuple(axes if len(axes) > 1 else axes[0] if axes else None for axes in axes_of_dim)


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
    pattern_of = _match_lines(recipe, names)
    table = {**recipe.parameters, **recipe.optional}
    layouts = {name: _in_mesh_order(table[pattern], mesh) for name, pattern in pattern_of.items()}
    _check_tied(recipe, aliases, layouts)
    for name, parameter in names.items():
        _check_dimensions(recipe, name, tuple(parameter.shape), layouts[name])
    _check_divisible(recipe, names, layouts, mesh)
    _check_activations(recipe, model)
    plans = tuple(
        _plan_parameter(
            name, pattern_of[name], tuple(parameter.shape), weight_dtype or parameter.dtype, layouts[name], mesh
        )
        for name, parameter in names.items()
        if name not in aliases
    )
    return ShardingPlan(mesh, recipe.batch, plans, aliases, dict(recipe.activations), optimizer_dtype)


def _in_mesh_order(layout: Layout, mesh: Mapping[str, int]) -> dict[str, Placement]:
    shards = _shards(layout)
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
    for axis, shard in _shards(layout).items():
        local[shard.dim] //= mesh[axis]
    size = math.prod(local) * dtype.itemsize
    return ParameterPlan(name, pattern, shape, dtype, layout, tuple(local), size)


def _collapse(name: str) -> str:
    """A parameter's name with its layer and expert numbers as ``*``: what a recipe line for it looks like."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def _listing(names: Iterable[str], notes: Mapping[str, str]) -> str:
    """Names grouped by ``_collapse``, one a line with a note and a count; the first few groups."""
    groups = Counter(f"{_collapse(name)} {notes[name]}" for name in names)
    lines = [f"{group}" + (f", {count} of them" if count > 1 else "") for group, count in groups.items()]
    if len(lines) > _LISTED:
        lines[_LISTED:] = [f"and {len(lines) - _LISTED} more kinds"]
    return "\n           ".join(lines)


def _match_lines(recipe: Recipe, names: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Parameter name → the one pattern it matches."""
    patterns = [*recipe.parameters, *recipe.optional]
    hits = {name: [pattern for pattern in patterns if matches(pattern, name)] for name in names}
    used = {pattern for found in hits.values() for pattern in found}
    unused = [pattern for pattern in recipe.parameters if pattern not in used]
    unmatched = [name for name, found in hits.items() if not found]
    doubled = {name: f"matches {' and '.join(found)}" for name, found in hits.items() if len(found) > 1}
    title = f"recipe {recipe.name}"
    if unmatched:
        shapes = {name: f"of shape {list(names[name].shape)}" for name in unmatched}
        example = _collapse(unmatched[0])
        near = f"; or mend {unused[0]!r}, which matches nothing" if unused else ""
        raise UserError(
            asked=f"{title}: a layout for every parameter",
            found=f"no line matches\n           {_listing(unmatched, shapes)}",
            why="a parameter without a line would be replicated without a word",
            instead=f'a line such as "{example}": {{}} to replicate it{near}',
        )
    if doubled:
        raise UserError(
            asked=f"{title}: one line for each parameter",
            found=_listing(doubled, doubled),
            why="two lines could ask for two layouts",
            instead="narrow one of the patterns until each parameter matches one alone",
        )
    if unused:
        kinds = dict.fromkeys(map(_collapse, names))
        raise UserError(
            asked=f"{title}: line {unused[0]!r}" + (f" and {len(unused) - 1} more" if unused[1:] else ""),
            found="no parameter matches " + ", ".join(map(repr, unused[:_LISTED])),
            why="a line that matches nothing is a misspelling, or meant for another model",
            instead=did_you_mean(unused[0], kinds) + "correct it, remove it, or move it to optional={...}",
        )
    return {name: found[0] for name, found in hits.items()}


def _check_tied(recipe: Recipe, aliases: Mapping[str, str], layouts: Mapping[str, Layout]) -> None:
    for alias, name in aliases.items():
        if layouts[alias] != layouts[name]:
            raise UserError(
                asked=f"recipe {recipe.name}: {alias} as {layout_text(layouts[alias])}",
                found=f"{name} as {layout_text(layouts[name])}, and the model ties the two: one tensor",
                why="one tensor has one layout",
                instead=f"the same layout on the lines of {_collapse(alias)} and {_collapse(name)}",
            )


def _check_dimensions(recipe: Recipe, name: str, shape: tuple[int, ...], layout: Layout) -> None:
    for axis, shard in _shards(layout).items():
        if shard.dim >= len(shape):
            raise UserError(
                asked=f"recipe {recipe.name}: {name}: {axis!r}: Shard({shard.dim})",
                found=f"it has shape {list(shape)}",
                why=f"dimension {shard.dim} is out of range: they are counted from 0",
                instead=f'"{axis}": Shard({len(shape) - 1})' if shape else "{}: a scalar only replicates",
            )


def _check_divisible(
    recipe: Recipe,
    names: Mapping[str, torch.Tensor],
    layouts: Mapping[str, Mapping[str, Placement]],
    mesh: Mapping[str, int],
) -> None:
    """All parameters with a dimension that its axes do not divide, in one error that mends the first."""
    bad: dict[str, tuple[int, list[str]]] = {}
    for name, parameter in names.items():
        spec = partition_spec(layouts[name], parameter.dim(), tuple(mesh))
        for dim, entry in enumerate(spec):
            axes = [entry] if isinstance(entry, str) else list(entry or ())
            if parameter.shape[dim] % math.prod(mesh[axis] for axis in axes):
                bad.setdefault(name, (dim, axes))
    if not bad:
        return
    name, (dim, axes) = next(iter(bad.items()))
    shape = tuple(names[name].shape)
    sizes = " × ".join(f"{axis}={mesh[axis]}" for axis in axes)
    notes = {other: f"of shape {list(names[other].shape)}" for other in bad}
    raise UserError(
        asked=f"recipe {recipe.name}: dimension {dim} of {name} over {sizes}",
        found=_listing(bad, notes),
        why=f"{shape[dim]} is not divisible by {math.prod(mesh[axis] for axis in axes)}",
        instead="; or ".join(
            [text for axis in axes for text in _sizes_that_divide(shape[dim], axis, axes, mesh)]
            + _dimensions_that_divide(shape, dim, axes, layouts[name], mesh)
            + ["replicate: leave the axis out of that line"]
        ),
    )


def _sizes_that_divide(size: int, axis: str, axes: list[str], mesh: Mapping[str, int]) -> list[str]:
    others = math.prod(mesh[other] for other in axes if other != axis)
    devices = math.prod(mesh.values())
    fit = [str(n) for n in range(1, devices + 1) if devices % n == 0 and size % (n * others) == 0]
    return [f"{axis} of size {' or '.join(fit)}"] if fit else []


def _dimensions_that_divide(
    shape: tuple[int, ...], dim: int, axes: list[str], layout: Layout, mesh: Mapping[str, int]
) -> list[str]:
    """Other dimensions that ``axes`` would divide together with the axes that are there already."""
    shards = _shards(layout)
    fit = [
        f"Shard({other})"
        for other, size in enumerate(shape)
        if other != dim
        and size % math.prod(mesh[a] for a in {*axes, *(a for a in shards if shards[a].dim == other)}) == 0
    ]
    return [f"shard another dimension: {' or '.join(fit)}"] if fit else []


def _check_activations(recipe: Recipe, model: nn.Module) -> None:
    modules = [name for name, _ in model.named_modules() if name]
    for pattern in recipe.activations:
        if not any(matches(pattern, name) for name in modules):
            raise UserError(
                asked=f"recipe {recipe.name}: activations line {pattern!r}",
                found="no module of the model has such a name",
                why="an activation is the output of a module",
                instead=did_you_mean(pattern, dict.fromkeys(map(_collapse, modules))) + "correct or remove the line",
            )
