"""A plan: a recipe resolved against a model's shapes and a mesh, and checked. Pure data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from shardwright.errors import UserError
from shardwright.layout import plan_checks
from shardwright.layout.mesh import SEQUENCE
from shardwright.layout.partition import PartitionSpec, partition_spec, shards_of
from shardwright.layout.placement import Shard
from shardwright.layout.plan_mends import Mends
from shardwright.layout.recipe import Layout, Recipe, layout_text
from shardwright.layout.stacking import is_stacked, layer_names, numbers_of
from shardwright.models.adapters.packings.registry import Packing, Weight
from shardwright.optimizers import OPTIMIZERS
from shardwright.optimizers.optimizer import Optimizer


@dataclass(frozen=True)
class Packed:
    """The storage of a frozen weight: codes under its own name, and scales beside it.

    Args:
        weight: as ``packing`` knows it.
        used: the plan of one layer's weight as the step uses it.
    """

    packing: Packing
    weight: Weight
    used: ParameterPlan = field(repr=False)


@dataclass(frozen=True)
class ParameterPlan:
    """The layout of one parameter or of a tensor of its optimizer's state, and a device's share of it.

    Args:
        name: of ``named_parameters()``, or a stack's (see `shardwright.layout.stacking`). A state tensor's is what
            follows the parameter's and a space.
        pattern: the recipe's line that it matches.
        dtype: of storage.
        layout: the axes that split it, in mesh order; they divide their dimensions.
        mesh: axis → devices along it.
        trained: False: it is frozen, without gradient and optimizer state.
        packed: where it holds the codes of a frozen weight: how, and the weight itself.
    """

    name: str
    pattern: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: dict[str, Shard]
    mesh: Mapping[str, int] = field(repr=False)
    trained: bool = True
    packed: Packed | None = None

    def axes_of(self, dim: int) -> tuple[str, ...]:
        """The axes that split dimension ``dim``, in mesh order."""
        return tuple(axis for axis, shard in self.layout.items() if shard.dim == dim)

    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of a device's share."""
        splits = [math.prod(self.mesh[axis] for axis in self.axes_of(dim)) for dim in range(len(self.shape))]
        return tuple(size // split for size, split in zip(self.shape, splits, strict=True))

    @property
    def bytes_per_device(self) -> int:
        """A device's share, without gradient and optimizer state."""
        return math.prod(self.local_shape) * self.dtype.itemsize

    def optimizer(self, optim: str) -> type[Optimizer]:
        """The entry that updates the parameter under ``--optim``: its own, or one that it leaves the rest to."""
        entry = OPTIMIZERS[optim]
        while entry.rest is not None and not entry.takes(self.name, self._shape_in_a_layer):
            entry = entry.rest
        return entry

    def state(self, optim: str, dtype: torch.dtype) -> tuple[ParameterPlan, ...]:
        """The state tensors of ``--optim``, in ``dtype``, in the order in which its entry takes them.

        A tensor has the parameter's shape and layout, or those without one dimension: then the axes that split that
        dimension replicate the tensor. A stack keeps its layers in front, so each layer has what it would have alone,
        and a checkpoint's names are the same however layers are stacked.
        """
        found = []
        for name, lacks in self.optimizer(optim).state(self._shape_in_a_layer).items():
            dim = len(self.shape) - lacks  # the rank, which is no dimension, for a state that lacks none
            shape = (*self.shape[:dim], *self.shape[dim + 1 :])
            layout = {axis: Shard(s.dim - (s.dim > dim)) for axis, s in self.layout.items() if s.dim != dim}
            found.append(replace(self, name=name, shape=shape, dtype=dtype, layout=layout))
        return tuple(found)

    @property
    def _shape_in_a_layer(self) -> tuple[int, ...]:
        return self.shape[1:] if is_stacked(self.name) else self.shape


@dataclass(frozen=True)
class ShardingPlan:
    """A recipe resolved against a model's shapes and a mesh.

    Args:
        mesh: axis → devices along it, in mesh order.
        batch: axes that split the batch's rows.
        parameters: each parameter once; a tied one under the first of its names.
        aliases: a tied parameter's other name → its name in ``parameters``.
        activations: pattern of module names → layout of that module's output.
        optimizer_dtype: of the optimizer's state.
        optim: the optimizer, a file of `shardwright.optimizers`.
    """

    mesh: dict[str, int]
    batch: tuple[str, ...]
    parameters: tuple[ParameterPlan, ...]
    aliases: dict[str, str]
    activations: Mapping[str, Layout]
    optimizer_dtype: torch.dtype = torch.float32
    optim: str = "adamw"

    @cached_property
    def _by_name(self) -> dict[str, ParameterPlan]:
        return {parameter.name: parameter for parameter in self.parameters}

    def __getitem__(self, name: str) -> ParameterPlan:
        """The parameter of that name or alias, else KeyError."""
        return self._by_name[self.aliases.get(name, name)]

    def members(self, name: str) -> list[str]:
        """The model's own names of a parameter: its layers' names if it is a stack."""
        return layer_names(name, self[name].shape[0])

    @cached_property
    def specs(self) -> dict[str, PartitionSpec]:
        axes = tuple(self.mesh)
        return {entry.name: partition_spec(entry.layout, len(entry.shape), axes) for entry in self.parameters}

    def state_of(self, name: str) -> tuple[ParameterPlan, ...]:
        """The optimizer's state tensors of the parameter, as if it were trained."""
        return self[name].state(self.optim, self.optimizer_dtype)

    @property
    def devices(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def batch_shards(self) -> int:
        """The parts into which the batch axes split the rows; a divisor of the global batch."""
        return math.prod(self.mesh[axis] for axis in self.batch)

    @property
    def sequence(self) -> str | None:
        """The axis that splits the tokens of a row, if one does."""
        return SEQUENCE if self.mesh.get(SEQUENCE, 1) > 1 else None

    @property
    def token_axes(self) -> tuple[str, ...]:
        """The axes that split a batch's rows, or the tokens of a row."""
        return self.batch if self.sequence is None else (*self.batch, self.sequence)

    @property
    def token_shards(self) -> int:
        return math.prod(self.mesh[axis] for axis in self.token_axes)

    @property
    def kinds(self) -> list[list[ParameterPlan]]:
        """The parameters by recipe line and shape."""
        groups: dict[tuple[str, tuple[int, ...]], list[ParameterPlan]] = {}
        for parameter in self.parameters:
            groups.setdefault((parameter.pattern, parameter.shape), []).append(parameter)
        return list(groups.values())

    @property
    def totals(self) -> dict[str, int]:
        """The bytes of :meth:`held` for all parameters."""
        return self.held(self.parameters)

    def held(self, parameters: Sequence[ParameterPlan]) -> dict[str, int]:
        """Bytes on one device of weights, of gradients (dtype and layout of the weights) and of optimizer state."""
        trained = [parameter for parameter in parameters if parameter.trained]
        kept = [tensor for parameter in trained for tensor in self.state_of(parameter.name)]
        return {
            "parameters_bytes": sum(parameter.bytes_per_device for parameter in parameters),
            "gradients_bytes": sum(parameter.bytes_per_device for parameter in trained),
            "optimizer_bytes": sum(tensor.bytes_per_device for tensor in kept),
        }

    def as_json(self) -> dict[str, Any]:
        """Mesh, each parameter's layout and share, and totals in bytes per device, as values for JSON."""
        shown = ("name", "pattern", "shape", "layout", "local_shape", "bytes_per_device")
        parameters = []
        for parameter in self.parameters:
            values = {name: getattr(parameter, name) for name in shown} | {"layout": layout_text(parameter.layout)}
            parameters.append(values if parameter.trained else values | {"trained": False})
        return {"mesh": self.mesh, "parameters": parameters, "totals": self.totals}

    def stacked(self, prefix: str, slices: Sequence[str], depth: int) -> ShardingPlan:
        """The plan with layers of the list ``prefix`` stacked: ``PREFIX.0.REST``, … are one tensor.

        A stack of n layers has shape ``[n, ...]``, so each axis splits the next dimension. Raises UserError if the
        layers of a stack differ in parameters, shapes or layouts, or share a parameter.

        Args:
            slices: the layers of each stack, as `shardwright.layout.stacking` names them.
            depth: number of layers in the list.
        """
        layers: dict[str, dict[str, ParameterPlan]] = {f"{prefix}.{index}": {} for index in range(depth)}
        parts = prefix.count(".") + 2

        def split(name: str) -> tuple[str, str]:
            words = name.split(".")
            return ".".join(words[:parts]), ".".join(words[parts:])

        for entry in self.parameters:
            layer, rest = split(entry.name)
            if layer in layers:
                layers[layer][rest] = entry
        # the parameters of stacked layers: each stack in the place of its first layer's, and None for the others
        changed: dict[str, ParameterPlan | None] = {}
        for which in slices:
            numbers = numbers_of(f"{prefix}.{which}.") or range(depth)
            inside = {f"{prefix}.{number}": layers[f"{prefix}.{number}"] for number in numbers}
            tied = [name for pair in self.aliases.items() for name in pair if split(name)[0] in inside]
            _check_alike(prefix, inside, tied)
            changed |= dict.fromkeys(entry.name for layer in inside.values() for entry in layer.values())
            for rest, entry in inside[f"{prefix}.{numbers[0]}"].items():
                layout = {axis: Shard(shard.dim + 1) for axis, shard in entry.layout.items()}
                shape, name = (len(inside), *entry.shape), f"{prefix}.{which}.{rest}"
                changed[entry.name] = replace(entry, name=name, shape=shape, layout=layout)
        entries = (changed.get(entry.name, entry) for entry in self.parameters)
        return replace(self, parameters=tuple(entry for entry in entries if entry is not None))


def _check_alike(prefix: str, layers: Mapping[str, Mapping[str, ParameterPlan]], tied: Sequence[str]) -> None:
    """Raises UserError if a parameter is ``tied``, or the layers differ in names, shapes, dtypes or layouts."""
    found = [f"{name} is tied to another parameter" for name in tied]
    name, mine = next(iter(layers.items()))
    for other, theirs in layers.items():
        unshared = sorted(mine.keys() ^ theirs.keys()) or ([] if mine else ["any parameter"])
        found += [f"{name} and {other} do not both have {rest}" for rest in unshared]
        for rest in (rest for rest in mine if rest in theirs):
            one, two = mine[rest], theirs[rest]
            if (one.shape, one.dtype) != (two.shape, two.dtype):
                shapes = f"{list(one.shape)} {one.dtype} and {list(two.shape)} {two.dtype}"
                found.append(f"{rest} is {shapes} in {name} and {other}")
            if one.layout != two.layout:
                layouts = f"{layout_text(one.layout)} and {layout_text(two.layout)}"
                found.append(f"{rest} is placed as {layouts} in {name} and {other}")
    if found:
        raise UserError(
            asked=f"scan over {prefix}",
            found=found[0],
            why="scanned layers are stored stacked, one tensor a parameter: they must be alike and share nothing",
            instead="Compute(scan=False), or one recipe line for all layers where only the layouts differ",
        )


def _names_of(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Each name → parameter, and each other name of a tied one → its first."""
    names: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    canonical = {id(parameter): name for name, parameter in model.named_parameters()}
    return names, {name: canonical[id(p)] for name, p in names.items() if canonical[id(p)] != name}


def _refusal(recipe: Recipe, model: nn.Module, devices: int) -> UserError | None:
    """The error with which the recipe has no plan, if it has none."""
    try:
        _resolved(recipe, model, devices, None)
    except UserError as error:
        return error
    return None


def _resolved(
    recipe: Recipe, model: nn.Module, devices: int, mends: Mends | None
) -> tuple[dict[str, int], dict[str, str], dict[str, dict[str, Shard]]]:
    """The sizes of the mesh, and each parameter's line and layout; raises as `make_plan`, with what ``mends`` offer."""
    try:
        mesh = recipe.mesh.sizes(devices)
    except UserError as error:
        if mends is None:
            raise
        if not (offered := mends.mesh()):
            raise (error.retold(instead=others) if (others := mends.others()) else error) from None
        fixed = math.prod(recipe.mesh.axes.values()) * math.prod(recipe.mesh.dcn.values())  # negative: one factor is -1
        raise error.retold(instead=", or ".join(filter(None, [offered, mends.count(fixed)]))) from None
    names, aliases = _names_of(model)
    pattern_of = plan_checks.match_lines(recipe, names, mends)
    layouts = {name: shards_of(recipe.lines[pattern], mesh) for name, pattern in pattern_of.items()}
    plan_checks.check_tied(recipe, aliases, layouts)
    plan_checks.check_dimensions(recipe, names, layouts, mends)
    plan_checks.check_divisible(recipe, names, layouts, mesh, mends)
    plan_checks.check_activations(recipe, model)
    return mesh, pattern_of, layouts


def make_plan(
    recipe: Recipe,
    model: nn.Module,
    devices: int,
    *,
    weight_dtype: torch.dtype | None = None,
    optimizer_dtype: torch.dtype = torch.float32,
    optim: str = "adamw",
) -> ShardingPlan:
    """Resolves ``recipe`` for ``model`` (also on meta) on ``devices`` devices. Reads shapes alone.

    Args:
        weight_dtype: of stored weights; None: the model's.
        optimizer_dtype, optim: as in :class:`ShardingPlan`.

    Raises:
        UserError: the mesh does not fit the devices; a parameter matches no line, or two; a line matches nothing; a
            dimension is out of range or not divisible; the names of a tied parameter have different layouts.
    """
    mends = Mends(recipe, model, devices, lambda changed, count: _refusal(changed, model, count))
    mesh, pattern_of, layouts = _resolved(recipe, model, devices, mends)
    names, aliases = _names_of(model)
    plans = tuple(
        ParameterPlan(name, pattern_of[name], tuple(p.shape), weight_dtype or p.dtype, layouts[name], mesh)
        for name, p in names.items()
        if name not in aliases
    )
    return ShardingPlan(mesh, recipe.batch, plans, aliases, dict(recipe.activations), optimizer_dtype, optim)
