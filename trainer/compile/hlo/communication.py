"""Collectives of an HLO module: kind, mesh axes, module and bytes.

Bytes are those of one chip: the output's for an all-gather, the operand's for all others. *Wire bytes* are what a chip
sends over its links if its group of n forms a ring: (n-1)/n of the bytes, and twice that for an all-reduce. For a
permute they are the mean over all chips: a source sends all its bytes, another chip none.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from shardwright.compile.hlo.links import Links
from shardwright.compile.hlo.text import Instruction

KINDS = (
    *("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all"),
    *("collective-permute", "collective-broadcast"),
)

_SCOPE = re.compile(r"^[A-Za-z_]\w*(?:\.(?:\w+|\*))+$")  # a module's name: it has dots
_WRAPPED = re.compile(r"^[a-z]+\((.*)\)$")  # jvp(…), transpose(…)
_NUMBER = re.compile(r"\.\d+$")  # call.1024, model.layers.*.mlp.12: the lowering adds the number


@dataclass(frozen=True)
class Collective:
    """The key under which collectives are counted together."""

    kind: str
    axis: str  # mesh axes that its groups span, `fsdp` or `fsdp×expert`; `within fsdp` if they span it in part
    module: str  # that the compiler's metadata names; without one, the operation or nothing
    shape: str  # of the operand, without layout; of the output for an all-gather
    group: int  # devices of a group
    network: str  # `ici`, or `dcn` between slices


@dataclass(frozen=True)
class Traffic:
    """Runs, bytes and time of a collective, per chip."""

    count: float = 0
    bytes: float = 0
    wire_bytes: float = 0
    exposed_bytes: float = 0  # of the wire bytes, those that are sent while nothing is computed
    seconds: float = 0  # with the links to itself

    def plus(self, other: Traffic, times: float) -> Traffic:
        """Adds ``times`` the other."""
        return Traffic(**{name: value + times * getattr(other, name) for name, value in vars(self).items()})


def collective(
    instruction: Instruction, mesh: dict[str, int], links: Links | None = None
) -> tuple[Collective, Traffic] | None:
    """Reads an instruction as a collective; None for another opcode, a ``-done``, or groups of one device.

    All wire bytes are exposed here: only the caller knows what runs beside it. Without ``links`` it takes no time.
    """
    if instruction.opcode == "send" and "_xla_megascale" in instruction.attributes:
        return _between_slices(instruction, links)
    kind = instruction.opcode.removesuffix("-start")
    if kind not in KINDS:
        return None
    shown = operands = instruction.inputs
    size, devices = sum(leaf.bytes for leaf in operands), math.prod(mesh.values())
    if kind == "collective-permute":
        pairs = _pairs(instruction.attribute(r"source_target_pairs=(\{\{.*?\}\})") or "")
        moving = [pair for pair in pairs if pair[0] != pair[1]]
        if not moving:
            return None
        axis, members, wire = _axes_of_pairs(mesh, moving), moving[0], size * len(moving) / devices
    else:
        members = replica_groups(instruction.attributes, devices)[0]
        if len(members) == 1:
            return None
        axis = axes_of_group(mesh, members)
        if kind == "all-gather":
            shown, size = list(instruction.leaves), size * len(members)
            if instruction.opcode.endswith("-start"):  # operands, outputs, context
                shown = shown[len(operands) : 2 * len(operands)]
        wire = size * (len(members) - 1) / len(members) * (2 if kind == "all-reduce" else 1)
    key = Collective(kind, axis, module_of(instruction.op_name), ", ".join(map(str, shown)), len(members), "ici")
    return key, Traffic(1, size, wire, wire, links.seconds(kind, "ici", members, wire) if links else 0.0)


def _between_slices(instruction: Instruction, links: Links | None) -> tuple[Collective, Traffic]:
    """Reads a send to the host, which passes it on to another slice."""
    kind = (instruction.attribute(r'_xla_megascale_transfer_type="(\w+)"') or "send").lower().replace("_", "-")
    leaf = instruction.inputs[0]
    key = Collective(kind, "slices", module_of(instruction.op_name), str(leaf), 2, "dcn")
    seconds = links.seconds(kind, "dcn", (), leaf.bytes) if links else 0.0
    return key, Traffic(1, leaf.bytes, leaf.bytes, leaf.bytes, seconds)


def module_of(op_name: str) -> str:
    """The innermost module in an ``op_name``, ``model.layers.*.mlp.experts``; without one, the operation or "".

    An op_name is a path of scopes. Those with dots are modules, named by the lowering; the others are the framework's
    operations. A number at the end is left out.
    """
    parts = []
    for part in op_name.split("/"):
        while match := _WRAPPED.match(part):
            part = match[1]
        parts.append(part)
    for part in reversed(parts):
        if _SCOPE.match(scope := _NUMBER.sub("", part)):
            return scope
    last = next((part for part in reversed(parts) if part and not _NUMBER.search(part)), "")
    return f"{last} (backward)" if last and "backward" in op_name and "backward" not in last else last


@lru_cache(maxsize=4096)
def _iota(text: str) -> tuple[tuple[int, ...], ...]:
    """Expands ``[4,2]<=[2,4]T(1,0)``: 0 to 7 as a 2 × 4 array, transposed, then cut into 4 rows of 2."""
    match = re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    assert match is not None, text
    rows, dims, order = ([int(d) for d in (group or "").split(",") if d] for group in match.groups())
    ids = np.arange(math.prod(dims)).reshape(dims).transpose(order or None).reshape(rows)
    return tuple(tuple(int(i) for i in row) for row in ids)


def replica_groups(attributes: str, devices: int) -> tuple[tuple[int, ...], ...]:
    """A collective's groups of device ids; if it names none, all devices are one group."""
    match = re.search(r"replica_groups=(\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?|\{\{.*?\}\})", attributes)
    if match is None:
        return (tuple(range(devices)),)
    return _iota(match[1]) if match[1].startswith("[") else _pairs(match[1])


@lru_cache(maxsize=4096)
def _pairs(text: str) -> tuple[tuple[int, ...], ...]:
    """Parses ``{{0,1},{2,3}}``."""
    return tuple(tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", text))


def axes_of_group(mesh: dict[str, int], group: tuple[int, ...]) -> str:
    """The mesh axes along which a group's devices differ; ``within …`` if it spans them only in part."""
    coordinates = np.unravel_index(np.asarray(group), tuple(mesh.values()))
    spanned = [axis for axis, places in zip(mesh, coordinates, strict=True) if len(np.unique(places)) > 1]
    whole = math.prod(mesh[axis] for axis in spanned) == len(group)
    return ("" if whole else "within ") + "×".join(spanned)


def _axes_of_pairs(mesh: dict[str, int], pairs: Sequence[tuple[int, ...]]) -> str:
    coordinates = np.unravel_index(np.array(pairs), tuple(mesh.values()))  # of each axis [pairs, 2]
    differs = [(ends[:, 0] != ends[:, 1]).any() for ends in coordinates]
    return "×".join(itertools.compress(mesh, differs))
