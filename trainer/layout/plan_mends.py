"""Changes to a recipe that a refusal offers. Each was tried: with it the recipe has a plan, or gets further."""

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import islice

from torch import nn

from shardwright.errors import UserError
from shardwright.layout.patterns import shared_patterns
from shardwright.layout.placement import Shard
from shardwright.layout.plan_checks import collapse
from shardwright.layout.recipe import Layout, Recipe, layout_source, matches

_OFFERED = 3  # meshes in a message
_LINES = 2  # changes of lines in a message
_TRIED = 64  # meshes; a plan of a large model takes some ten milliseconds
_MERGED = 40  # lines, beyond which merging them takes too long
_NEAR = 0.8  # difflib's ratio of two patterns, from which one is a misspelling of the other
_BREAK = "\n           "
_AUTO = "--recipe auto, which splits what divides and takes a --model"
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
        good = (
            mesh
            for mesh in islice(fits, _TRIED)
            if self._refusal(replace(self._recipe, mesh=mesh), self._devices) is None
        )
        return ", or ".join(mesh.option for mesh in islice(good, _OFFERED))

    def count(self, devices: int) -> str:
        """``N devices``, if the recipe as it is has a plan on so many; else nothing."""
        return f"{devices} devices" if devices > 0 and self._refusal(self._recipe, devices) is None else ""

    def fewer(self) -> str:
        """The most devices below these on which the recipe as it is has a plan; empty if there are none."""
        counts = range(self._devices - 1, max(0, self._devices - 1 - _TRIED), -1)
        return next(filter(None, map(self.count, counts)), "")

    def others(self) -> str:
        """Fewer devices for the recipe as it is; and for these ``auto``, which splits what divides."""
        from transformers import PreTrainedModel

        # here, since both load transformers, which a recipe's author need not have
        from shardwright.layout.auto import AUTO, auto_recipe
        from shardwright.models.experts.expert_families import experts_modules

        if self._recipe.name == AUTO or not isinstance(self._model, PreTrainedModel):
            return self.fewer()
        made = auto_recipe(self._model, experts_modules(self._model), None, self._devices).recipe
        fits = self._refusal(made, self._devices) is None
        return "; or ".join(filter(None, [self.fewer(), _AUTO * fits]))

    def missing(self, unmatched: Collection[str], unused: Collection[str]) -> str:
        """Lines for the parameters ``unmatched``, or the spelling that a line of ``unused`` may have meant."""
        lines = self._merged(self._auto(unmatched))
        known = [*self._merged({name: {} for name in unmatched}), *lines, *map(collapse, unmatched)]
        for pattern in unused:
            if near := difflib.get_close_matches(pattern, known, n=1, cutoff=_NEAR):
                return f"did you mean {near[0]!r} by {pattern!r}, which matches nothing?"
        title = "the line " if len(lines) == 1 else f"these lines, as recipe auto has them:{_BREAK}"
        return title + _source(lines)

    def of_regex(self, pattern: str, unmatched: Collection[str]) -> tuple[str, str] | None:
        """The count that an idle ``pattern`` matches if read otherwise, and lines for that; None: nothing either."""
        how, meant = _meant(pattern, self._names)
        wanted = [name for name in meant if name in unmatched] or meant
        if not wanted:
            return None
        said = f"{how} it would match {len(meant)} parameter{'s' * (len(meant) > 1)}"
        return said, self._in_place(pattern, wanted)

    def narrowed(self, patterns: Collection[str]) -> str:
        """The broadest of ``patterns``, which match one parameter, without what other lines of the recipe match."""
        hits = {each: [name for name in self._names if matches(each, name)] for each in patterns}
        broad = max(hits, key=lambda each: len(hits[each]))
        others = [each for each in self._recipe.lines if each != broad]
        rest = [name for name in hits[broad] if not any(matches(each, name) for each in others)]
        if not rest:
            return f"no line {broad!r}"
        return self._in_place(broad, rest)

    def elsewhere(self, names: Collection[str], axes: Sequence[str], most: int = _LINES) -> str:
        """The lines of ``names``, and of those tied to them, with ``axes`` on other dimensions, or with fewer axes."""
        same = {id(self._names[name]) for name in names}
        lines: dict[str, Layout] = {}
        for other in (name for name, parameter in self._names.items() if id(parameter) in same):
            lines |= {pattern: line for pattern, line in self._recipe.lines.items() if matches(pattern, other)}
        good, further, seen = [], [], [lines]
        for change in _changes(axes, min(self._names[name].dim() for name in names)):
            changed = {pattern: change(line) for pattern, line in lines.items()}
            if changed in seen:
                continue
            seen.append(changed)
            refusal = self._refusal(self._with_lines(changed), self._devices)
            if refusal is None:
                good.append(_source(changed))
            elif not any(name in refusal.asked for name in names):
                further.append(_source(changed))
        return (f", or{_BREAK}" if len(lines) > 1 else ", or ").join((good or further)[:most])

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

    def _merged(self, layouts: Mapping[str, Layout]) -> dict[str, Layout]:
        """The ``layouts`` of parameters by few patterns, which match no other parameter."""
        others = {collapse(name) for name in self._names if name not in layouts}
        lines = {name if collapse(name) in others else collapse(name): line for name, line in layouts.items()}
        if len(lines) > _MERGED:
            return lines
        # alike lines of other parameters must not be merged with one another, or they would take part
        apart = {other: (other, "") for other in others}
        found = shared_patterns(apart | {kind: ("", layout_source(line)) for kind, line in lines.items()})
        by_source = {layout_source(line): line for line in lines.values()}
        return {pattern: by_source[source] for pattern, (other, source) in found.items() if not other}

    def _in_place(self, pattern: str, names: Collection[str]) -> str:
        """The layout of the line ``pattern`` on lines that match ``names`` alone."""
        lines = self._merged(dict.fromkeys(names, self._recipe.lines[pattern]))
        return f"in place of {pattern!r}:{_BREAK if len(lines) > 1 else ' '}{_source(lines)}"


def _source(lines: Mapping[str, Layout]) -> str:
    """Lines as a recipe's file has them."""
    return f",{_BREAK}".join(f'"{pattern}": {layout_source(layout)}' for pattern, layout in lines.items())


def _changes(axes: Sequence[str], rank: int) -> Iterator[Callable[[Layout], Layout]]:
    """Changes of a layout: ``axes`` on each dimension, without the last or another of them, without any."""

    def moved(dim: int) -> Callable[[Layout], Layout]:
        return lambda line: {a: Shard(dim) if a in axes else placement for a, placement in line.items()}

    def without(out: Collection[str]) -> Callable[[Layout], Layout]:
        return lambda line: {a: placement for a, placement in line.items() if a not in out}

    yield from map(moved, reversed(range(rank)))
    yield from map(without, [*([axis] for axis in reversed(axes)), list(axes)])


def _meant(pattern: str, names: Iterable[str]) -> tuple[str, list[str]]:
    """The likely meaning of a pattern that matches nothing as a glob, and what it would match so."""
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
