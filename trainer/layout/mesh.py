"""A mesh: the grid of devices as named axes, and its sizes on a number of devices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shardwright.errors import UserError, did_you_mean

# the axis that splits the tokens of each row, in any recipe whose mesh has it
SEQUENCE = "sequence"
# the axis along which each device has a copy of the model, and rows of its own
DATA = "data"


@dataclass(frozen=True, init=False)
class Mesh:
    """The grid's axes in order, from the one that communicates least to the one that communicates most.

    The size of an axis is its ICI factor (within a slice) times its DCN factor (over slices).

    Args:
        dcn: axis → DCN factor, 1 by default. Their product is the number of slices.
        axes: axis → ICI factor. One may be -1: the devices that the others leave.

    Raises:
        UserError: no axis, a factor that is not a positive integer, two -1, or a DCN axis that the mesh lacks.
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
            check_axis(axis, axes, f"Mesh(dcn={{{axis!r}: ...}})")
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
        """The call that makes this mesh."""
        parts = [f"{axis}={size}" for axis, size in self.axes.items()]
        slices = {axis: factor for axis, factor in self.dcn.items() if factor != 1}
        return f"Mesh({', '.join(parts + ([f'dcn={slices}'] if slices else []))})"

    def ici_sizes(self, devices: int) -> dict[str, int]:
        """Devices along each axis within one slice, in order, with -1 resolved; UserError if ``devices`` don't fit."""
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

    def sizes(self, devices: int) -> dict[str, int]:
        """Devices along each axis (ICI × DCN), in order, with -1 resolved; raises as :meth:`ici_sizes`."""
        return {axis: size * self.dcn[axis] for axis, size in self.ici_sizes(devices).items()}

    def over_slices(self, slices: int) -> Mesh:
        """This mesh, its axis ``data`` over ``slices`` slices where no DCN factor says otherwise and they divide it."""
        size = self.axes.get(DATA, 1)
        if math.prod(self.dcn.values()) > 1 or slices < 2 or (size != -1 and size % slices):
            return self
        return Mesh(dcn={DATA: slices}, **{**self.axes, DATA: size if size == -1 else size // slices})

    def _that_fits(self, devices: int) -> Mesh:
        """The nearest mesh of the same axes for exactly ``devices`` devices."""
        left, dcn, ici = max(devices, 1), {}, {}
        for axis, factor in self.dcn.items():
            dcn[axis] = math.gcd(factor, left)
            left //= dcn[axis]
        rest = next((axis for axis, size in self.axes.items() if size == -1), next(iter(self.axes)))
        for axis, size in reversed(self.axes.items()):
            ici[axis] = 1 if axis == rest else math.gcd(size, left)
            left //= ici[axis]
        return Mesh(dcn=dcn, **{axis: left if axis == rest else ici[axis] for axis in self.axes})


def in_copies(sizes: Mapping[str, int], axis: str, copies: int) -> dict[str, int]:
    """``sizes`` with an outermost axis ``data`` of ``copies``, which are taken from ``axis``."""
    return {DATA: copies, **sizes, axis: sizes[axis] // copies}


def check_axis(axis: str, known: Iterable[str], where: str) -> None:
    """Raises UserError unless ``axis`` is one of ``known``; ``where``: the place that names it, for messages."""
    if axis not in known:
        raise UserError(
            asked=f"{where}: axis {axis!r}",
            found=f"the mesh has {', '.join(known)}",
            why="a tensor can only be placed along an axis of the mesh",
            instead=did_you_mean(str(axis), known) + "name one of the mesh's axes, or add this one to Mesh(...)",
        )
