"""Checks between a recipe, a model's shapes and a mesh; each raises UserError, with what ``mends`` offer instead."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from shardwright.errors import UserError, did_you_mean
from shardwright.layout.copies import Shards, copies_of, undivided
from shardwright.layout.mesh import DATA, mesh_option
from shardwright.layout.recipe import Layout, Recipe, layout_source, layout_text, matches
from shardwright.report.units import mesh_text

if TYPE_CHECKING:
    from shardwright.layout.plan_mends import Mends

_ALONE = ": a scalar only replicates"


def collapse(name: str) -> str:
    """A parameter's name with ``*`` for layer and expert numbers, as in a recipe."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def _listing(notes: Mapping[str, str]) -> str:
    """Names, one kind (:func:`collapse`) a line, each with its note and count."""
    groups = Counter(f"{collapse(name)} {note}" for name, note in notes.items())
    lines = [group + (f", {count} of them" if count > 1 else "") for group, count in groups.items()]
    return "\n           ".join(lines)


def match_lines(recipe: Recipe, names: Mapping[str, torch.Tensor], mends: Mends | None) -> dict[str, str]:
    """Parameter name → the pattern of the one line that it matches; each line but an optional one must match some."""
    patterns = [*recipe.parameters, *recipe.optional]
    hits = {name: [pattern for pattern in patterns if matches(pattern, name)] for name in names}
    used = {pattern for found in hits.values() for pattern in found}
    unused = [pattern for pattern in recipe.parameters if pattern not in used]
    unmatched = [name for name, found in hits.items() if not found]
    doubled = {name: f"matches {' and '.join(found)}" for name, found in hits.items() if len(found) > 1}
    title = f"recipe {recipe.name}"
    for pattern in unused if mends else []:
        if mends and (meant := mends.of_regex(pattern, unmatched)) is not None:
            raise UserError(
                asked=f"{title}: line {pattern!r}",
                found=f"no parameter matches it; {meant[0]}",
                why="a pattern is compared as file names are, part by part between the dots: * is any text without a "
                "dot, [qkv] one of three letters",
                instead=meant[1],
            )
    if unmatched:
        shapes = {name: f"of shape {list(names[name].shape)}" for name in unmatched}
        raise UserError(
            asked=f"{title}: a layout for every parameter",
            found=f"no line matches\n           {_listing(shapes)}",
            why="a parameter without a line would be replicated without a word",
            instead=mends.missing(unmatched, unused) if mends else "",
        )
    if doubled:
        raise UserError(
            asked=f"{title}: one line for each parameter",
            found=_listing(doubled),
            why="two lines could ask for two layouts",
            instead=mends.narrowed(hits[next(iter(doubled))]) if mends else "",
        )
    if unused:
        raise UserError(
            asked=f"{title}: line {unused[0]!r}" + (f" and {len(unused) - 1} more" if unused[1:] else ""),
            found="no parameter matches " + ", ".join(map(repr, unused)),
            why="a line that matches nothing is a misspelling, or meant for another model",
            instead=f"no line {unused[0]!r}; or moved to optional={{...}}, whose lines may match nothing",
        )
    return {name: found[0] for name, found in hits.items()}


def check_tied(recipe: Recipe, aliases: Mapping[str, str], layouts: Mapping[str, Layout]) -> None:
    """Raises UserError unless both names of each tied parameter have one layout."""
    for alias, name in aliases.items():
        if layouts[alias] != layouts[name]:
            raise UserError(
                asked=f"recipe {recipe.name}: {alias} as {layout_text(layouts[alias])}",
                found=f"{name} as {layout_text(layouts[name])}, and the model ties the two: one tensor",
                why="one tensor has one layout",
                instead=f'"{collapse(alias)}": {layout_source(layouts[name])}, as on the line of {collapse(name)}',
            )


def check_dimensions(
    recipe: Recipe, names: Mapping[str, torch.Tensor], layouts: Mapping[str, Shards], mends: Mends | None
) -> None:
    """Raises UserError unless each parameter has every dimension that its layout splits."""
    for name, parameter in names.items():
        rank = parameter.dim()
        for axis, dim in ((axis, shard.dim) for axis, shard in layouts[name].items() if shard.dim >= rank):
            raise UserError(
                asked=f"recipe {recipe.name}: {name}: {axis!r}: Shard({dim})",
                found=f"it has shape {list(parameter.shape)}",
                why=f"dimension {dim} is out of range: they are counted from 0",
                instead=(mends.elsewhere([name], [axis]) if mends else "") + _ALONE * (not rank),
            )


def check_divisible(
    recipe: Recipe,
    names: Mapping[str, torch.Tensor],
    layouts: Mapping[str, Shards],
    mesh: Mapping[str, int],
    mends: Mends | None,
) -> None:
    """Raises UserError unless every dimension is divisible by the sizes of the axes that split it.

    The error lists all parameters that fail, with remedies for the first.
    """
    bad = undivided(names, layouts, mesh)
    if not bad:
        return
    name, (dim, axes) = next(iter(bad.items()))
    shape, sizes = tuple(names[name].shape), copies_of(recipe, names, layouts, mesh)
    copied = f"{mesh_option(sizes)}, which is {sizes[DATA]} copies of the model" if sizes else ""
    alike = [other for other, found in bad.items() if found == bad[name]]
    smaller = copied or ((mends.mesh() or mends.others()) if mends else "")
    offers = [smaller, mends.elsewhere(alike, axes, 1 if smaller else 2) if mends else ""]
    raise UserError(
        asked=f"recipe {recipe.name}: dimension {dim} of {name} over {mesh_text(mesh, axes)}",
        found=_listing({other: f"of shape {list(names[other].shape)}" for other in bad}),
        why=f"{shape[dim]} is not divisible by {math.prod(mesh[axis] for axis in axes)}",
        instead="; or\n           ".join(filter(None, offers)),
    )


def check_activations(recipe: Recipe, model: nn.Module) -> None:
    """Raises UserError unless each line of ``activations`` names a module of the model, and one that has an output."""
    modules = {name: module for name, module in model.named_modules() if name}
    for pattern in recipe.activations:
        found = [module for name, module in modules.items() if matches(pattern, name)]
        asked = f"recipe {recipe.name}: activations line {pattern!r}"
        if not found:
            raise UserError(
                asked=asked,
                found="no module of the model has such a name",
                why="an activation is the output of a module",
                instead=did_you_mean(pattern, dict.fromkeys(map(collapse, modules))) + "correct or remove the line",
            )
        if all(isinstance(module, nn.ModuleList | nn.ModuleDict) for module in found):
            raise UserError(
                asked=asked,
                found=f"a {type(found[0]).__name__}, which has no output of its own",
                why="an activation is the output of a module",
                instead=f'"{pattern}.*", for each module in it',
            )
