"""A recipe: the readable table that says where every tensor of a model lives, and how the step computes. Data only."""

from __future__ import annotations

import ast
import difflib
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from shardwright.errors import UserError, a_type, did_you_mean
from shardwright.layout.mesh import DATA, SEQUENCE, Mesh, check_axis, mesh_option
from shardwright.layout.placement import Placement, Replicate, Shard

Layout = Mapping[str, Placement]  # axis -> placement, of one tensor
_CHOICES = {
    "dtype": (None, "float32", "bfloat16"),
    "experts": (None, "dense", "capacity", "dropless"),
    "attention": ("shardwright", "eager", "sdpa"),
    "remat": ("none", "full", "save_matmuls", "offload", "auto"),  # or a share
    "reduce_gradients": ("step", "micro_batch"),
}
_EXAMPLES = {  # of a compute policy's values
    "dtype": "bfloat16",
    "experts": "dropless",
    "capacity_factor": 1.25,
    "router_loss": True,
    "remat": "full",
    "attention": "shardwright",
    "scan": True,
    "reduce_gradients": "step",
}
_TABLES = ("parameters", "optional", "activations")  # of a recipe
_NOW = {"portable": "shardwright"}  # values of older recipes


def matches(pattern: str, name: str) -> bool:
    """Whether ``name`` matches ``pattern``, compared between the dots, so that ``*`` never crosses one."""
    patterns, names = pattern.split("."), name.split(".")
    return len(patterns) == len(names) and all(map(fnmatchcase, names, patterns))


@dataclass(frozen=True)
class Compute:
    """The step's computation, apart from layout. docs/recipe_parts.md explains experts, layers that repeat, and memory.

    Args:
        dtype: of matrix products. None: bfloat16 on a TPU, float32 elsewhere.
        experts: ``dropless`` (exact; each expert computes its own tokens), ``capacity`` (GShard: an expert drops the
            tokens beyond its capacity), ``dense`` (exact; every expert computes every token), or None: no experts.
        capacity_factor: an expert's slots for tokens, over those of a perfectly balanced load; for ``capacity`` alone.
        router_loss: add the model's own load-balancing loss, times its ``router_aux_loss_coef``.
        attention: ``shardwright`` (the kernels of this package), or transformers' ``eager`` or ``sdpa``.
        remat: the part of a layer that the backward computes again: ``none``, ``full``, all but the matrix products
            (``save_matmuls``), ``offload`` or ``auto``. A number from 0 to 1 is the share, in bytes, to keep of the
            results of products and attention, first those with most FLOPs a byte.
        scan: store repeating decoder layers stacked, and run them as one scanned layer or period of layers.
        reduce_gradients: sum gradients over devices once a ``step`` or once a ``micro_batch``. The second communicates
            more; it is for models whose gradients fit on a device only when the batch axes split them.

    Raises:
        UserError: a value that is none of these.
    """

    dtype: str | None = None
    experts: str | None = None
    capacity_factor: float = 1.25
    router_loss: bool = False
    attention: str = "shardwright"
    remat: str | float = "none"
    scan: bool = True
    reduce_gradients: str = "step"

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if name == "remat" and type(value) in (int, float) and 0 <= value <= 1:
                continue
            if not isinstance(value, str | None) or value not in choices:
                raise UserError(
                    asked=f"Compute({name}={value!r:.80})",
                    found=f"{value!r:.80}, which is no value of {name}",
                    why="a compute policy is one of a fixed list",
                    instead=(f"{_NOW[str(value)]!r}, its name now; " if str(value) in _NOW else "")
                    + did_you_mean(f"{value!s:.80}", filter(None, choices))
                    + f"one of {', '.join(map(repr, choices))}"
                    + (", or a share from 0 to 1" if name == "remat" else ""),
                )
        factor = self.capacity_factor
        if not isinstance(factor, int | float) or factor is True or not 0 < factor < 2**31:
            raise UserError(
                asked=f"Compute(capacity_factor={factor!r})",
                found="not a positive number",
                why="it multiplies the slots each expert has for tokens",
                instead="capacity_factor=1.25; the number of experts / experts per token drops nothing",
            )
        for name in ("router_loss", "scan"):
            if not isinstance(value := getattr(self, name), bool):
                raise UserError(
                    asked=f"Compute({name}={value!r})",
                    found=f"{a_type(value)}",
                    why="it is either on or off",
                    instead=f"{name}=True or {name}=False",
                )


@dataclass(frozen=True)
class Recipe:
    """The layout of every tensor of a model on a mesh, and how the step computes.

    Args:
        batch: mesh axes that split the batch's rows.
        parameters: pattern of parameter names → layout. Each parameter matches exactly one line, and each line at
            least one parameter.
        optional: lines for parameters that only some models have; these may match nothing.
        activations: pattern of module names → layout of that module's output.
        model: values of a transformers config, ``model_type`` among them: the default model.
        name: the file's, set by ``load_recipe``.

    Raises:
        UserError: a value of the wrong kind, an axis that the mesh lacks, or a pattern in both tables.
    """

    mesh: Mesh
    batch: tuple[str, ...]
    parameters: Mapping[str, Layout]
    optional: Mapping[str, Layout] = field(default_factory=dict)
    activations: Mapping[str, Layout] = field(default_factory=dict)
    compute: Compute = field(default_factory=Compute)
    model: Mapping[str, Any] | None = None
    name: str = ""

    def __post_init__(self) -> None:
        _check_kind("mesh", self.mesh, Mesh, "Mesh(fsdp=-1)")
        _check_kind("compute", self.compute, Compute, 'Compute(dtype="float32")')
        axes = [self.batch] if isinstance(self.batch, str) else list(self.mesh.axes)[:1]
        said = f"batch=({', '.join(map(json.dumps, axes))},)"
        _check_kind("batch", self.batch, tuple, f"{said}: one name in brackets needs the comma")
        for axis in self.batch:
            check_axis(axis, self.mesh.axes, f"batch={self.batch}")
        if len(set(self.batch)) < len(self.batch):
            raise UserError(
                asked=f"batch={self.batch}",
                found="an axis named twice",
                why="an axis splits the rows once",
                instead=f"batch={tuple(dict.fromkeys(self.batch))}",
            )
        for table in _TABLES:
            _check_kind(table, getattr(self, table), Mapping, f"{table}={{pattern: layout, ...}}")
            for pattern, layout in getattr(self, table).items():
                _check_layout(f"{table} line {pattern!r}", pattern, layout, self.mesh)
        for pattern in self.parameters.keys() & self.optional.keys():
            raise UserError(
                asked=f"line {pattern!r} in parameters and in optional",
                found="the same pattern in both tables",
                why="each parameter matches exactly one line",
                instead="keep it in optional if some models lack it, else in parameters",
            )
        if self.model is not None and "model_type" not in self.model:
            raise UserError(
                asked="model= a default model",
                found=f"keys {', '.join(map(str, self.model)) or 'none'}",
                why="transformers picks the class by model_type",
                instead='model={"model_type": "mixtral", ...}',
            )

    @cached_property
    def lines(self) -> dict[str, Layout]:
        """The lines for parameters, optional ones too."""
        return {**self.parameters, **self.optional}

    def with_mesh(self, text: str) -> Recipe:
        """This recipe with other ICI factors, e.g. ``fsdp=2,expert=4``. Axes keep their order and DCN factors.

        An axis ``sequence``, which splits the tokens of each row, and an axis ``data``, along which the model is
        copied, may be named though the recipe lacks them. Raises UserError if ``text`` is not ``axis=size,...``, or
        names other axes than the recipe's.
        """
        pairs = [part.split("=") for part in text.split(",")]
        # no mesh has a factor of more than nine digits, and Python refuses to read a number of thousands
        whole = all(len(p) == 2 and p[1].strip().removeprefix("-")[:10].isdecimal() and len(p[1]) < 10 for p in pairs)
        sizes = {pair[0].strip(): int(pair[1]) for pair in pairs} if whole else {}
        if SEQUENCE in sizes and SEQUENCE not in self.mesh.axes:
            return self._with_split_rows().with_mesh(text)
        if DATA in sizes and DATA not in self.mesh.axes:
            return self.with_copies(1).with_mesh(text)
        if sizes.keys() != self.mesh.axes.keys() or len(pairs) > len(sizes):
            wrong = next((axis for axis in sizes if axis not in self.mesh.axes), None)
            missing = [axis for axis in self.mesh.axes if axis not in sizes]
            meant = self.mesh.axes | {axis: size for axis, size in sizes.items() if axis in self.mesh.axes}
            if wrong and len(missing) == 1:  # the user's word for the one value that is missing
                meant[missing[0]] = sizes[wrong]
            elif wrong and not missing and min(sizes.values()) > 0:  # as many devices
                meant[next(iter(meant))] *= math.prod(size for axis, size in sizes.items() if axis not in meant)
            raise UserError(
                asked=f"mesh {text!r}",
                found=f"recipe {self.name} has the axes {', '.join(self.mesh.axes)}",
                why=f"axis {wrong!r} is not one of them" if wrong else "each of them needs one whole number",
                instead=mesh_option(meant) + (f"; or {wrong} in the recipe's Mesh and lines" if wrong else ""),
            )
        return replace(self, mesh=Mesh(dcn=self.mesh.dcn, **{axis: sizes[axis] for axis in self.mesh.axes}))

    def _with_split_rows(self) -> Recipe:
        """This recipe with an innermost axis that splits the tokens of each row.

        It also splits the activations that batch axes split, and the weights that the first of these splits.
        """
        first = self.batch[0] if self.batch else SEQUENCE

        def cut(lines: Mapping[str, Layout]) -> dict[str, Layout]:
            return {k: {**line, SEQUENCE: line[first]} if first in line else line for k, line in lines.items()}

        parameters, optional = cut(self.parameters), cut(self.optional)
        activations = {pattern: {**layout, SEQUENCE: Shard(1)} for pattern, layout in self.activations.items()}
        mesh = Mesh(dcn=self.mesh.dcn, **self.mesh.axes, **{SEQUENCE: 1})
        return replace(self, mesh=mesh, parameters=parameters, optional=optional, activations=activations)

    def with_copies(self, count: int) -> Recipe:
        """This recipe with an outermost axis ``data`` of ``count`` copies of the model, each with rows of its own.

        Known as HSDP: within a copy parameters lie as the recipe says, and gradients are summed over copies. The axis
        also splits the activations that the first batch axis splits.
        """
        first = self.batch[0] if self.batch else DATA

        def cut(layout: Layout) -> Layout:
            return {DATA: layout[first], **layout} if first in layout else layout

        activations = {pattern: cut(layout) for pattern, layout in self.activations.items()}
        mesh = Mesh(dcn=self.mesh.dcn, **{DATA: count}, **self.mesh.axes)
        return replace(self, mesh=mesh, batch=(DATA, *self.batch), activations=activations)

    def with_head(self, names: Collection[str], inside: str) -> Recipe:
        """This recipe for a decoder, whose ``names`` of parameters begin with ``inside``, under another head.

        Lines of other heads, which match none of ``names``, are left out; a parameter of the head that no line matches
        is replicated.
        """

        def kept(lines: Mapping[str, Layout]) -> dict[str, Layout]:
            return {k: v for k, v in lines.items() if k.startswith(inside) or any(matches(k, name) for name in names)}

        parameters, optional = kept(self.parameters), kept(self.optional)
        head = [name for name in names if not name.startswith(inside)]
        left = [name for name in head if not any(matches(k, name) for k in (*parameters, *optional))]
        return replace(self, parameters=parameters | {name: {} for name in left}, optional=optional)

    def with_compute(self, text: str) -> Recipe:
        """This recipe with another compute policy, e.g. ``remat=offload,capacity_factor=1.25``.

        Raises UserError if ``text`` is not ``name=value,...``, or `Compute` has no such name or value.
        """
        names = [f.name for f in fields(Compute)]
        changes = {}
        for part in text.split(","):
            name, equals, value = (word.strip() for word in part.partition("="))
            if not equals or name not in names:
                near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
                meant = near[0] if near else "remat"
                raise UserError(
                    asked=f"compute {text!r}",
                    found=f"{part.strip()!r}",
                    why="each part is one of the compute policy's names and a value: " + ", ".join(names),
                    instead=f"--compute {meant}={value if near and value else _EXAMPLES[meant]}",
                )
            try:
                changes[name] = ast.literal_eval(value.title() if value in ("true", "false") else value)
            # a word, as in remat=full; or a literal that Python can't hold
            except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
                changes[name] = value
        return self.computing(**changes)

    def computing(self, **changes: Any) -> Recipe:
        """This recipe with other values of ``compute``."""
        return replace(self, compute=replace(self.compute, **changes))

    def as_dict(self) -> dict[str, Any]:
        """The recipe as values for JSON, under its own names."""
        values: dict[str, Any] = {"name": self.name, "mesh": vars(self.mesh), "batch": list(self.batch)}
        for table in _TABLES:
            values[table] = {pattern: layout_text(layout) for pattern, layout in getattr(self, table).items()}
        return {**values, "compute": vars(self.compute), "model": None if self.model is None else dict(self.model)}


def layout_text(layout: Layout) -> dict[str, str]:
    """A layout as text: ``{"fsdp": Shard(0)}`` becomes ``{"fsdp": "Shard(0)"}``."""
    return {axis: f"Shard({p.dim})" if isinstance(p, Shard) else "Replicate()" for axis, p in layout.items()}


def layout_source(layout: Layout) -> str:
    """A layout as a recipe's file has it: ``{"fsdp": Shard(0)}``."""
    return "{" + ", ".join(f"{json.dumps(axis)}: {text}" for axis, text in layout_text(layout).items()) + "}"


def _check_kind(what: str, value: object, kind: type, instead: str) -> None:
    if not isinstance(value, kind):
        found, why = f"{a_type(value)}", f"{what} is a {kind.__name__}"
        raise UserError(asked=f"{what}={value!r}", found=found, why=why, instead=instead)


def _check_layout(where: str, pattern: object, layout: object, mesh: Mesh) -> None:
    """Raises UserError unless ``layout`` places tensors along axes of ``mesh``; ``where``: the line, for messages."""
    _check_kind(f"{where}: the pattern", pattern, str, '"model.layers.*.mlp.gate.weight"')
    if not isinstance(layout, Mapping):
        raise UserError(
            asked=f"{where}: {layout!r:.80}",
            found=a_type(layout),
            why="a layout says on which axes a tensor is split, and which of its dimensions: {axis: Shard(dim)}",
            instead=f'"{pattern}": {{"{next(iter(mesh.axes))}": Shard(0)}}, or "{pattern}": {{}} to replicate it',
        )
    for axis, placement in layout.items():
        check_axis(axis, mesh.axes, where)
        counted = not isinstance(placement, Shard) or (type(placement.dim) is int and placement.dim >= 0)
        if not isinstance(placement, Shard | Replicate) or not counted:
            raise UserError(
                asked=f"{where}: {axis!r}: {placement!r}",
                found=("a negative dimension" if type(placement.dim) is int else f"dimension {placement.dim!r}")
                if isinstance(placement, Shard)
                else f"{a_type(placement)}",
                why="a placement is Shard(dim), counted from 0 at the front, or Replicate()",
                instead=f'"{axis}": Shard({placement if type(placement) is int and placement >= 0 else 0})',
            )
