"""Checks between a recipe, a model's shapes and a mesh; each raises UserError."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from shardwright.errors import UserError, did_you_mean
from shardwright.layout.copies import Shards, copies_of, undivided
from shardwright.layout.mesh import DATA
from shardwright.layout.recipe import Layout, Recipe, layout_text, matches

_LISTED = 16  # kinds of parameter in one message; a decoder has fewer, so an empty recipe's message lists all


def collapse(name: str) -> str:
    """A parameter's name with ``*`` for layer and expert numbers, as in a recipe."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def _listing(notes: Mapping[str, str]) -> str:
    """Names, one kind (:func:`collapse`) a line, each with its note and count."""
    groups = Counter(f"{collapse(name)} {note}" for name, note in notes.items())
    lines = [group + (f", {count} of them" if count > 1 else "") for group, count in groups.items()]
    if len(lines) > _LISTED:
        lines[_LISTED:] = [f"and {len(lines) - _LISTED} more kinds"]
    return "\n           ".join(lines)


def match_lines(recipe: Recipe, names: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Parameter name → the pattern of the one line that it matches; each line but an optional one must match some."""
    patterns = [*recipe.parameters, *recipe.optional]
    hits = {name: [pattern for pattern in patterns if matches(pattern, name)] for name in names}
    used = {pattern for found in hits.values() for pattern in found}
    unused = [pattern for pattern in recipe.parameters if pattern not in used]
    unmatched = [name for name, found in hits.items() if not found]
    doubled = {name: f"matches {' and '.join(found)}" for name, found in hits.items() if len(found) > 1}
    title = f"recipe {recipe.name}"
    if unmatched:
        shapes = {name: f"of shape {list(names[name].shape)}" for name in unmatched}
        near = f"; or mend {unused[0]!r}, which matches nothing" if unused else ""
        raise UserError(
            asked=f"{title}: a layout for every parameter",
            found=f"no line matches\n           {_listing(shapes)}",
            why="a parameter without a line would be replicated without a word",
            instead=f'a line such as "{collapse(unmatched[0])}": {{}} to replicate it{near}',
        )
    if doubled:
        raise UserError(
            asked=f"{title}: one line for each parameter",
            found=_listing(doubled),
            why="two lines could ask for two layouts",
            instead="narrow one of the patterns until each parameter matches one alone",
        )
    if unused:
        kinds = dict.fromkeys(map(collapse, names))
        raise UserError(
            asked=f"{title}: line {unused[0]!r}" + (f" and {len(unused) - 1} more" if unused[1:] else ""),
            found="no parameter matches " + ", ".join(map(repr, unused[:_LISTED])),
            why="a line that matches nothing is a misspelling, or meant for another model",
            instead=did_you_mean(unused[0], kinds) + "correct it, remove it, or move it to optional={...}",
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
                instead=f"the same layout on the lines of {collapse(alias)} and {collapse(name)}",
            )


def check_dimensions(recipe: Recipe, names: Mapping[str, torch.Tensor], layouts: Mapping[str, Shards]) -> None:
    """Raises UserError unless each parameter has every dimension that its layout splits."""
    for name, parameter in names.items():
        rank = parameter.dim()
        for axis, dim in ((axis, shard.dim) for axis, shard in layouts[name].items() if shard.dim >= rank):
            raise UserError(
                asked=f"recipe {recipe.name}: {name}: {axis!r}: Shard({dim})",
                found=f"it has shape {list(parameter.shape)}",
                why=f"dimension {dim} is out of range: they are counted from 0",
                instead=f'"{axis}": Shard({rank - 1})' if rank else "{}: a scalar only replicates",
            )


def check_divisible(
    recipe: Recipe, names: Mapping[str, torch.Tensor], layouts: Mapping[str, Shards], mesh: Mapping[str, int]
) -> None:
    """Raises UserError unless every dimension is divisible by the sizes of the axes that split it.

    The error lists all parameters that fail, with remedies for the first.
    """
    bad = undivided(names, layouts, mesh)
    if not bad:
        return
    name, (dim, axes) = next(iter(bad.items()))
    shape, sizes = tuple(names[name].shape), copies_of(recipe, names, layouts, mesh)
    text = ",".join(f"{axis}={size}" for axis, size in (sizes or {}).items())
    copied = [f"--mesh {text}, which is {sizes[DATA]} copies of the model"] if sizes else []
    raise UserError(
        asked=f"recipe {recipe.name}: dimension {dim} of {name} over {' × '.join(f'{a}={mesh[a]}' for a in axes)}",
        found=_listing({other: f"of shape {list(names[other].shape)}" for other in bad}),
        why=f"{shape[dim]} is not divisible by {math.prod(mesh[axis] for axis in axes)}",
        instead="; or ".join([*copied, *_remedies(shape, dim, axes, layouts[name], mesh)]),
    )


def _remedies(
    shape: tuple[int, ...], dim: int, axes: Sequence[str], layout: Shards, mesh: Mapping[str, int]
) -> Iterator[str]:
    """Sizes of an axis with which ``axes`` would divide ``dim``, other dimensions that they would, or none at all."""
    devices = math.prod(mesh.values())
    for axis in axes:
        others = math.prod(mesh[other] for other in axes if other != axis)
        fit = [str(n) for n in range(1, devices + 1) if devices % n == 0 and shape[dim] % (n * others) == 0]
        if fit:
            yield f"{axis} of size {' or '.join(fit)}"
    # with the axes that split these already
    together = [{*axes, *(a for a, shard in layout.items() if shard.dim == other)} for other in range(len(shape))]
    splits = [math.prod(mesh[axis] for axis in both) for both in together]
    fit = [f"Shard({other})" for other, size in enumerate(shape) if other != dim and size % splits[other] == 0]
    if fit:
        yield f"shard another dimension: {' or '.join(fit)}"
    yield "replicate: leave the axis out of that line"


def check_activations(recipe: Recipe, model: nn.Module) -> None:
    """Raises UserError unless each line of ``activations`` names a module of the model."""
    modules = [name for name, _ in model.named_modules() if name]
    for pattern in recipe.activations:
        if not any(matches(pattern, name) for name in modules):
            raise UserError(
                asked=f"recipe {recipe.name}: activations line {pattern!r}",
                found="no module of the model has such a name",
                why="an activation is the output of a module",
                instead=did_you_mean(pattern, dict.fromkeys(map(collapse, modules))) + "correct or remove the line",
            )
