"""Copies of a model over an outermost axis ``data`` (HSDP), where its shapes don't divide over all devices.

A vocabulary of 151,936 divides by 128. On 1,024 devices eight copies are each sharded over 128 of them, as the recipe
says, and their gradients are summed.
"""

import math
from collections.abc import Mapping

import torch
from torch import nn

from shardwright.layout.mesh import DATA, in_copies
from shardwright.layout.partition import shards_of
from shardwright.layout.placement import Shard
from shardwright.layout.recipe import Layout, Recipe, matches
from shardwright.report.units import mesh_text

Shards = Mapping[str, Shard]  # a layout's axes that split a dimension, in mesh order
# Devices of a copy at least. Where shapes don't divide over fewer, the line is to be mended: few devices have no memory
# for copies. The vocabularies of today's families divide by 64.
COPY = 64


def undivided(
    names: Mapping[str, torch.Tensor], layouts: Mapping[str, Shards], mesh: Mapping[str, int]
) -> dict[str, tuple[int, list[str]]]:
    """Parameter → the first of its dimensions that is not divisible by the axes that split it, and those axes."""
    found: dict[str, tuple[int, list[str]]] = {}
    for name, parameter in names.items():
        for dim, size in enumerate(parameter.shape):
            axes = [axis for axis, shard in layouts[name].items() if shard.dim == dim]
            if size % math.prod(mesh[axis] for axis in axes):
                found.setdefault(name, (dim, axes))
    return found


def copies_of(
    recipe: Recipe, names: Mapping[str, torch.Tensor], layouts: Mapping[str, Shards], sizes: Mapping[str, int]
) -> dict[str, int] | None:
    """The mesh ``sizes`` with the fewest copies over each of which every parameter divides; None: no number does.

    They are taken from the axis whose size is left to the number of devices (-1), or else from the largest of the
    batch; a recipe with an axis ``data`` of its own is left as it is.
    """
    left = next((axis for axis, size in recipe.mesh.axes.items() if size == -1), None)
    axis = left or max(recipe.batch, key=sizes.__getitem__, default=None)
    if DATA in sizes or axis not in recipe.batch:
        return None
    devices = math.prod(sizes.values())
    inside = sizes[axis] // recipe.mesh.dcn[axis]  # copies are of one slice, or of several whole ones
    for copies in range(2, min(inside, devices // COPY) + 1):
        if inside % copies == 0 and not undivided(names, layouts, in_copies(sizes, axis, copies)):
            return in_copies(sizes, axis, copies)
    return None


def fitted(recipe: Recipe, model: nn.Module, devices: int) -> tuple[Recipe, str]:
    """``recipe`` with as many copies of ``model`` (also on meta) as its shapes need on ``devices``, and why.

    A recipe that fits, and one whose axes all have sizes, is left as it is. Raises UserError if the mesh does not fit
    the devices; what no copies mend is left to `shardwright.layout.plan.make_plan`.
    """
    if devices < 2 * COPY or -1 not in recipe.mesh.axes.values():
        return recipe, ""
    mesh = recipe.mesh.sizes(devices)
    names = dict(model.named_parameters(remove_duplicate=False))
    layouts = {name: shards_of(_line(recipe, name), mesh) for name in names}
    bad = undivided(names, layouts, mesh)
    sizes = copies_of(recipe, names, layouts, mesh) if bad else None
    if sizes is None:
        return recipe, ""
    name, (dim, axes) = next(iter(bad.items()))
    text = (
        f"{sizes[DATA]} copies of the model, each over {devices // sizes[DATA]} devices: dimension {dim} of {name}, "
        f"{names[name].shape[dim]}, is not divisible by {mesh_text(mesh, axes)}"
    )
    return recipe.with_copies(sizes[DATA]), text


def _line(recipe: Recipe, name: str) -> Layout:
    """The layout of the first line that ``name`` matches; replicated without one, which is refused elsewhere."""
    return next((layout for pattern, layout in recipe.lines.items() if matches(pattern, name)), {})
