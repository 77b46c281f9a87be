"""A recipe: the readable table that says where every tensor of a model lives. Data only; needs no device."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from typing import Any

from torch.distributed.tensor import Replicate, Shard

from trainer.errors import UserError, did_you_mean

Placement = Shard | Replicate
Layout = Mapping[str, Placement]
_CHOICES = {
    "dtype": (None, "float32", "bfloat16"),
    "experts": (None, "dense", "capacity", "dropless"),
    "attention": ("portable", "eager", "sdpa"),
    "remat": ("none", "full", "save_matmuls", "offload"),
    "reduce_gradients": ("step", "micro_batch"),
}


def matches(pattern: str, name: str) -> bool:
    """Whether a dotted ``name`` fits ``pattern``, segment by segment: ``*`` never crosses a dot."""
    patterns, names = pattern.split("."), name.split(".")
    return len(patterns) == len(names) and all(map(fnmatchcase, names, patterns))


@dataclass(frozen=True, init=False)
class Mesh:
    """Named axes in order, from the one that communicates least to the one that communicates most.

    Args:
        dcn: DCN factor per axis (1 where unnamed); their product is the number of slices.
        axes: ICI factor per axis; one may be -1, which takes what is left. An axis has ICI × DCN devices.

    Raises:
        UserError: no axis, a size that is not a positive integer, two -1, or a DCN axis that the mesh lacks.
    """

    axes: dict[str, int]
    dcn: dict[str, int]

    def __init__(self, *, dcn: Mapping[str, int] | None = None, **axes: int) -> None:
        object.__setattr__(self, "axes", dict(axes))
        object.__setattr__(self, "dcn", {axis: (dcn or {}).get(axis, 1) for axis in axes})
        if not axes:
            raise UserError(
                asked="Mesh() without axes",
                found="no axis name",
                why="layouts place tensors on named axes",
                instead="Mesh(fsdp=-1)",
            )
        for axis in dcn or {}:
            _check_axis(axis, axes, f"Mesh(dcn={{{axis!r}: ...}})")
        for axis, size in [*self.dcn.items(), *((axis, size) for axis, size in axes.items() if size != -1)]:
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise UserError(
                    asked=f"mesh axis {axis!r} with a factor of {size!r}",
                    found=f"{self}",
                    why="a factor counts devices, from 1 up; one ICI factor alone may be -1 (what is left)",
                    instead=f"{axis}=1, or {axis}=-1",
                )
        if sum(size == -1 for size in axes.values()) > 1:
            raise UserError(
                asked=f"{self}",
                found="-1 on more than one axis",
                why="only one axis can take what is left",
                instead="give every axis but one a size",
            )

    def __str__(self) -> str:
        """The constructor call that makes this mesh, with only the DCN factors that differ from 1."""
        parts = [f"{axis}={size}" for axis, size in self.axes.items()]
        slices = {axis: factor for axis, factor in self.dcn.items() if factor != 1}
        return f"Mesh({', '.join(parts + ([f'dcn={slices}'] if slices else []))})"

    def ici_sizes(self, devices: int) -> dict[str, int]:
        """Devices along each axis within one slice, in order, with -1 resolved.

        Raises:
            UserError: the mesh does not fit ``devices``.
        """
        fixed = math.prod(size for size in self.axes.values() if size != -1) * math.prod(self.dcn.values())
        has_rest = -1 in self.axes.values()
        if devices < 1 or devices % fixed or (fixed != devices and not has_rest):
            raise UserError(
                asked=f"{self} on {devices} devices",
                found=f"its sizes multiply to {fixed}{' × what is left' if has_rest else ''}",
                why="every device has exactly one place in the mesh",
                instead=f"{self._that_fits(devices)}, or {fixed} devices",
            )
        return {axis: devices // fixed if size == -1 else size for axis, size in self.axes.items()}

    def dcn_sizes(self) -> dict[str, int]:
        """Slices along each axis, in order."""
        return dict(self.dcn)

    def sizes(self, devices: int) -> dict[str, int]:
        """Devices along each axis (ICI × DCN), in order. Raises UserError if they do not fit ``devices``."""
        return {axis: size * self.dcn[axis] for axis, size in self.ici_sizes(devices).items()}

    def _that_fits(self, devices: int) -> Mesh:
        """The nearest mesh of the same axes whose sizes multiply to ``devices`` exactly."""
        left, dcn, ici = max(devices, 1), {}, {}
        for axis, factor in self.dcn.items():
            dcn[axis] = math.gcd(factor, left)
            left //= dcn[axis]
        rest = next((axis for axis, size in self.axes.items() if size == -1), next(iter(self.axes)))
        for axis, size in reversed(self.axes.items()):
            ici[axis] = 1 if axis == rest else math.gcd(size, left)
            left //= ici[axis]
        return Mesh(dcn=dcn, **{axis: left if axis == rest else ici[axis] for axis in self.axes})


@dataclass(frozen=True)
class Compute:
    """How the step computes, apart from layout.

    Args:
        dtype: what matrix products run in; None: bfloat16 on a TPU, float32 elsewhere. How weights and optimizer
            state are stored is an option of the run, not of the recipe.
        experts: ``dropless`` (exact, each expert on its own tokens), ``capacity`` (GShard: tokens beyond an expert's
            capacity are dropped), ``dense`` (exact, every expert on every token), or None: no experts.
        capacity_factor: slots per expert over a perfectly balanced load; only ``capacity`` reads it.
        router_loss: train with the model's own load-balancing loss (its ``router_aux_loss_coef``) too.
        attention: ``portable``, or transformers' ``eager`` or ``sdpa``.
        remat: what backward recomputes: nothing, every layer, or all but matrix products; ``offload`` is ``full`` with
            the layers' inputs in the host's memory meanwhile (on a TPU; elsewhere it is ``full``).
        scan: run equal decoder layers as one scanned layer, stored stacked.
        reduce_gradients: sum gradients over devices once a ``step``, or once a ``micro_batch``: more communication, for
            models whose gradients do not fit on a device undivided by the batch axes. The same with one micro-batch.

    Raises:
        UserError: a value that is none of these.
    """

    dtype: str | None = None
    experts: str | None = None
    capacity_factor: float = 1.25
    router_loss: bool = False
    attention: str = "portable"
    remat: str = "none"
    scan: bool = True
    reduce_gradients: str = "step"

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise UserError(
                    asked=f"Compute({name}={value!r})",
                    found=f"{value!r} is not a {name} of this trainer",
                    why="a compute policy is one of a fixed list",
                    instead=did_you_mean(str(value), filter(None, choices)) + f"one of {', '.join(map(repr, choices))}",
                )
        number = isinstance(self.capacity_factor, int | float) and not isinstance(self.capacity_factor, bool)
        if not number or not 0 < self.capacity_factor < math.inf:
            raise UserError(
                asked=f"Compute(capacity_factor={self.capacity_factor!r})",
                found="not a positive number",
                why="it multiplies the slots each expert has for tokens",
                instead="capacity_factor=1.25; the number of experts / experts per token drops nothing",
            )
        for name in ("router_loss", "scan"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(
                    asked=f"Compute({name}={getattr(self, name)!r})",
                    found=f"a {type(getattr(self, name)).__name__}",
                    why="it is either on or off",
                    instead=f"{name}=True or {name}=False",
                )


@dataclass(frozen=True)
class Recipe:
    """The whole truth about layout, and how the step computes.

    Args:
        mesh: the device grid's axes.
        batch: mesh axes that split the batch's rows.
        parameters: pattern of parameter names → layout; each line matches some, each parameter one line.
        optional: further lines, for parameters that only some models have: these may match nothing.
        activations: pattern of module names → layout of that module's output.
        compute: precision, experts, attention, remat, scan.
        model: transformers config values with ``model_type``: the small model to use when none is asked for.
        name: set by ``load_recipe``.

    Raises:
        UserError: something of the wrong kind, an axis that the mesh lacks, or a pattern in both tables.
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
        _check_kind("batch", self.batch, tuple, 'batch=("fsdp",): one name in brackets needs the comma')
        for axis in self.batch:
            _check_axis(axis, self.mesh.axes, f"batch={self.batch}")
        if len(set(self.batch)) < len(self.batch):
            raise UserError(
                asked=f"batch={self.batch}",
                found="an axis named twice",
                why="an axis splits the rows once",
                instead=f"batch={tuple(dict.fromkeys(self.batch))}",
            )
        for table in ("parameters", "optional", "activations"):
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

    def with_mesh(self, text: str) -> Recipe:
        """This recipe on other ICI factors, e.g. ``fsdp=2,expert=4``; axes keep their order and DCN factors.

        Raises:
            UserError: not ``axis=size,...``, or not the same axes.
        """
        pairs = [part.split("=") for part in text.split(",")]
        whole = all(len(pair) == 2 and pair[1].strip().removeprefix("-").isdecimal() for pair in pairs)
        sizes = {pair[0].strip(): int(pair[1]) for pair in pairs} if whole else {}
        if sizes.keys() != self.mesh.axes.keys() or len(pairs) > len(sizes):
            wrong = next((axis for axis in sizes if axis not in self.mesh.axes), None)
            raise UserError(
                asked=f"mesh {text!r}",
                found=f"recipe {self.name} has the axes {', '.join(self.mesh.axes)}",
                why=f"axis {wrong!r} is not one of them" if wrong else "each of them needs one whole number",
                instead=",".join(f"{axis}={size}" for axis, size in self.mesh.axes.items()),
            )
        return replace(self, mesh=Mesh(dcn=self.mesh.dcn, **{axis: sizes[axis] for axis in self.mesh.axes}))

    def with_compute(self, text: str) -> Recipe:
        """This recipe with another compute policy, e.g. ``remat=offload,capacity_factor=1.25``.

        Raises:
            UserError: not ``name=value,...``, or a name or value that `Compute` has not.
        """
        names = [f.name for f in fields(Compute)]
        changes = {}
        for part in text.split(","):
            name, equals, value = (word.strip() for word in part.partition("="))
            if not equals or name not in names:
                raise UserError(
                    asked=f"compute {text!r}",
                    found=f"{part.strip()!r}",
                    why="each part is one of the compute policy's names and a value",
                    instead=did_you_mean(name, names) + "one of " + ", ".join(f"{n}=…" for n in names),
                )
            try:
                changes[name] = ast.literal_eval(value)
            except (ValueError, SyntaxError):
                changes[name] = value  # a word: remat=full
        return replace(self, compute=replace(self.compute, **changes))

    def as_dict(self) -> dict[str, Any]:
        """The effective recipe as JSON-able values, in the recipe's own terms."""
        tables = {
            table: {pattern: layout_text(layout) for pattern, layout in getattr(self, table).items()}
            for table in ("parameters", "optional", "activations")
        }
        return {
            "name": self.name,
            "mesh": {"axes": self.mesh.axes, "dcn": self.mesh.dcn},
            "batch": list(self.batch),
            **tables,
            "compute": vars(self.compute),
            "model": None if self.model is None else dict(self.model),
        }


def layout_text(layout: Layout) -> dict[str, str]:
    """``{"fsdp": Shard(0)}`` as ``{"fsdp": "Shard(0)"}``."""
    return {
        axis: f"Shard({placement.dim})" if isinstance(placement, Shard) else "Replicate()"
        for axis, placement in layout.items()
    }


def _check_kind(what: str, value: object, kind: type, instead: str) -> None:
    if not isinstance(value, kind):
        raise UserError(
            asked=f"{what}={value!r}",
            found=f"a {type(value).__name__}",
            why=f"{what} is a {kind.__name__}",
            instead=instead,
        )


def _check_axis(axis: str, known: Iterable[str], where: str) -> None:
    if axis not in known:
        raise UserError(
            asked=f"{where}: axis {axis!r}",
            found=f"the mesh has {', '.join(known)}",
            why="a tensor can only be placed along an axis of the mesh",
            instead=did_you_mean(str(axis), known) + "name one of the mesh's axes, or add this one to Mesh(...)",
        )


def _check_layout(where: str, pattern: object, layout: object, mesh: Mesh) -> None:
    _check_kind(f"{where}: the pattern", pattern, str, '"model.layers.*.mlp.gate.weight"')
    _check_kind(f"{where}: the layout", layout, Mapping, '{"fsdp": Shard(0)}, or {} to replicate')
    assert isinstance(layout, Mapping)
    for axis, placement in layout.items():
        _check_axis(axis, mesh.axes, where)
        if not isinstance(placement, Shard | Replicate) or (isinstance(placement, Shard) and placement.dim < 0):
            raise UserError(
                asked=f"{where}: {axis!r}: {placement!r}",
                found="a negative dimension" if isinstance(placement, Shard) else f"a {type(placement).__name__}",
                why="a placement is Shard(dim), counted from 0 at the front, or Replicate()",
                instead=f'"{axis}": Shard(0)',
            )
