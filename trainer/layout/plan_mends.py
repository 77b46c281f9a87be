"""Changes to a recipe that a refusal offers. Each was tried: with it the recipe has a plan, or gets further."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import islice

from torch import nn

from shardwright.errors import UserError
from shardwright.layout.mesh import Mesh
from shardwright.layout.patterns import shared_patterns
from shardwright.layout.placement import Shard
from shardwright.layout.plan_checks import collapse
from shardwright.layout.recipe import Layout, Recipe, layout_source, matches

_OFFERED = 3  # changes of one kind in a message
_MERGED = 40  # lines, beyond which merging them takes too long
_NEAR = 0.8  # difflib's ratio of two patterns, from which one is a misspelling of the other
_BREAK = "\n           "
_REGEX = re.compile(r"[\\()|+^${}]")  # in no glob of a parameter's name


class Mends:
    """Offers for one recipe, model and number of devices. ``refusal`` is the error of a changed recipe, if any."""

    def __init__(
        self,
        recipe: Recipe,
        model: nn.Module,
        devices: int,
        refusal: Callable[[Recipe, int], UserError | None],
    ) -> None:
        self._recipe, self._model, self._devices, self._refusal = recipe, model, devices, refusal
        self._names = dict(model.named_parameters(remove_duplicate=False))

    def mesh(self) -> str:
        """Meshes of the same axes with which there is a plan, as options; empty if there is none."""
        fits = (m for m in self._recipe.mesh.fitting(self._devices) if m != self._recipe.mesh)
        good = (mesh for mesh in fits if self._refusal(replace(self._recipe, mesh=mesh), self._devices) is None)
        offered = ["--mesh " + _sizes(mesh) for mesh in islice(good, _OFFERED)]
        return ", or ".join(offered)

    def count(self, devices: int) -> str:
        """``, or N devices``, if the recipe as it is has a plan on so many; else nothing."""
        return f", or {devices} devices" if self._refusal(self._recipe, devices) is None else ""

    def missing(self, unmatched: Collection[str], unused: Collection[str]) -> str:
        """Lines for the parameters ``unmatched``, or the spelling that a line of ``unused`` may have meant."""
        lines = self._merged(self._auto(unmatched), unmatched)
        known = [*self._merged(dict.fromkeys(unmatched, {}), unmatched), *lines, *map(collapse, unmatched)]
        for pattern in unused:
            if near := difflib.get_close_matches(pattern, known, n=1, cutoff=_NEAR):
                return f"did you mean {near[0]!r} by {pattern!r}, which matches nothing?"
        title = "the line " if len(lines) == 1 else f"these lines of {len(lines)}, as recipe auto has them:{_BREAK}"
        return title.replace(f" of {len(lines)}", "") + f",{_BREAK}".join(_line(*each) for each in lines.items())

    def of_regex(self, pattern: str, unmatched: Collection[str]) -> tuple[str, str] | None:
        """How ``pattern``, which as a glob matches nothing, was meant, and the lines that say so; None: no other way."""
        how, meant = _meant(pattern, self._names)
        wanted = [name for name in meant if name in unmatched] or meant
        if not wanted:
            return None
        lines = self._merged(dict.fromkeys(wanted, self._table[pattern]), wanted)
        said = f"{how} it would match {len(meant)} parameter{'s' * (len(meant) > 1)}"
        return said, self._in_place(pattern, lines)

    def narrowed(self, patterns: Collection[str]) -> str:
        """The broadest of ``patterns``, which match one parameter, without those that the others match."""
        hits = {each: [name for name in self._names if matches(each, name)] for each in patterns}
        broad = max(hits, key=lambda each: len(hits[each]))
        others = {name for each in hits if each != broad for name in hits[each]}
        rest = [name for name in hits[broad] if name not in others]
        if not rest:
            return f"no line {broad!r}"
        return self._in_place(broad, self._merged(dict.fromkeys(rest, self._table[broad]), rest))

    def elsewhere(self, name: str, axes: Iterable[str], error: UserError) -> str:
        """The line of ``name`` with ``axes`` on other dimensions or none; of a tied one those of all its names."""
        tied = [other for other, p in self._names.items() if p is self._names[name]]
        patterns = list(dict.fromkeys(p for other in tied for p in self._table if matches(p, other)))
        layout = next(self._table[p] for p in self._table if matches(p, name))
        good, further = [], []
        for changed in _changes(layout, list(axes), self._names[name].dim()):
            refusal = self._refusal(self._with_lines(dict.fromkeys(patterns, changed)), self._devices)
            text = " with ".join(_line(pattern, changed) for pattern in patterns)
            if refusal is None:
                good.append(text)
            elif (refusal.asked, refusal.found) != (error.asked, error.found):
                further.append(text)
        return ", or ".join((good or further)[:_OFFERED])

    @property
    def _table(self) -> dict[str, Layout]:
        return {**self._recipe.parameters, **self._recipe.optional}

    def _with_lines(self, lines: Mapping[str, Layout]) -> Recipe:
        """The recipe with other layouts on some of its lines."""
        tables = (self._recipe.parameters, self._recipe.optional)
        parameters, optional = ({p: lines.get(p, line) for p, line in table.items()} for table in tables)
        return replace(self._recipe, parameters=parameters, optional=optional)

    def _auto(self, names: Collection[str]) -> dict[str, Layout]:
        """The layouts that recipe auto would give on this mesh; replicated, where the model is not transformers'."""
        from transformers import PreTrainedModel

        if not isinstance(self._model, PreTrainedModel):
            return {name: {} for name in names}
        from shardwright.layout.auto import kinds_of

        kinds = kinds_of(self._model, self._recipe.mesh.sizes(self._devices))
        return {name: kinds[collapse(name)] for name in names}

    def _merged(self, layouts: Mapping[str, Layout], wanted: Collection[str]) -> dict[str, Layout]:
        """``layouts`` of the parameters ``wanted`` by few patterns, which match no other parameter."""
        others = {collapse(name) for name in self._names if name not in wanted}
        lines: dict[str, object] = {other: None for other in others}  # None: not to be matched
        layout_of = {}
        for name in wanted:
            kind = name if collapse(name) in others else collapse(name)
            layout_of[kind] = layouts[name]
            lines[kind] = layout_source(layouts[name])
        if len(layout_of) > _MERGED:
            return layout_of
        # alike lines of other parameters must not be merged with one another, or they would take part
        unlike = {kind: (kind if line is None else "", line) for kind, line in lines.items()}
        found = {pattern: line for pattern, (_, line) in shared_patterns(unlike).items() if line is not None}
        by_source = {layout_source(layout): layout for layout in layout_of.values()}
        return {pattern: by_source[str(source)] for pattern, source in found.items()}

    def _in_place(self, pattern: str, lines: Mapping[str, Layout]) -> str:
        shown = f",{_BREAK}".join(_line(*each) for each in lines.items())
        return f"in place of {pattern!r}:{_BREAK if len(lines) > 1 else ' '}{shown}"


def _sizes(mesh: Mesh) -> str:
    return ",".join(f"{axis}={size}" for axis, size in mesh.axes.items())


def _line(pattern: str, layout: Layout) -> str:
    return f'"{pattern}": {layout_source(layout)}'


def _changes(layout: Layout, axes: list[str], rank: int) -> Iterator[Layout]:
    """``layout`` with ``axes`` on each other dimension, on none, and with fewer of them where they are."""
    own = {axis: placement.dim for axis, placement in layout.items() if isinstance(placement, Shard)}
    for dim in reversed(range(rank)):
        if any(own.get(axis) != dim for axis in axes):
            yield {axis: Shard(dim) if axis in axes else placement for axis, placement in layout.items()}
    for left_out in [*([axis] for axis in reversed(axes)), *([axes] if len(axes) > 1 else [])]:
        yield {axis: placement for axis, placement in layout.items() if axis not in left_out}


def _meant(pattern: str, names: Iterable[str]) -> tuple[str, list[str]]:
    """How a pattern that matches nothing as a glob may have been meant, and what it would match so."""
    names = list(names)
    try:
        as_regex = re.compile(pattern)
    except re.error:
        pass
    else:
        tests = [as_regex.fullmatch, *([as_regex.search] if _REGEX.search(pattern) else [])]
        for test in tests:
            if found := [name for name in names if test(name)]:
                return "as a regular expression", found
    return "with a * that crosses dots", [name for name in names if fnmatchcase(name, pattern)]
