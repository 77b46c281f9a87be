"""A mesh: the grid of devices as named axes, and its sizes on a number of devices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from shardwright.errors import UserError, did_you_mean

# the axis that splits the tokens of each row, in any recipe whose mesh has it
SEQUENCE = "sequence"
# the axis along which each device has a copy of the model, and rows of its own
DATA = "data"
_OFFERED = 3  # meshes in one message
_MOST = 2**20  # devices, some times the largest cluster: how to lay out more would be tried for minutes


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
                    instead=f"{axis}={size}"
                    if str(size).isdecimal() and str(size) != "0"
                    else f"{axis}=1, or {axis}=-1",
                )
        if others := [axis for axis, size in axes.items() if size == -1][1:]:
            meant = {axis: 2 if axis in others else size for axis, size in axes.items()}
            raise UserError(
                asked=f"{self}",
                found="-1 on more than one axis",
                why="only one axis can take what is left",
                instead=f"every axis but one with a size, such as {Mesh(dcn=dcn, **meant)}",
            )

    def __str__(self) -> str:
        """The call that makes this mesh."""
        parts = [f"{axis}={size}" for axis, size in self.axes.items()]
        slices = {axis: factor for axis, factor in self.dcn.items() if factor != 1}
        return f"Mesh({', '.join(parts + ([f'dcn={slices}'] if slices else []))})"

    @property
    def option(self) -> str:
        """The option of a command that gives a recipe these ICI factors."""
        return mesh_option(self.axes)

    def ici_sizes(self, devices: int) -> dict[str, int]:
        """Devices along each axis within one slice, in order, with -1 resolved; UserError if ``devices`` don't fit."""
        if devices < 1:
            why = "it counts devices"
            raise UserError(asked=f"--devices {devices}", found=f"{devices}", why=why, instead="--devices 8")
        if devices > _MOST:
            asked, found = f"{self} on {devices:,} devices", f"more than {_MOST:,}"
            raise UserError(asked=asked, found=found, why="no cluster has so many", instead="fewer devices")
        fixed = math.prod(size for size in self.axes.values() if size != -1) * math.prod(self.dcn.values())
        has_rest = -1 in self.axes.values()
        if devices % fixed or (fixed != devices and not has_rest):
            raise UserError(
                asked=f"{self} on {devices} devices",
                found=f"its sizes multiply to {fixed}{' × what is left' if has_rest else ''}",
                why="every device has exactly one place in the mesh",
                instead=", or ".join(self._offers(devices) + [f"{fixed} devices"] * (not has_rest)),
            )
        return {axis: devices // fixed if size == -1 else size for axis, size in self.axes.items()}

    def sizes(self, devices: int) -> dict[str, int]:
        """Devices along each axis (ICI × DCN), in order, with -1 resolved; raises as :meth:`ici_sizes`."""
        return {axis: size * self.dcn[axis] for axis, size in self.ici_sizes(devices).items()}

    def over_slices(self, slices: int, devices: int) -> Mesh:
        """This mesh, its axis ``data`` over ``slices`` slices where no DCN factor says otherwise and they divide it.

        Raises UserError where no axis says how it lies on the slices, or for DCN factors of another number of them.
        """
        size, asked = self.axes.get(DATA, 1), math.prod(self.dcn.values())
        if asked == slices:
            return self
        if asked == 1 and (size == -1 or size % slices == 0):
            return Mesh(dcn={DATA: slices}, **{**self.axes, DATA: size if size == -1 else size // slices})
        raise UserError(
            asked=f"{self}: DCN factors for {asked} slices",
            found=f"the devices form {slices} slices",
            why="only devices of one slice are joined by ICI",
            instead="no dcn=, and these factors in the axes' own sizes"
            if slices == 1
            else self._joined(slices, devices),
        )

    def _joined(self, slices: int, devices: int) -> str:
        """The ways to lay out this mesh on so many slices, for a message."""
        sizes = self.sizes(devices)
        axis = next((axis for axis, size in sizes.items() if size % slices == 0), None)
        ways = [f"dcn={{{next(iter(sizes))!r}: {slices}}} on the axis that communicates least"]
        if axis is not None and DATA not in sizes:
            ways.insert(0, f"{mesh_option(in_copies(sizes, axis, slices))}, a copy of the model on each slice")
        return "; or ".join(ways)

    def fitting(self, devices: int) -> list[Mesh]:
        """The meshes of these axes and DCN factors for exactly ``devices`` devices, the nearest first."""
        slices = math.prod(self.dcn.values())
        if devices < 1 or devices % slices:
            return []
        fixed = {axis: size for axis, size in self.axes.items() if size != -1}
        made = [
            Mesh(dcn=self.dcn, **{**self.axes, **dict(zip(fixed, sizes, strict=True))})
            for sizes in _factors(devices // slices, len(fixed), exact=len(fixed) == len(self.axes))
        ]

        def distance(mesh: Mesh) -> tuple[float, list[float]]:
            """The distance of the sizes from these; of two as far the one that keeps the innermost axes."""
            each = [round(abs(math.log(mesh.axes[axis] / size)), 9) for axis, size in fixed.items()]
            return round(sum(each), 9), each[::-1]

        return sorted(made, key=distance)

    def _offers(self, devices: int) -> list[str]:
        """The meshes nearest to this one that fit ``devices``, or one with smaller DCN factors where these don't."""
        if near := self.fitting(devices):
            return [mesh.option for mesh in near[:_OFFERED]]
        left, dcn = devices, {}
        for axis, factor in self.dcn.items():
            dcn[axis] = math.gcd(factor, left)
            left //= dcn[axis]
        return [str(Mesh(dcn=dcn, **self.axes).fitting(devices)[0])]


def mesh_factors(sizes: Mapping[str, int | str]) -> str:
    """The sizes as ``--mesh`` takes them: ``fsdp=2,expert=4``."""
    return ",".join(f"{axis}={size}" for axis, size in sizes.items())


def mesh_option(sizes: Mapping[str, int | str]) -> str:
    """The option that gives a recipe these sizes: ``--mesh fsdp=2,expert=4``."""
    return f"--mesh {mesh_factors(sizes)}"


def in_copies(sizes: Mapping[str, int], axis: str, copies: int) -> dict[str, int]:
    """``sizes`` with an outermost axis ``data`` of ``copies``, which are taken from ``axis``."""
    return {DATA: copies, **sizes, axis: sizes[axis] // copies}


def _factors(number: int, count: int, exact: bool) -> Iterator[tuple[int, ...]]:
    """Each way to write ``number``, or a divisor of it unless ``exact``, as a product of ``count`` factors."""
    if count == 0:
        if number == 1 or not exact:
            yield ()
        return
    for first in (n for n in range(1, number + 1) if number % n == 0):
        yield from ((first, *others) for others in _factors(number // first, count - 1, exact))


def check_axis(axis: str, known: Iterable[str], where: str) -> None:
    """Raises UserError unless ``axis`` is one of ``known``; ``where``: the place that names it, for messages."""
    if axis not in known:
        raise UserError(
            asked=f"{where}: axis {axis!r}",
            found=f"the mesh has {', '.join(known)}",
            why="a tensor can only be placed along an axis of the mesh",
            instead=f"{did_you_mean(str(axis), known)}one of {', '.join(known)}; or this one added to Mesh(...)",
        )
