"""Time of a collective on a slice's links, by the ring model.

An axis of a mesh lies along one or more dimensions of the torus. A gather along a dimension whose ring is closed sends
both ways, two links a chip; along an open line the chip at its end receives all over one. Where a group takes every
s-th chip of a dimension, s groups share its links. Source: https://jax-ml.github.io/scaling-book/sharding. The links
of an all-to-all are counted by the bytes that cross the busiest of them.

Where a chip is two devices they share its links: each has half, but in a gather of both one copy of what comes from
other chips crosses the links, and the other is passed on inside the chip, which is never the slower part.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from shardwright.xla.chips import Topology
from shardwright.xla.device_order import Device, in_mesh_order

# as jax reads them
_KINDS = {"v4": "TPU v4", "v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite", "tpu7x": "TPU7x"}


@dataclass(frozen=True)
class Ring:
    """A group's ``chips`` along one dimension of the torus; ``links`` of each for a gather, a shared one in part."""

    chips: int
    links: float


@dataclass
class Links:
    """The links of a mesh on a slice."""

    topology: Topology
    ici: Sequence[int]  # factor of each axis within a slice, in mesh order
    dcn: Sequence[int]  # and over slices

    @cached_property
    def coordinates(self) -> list[tuple[int, ...]]:
        """Position in the mesh → the chip's coordinates in its slice, and the device's number on the chip."""
        where = self.topology
        shape = (*where.shape, 1)[:3]
        places = itertools.product(range(where.slices), *map(range, reversed(shape)), range(where.chip.devices))
        devices = [
            Device(number, tuple(reversed(place)), core, index, _KINDS[where.chip.name])
            for number, (index, *place, core) in enumerate(places)
        ]
        return [(*device.coords, device.core_on_chip) for device in in_mesh_order(devices, self.ici, self.dcn)]

    def rings(self, group: Sequence[int]) -> list[Ring]:
        """The dimensions of the torus that a group of positions spans."""
        found = []
        for dimension, values in enumerate(zip(*(self.coordinates[place][:3] for place in group), strict=True)):
            places = sorted(set(values))
            if len(places) == 1:
                continue
            stride = min(b - a for a, b in itertools.pairwise(places))
            size = self.topology.shape[dimension]
            closed = self.topology.wrap[dimension] and len(places) * stride == size > 2
            found.append(Ring(len(places), (2 if closed else 1) / stride))
        return found

    def seconds(self, kind: str, network: str, group: Sequence[int], wire_bytes: float) -> float:
        """Time of a collective that has the links to itself and fills them.

        For ``wire_bytes`` see shardwright.compile.hlo.communication.
        """
        chip = self.topology.chip
        if network == "dcn":
            return wire_bytes / chip.dcn_bandwidth
        rings = self.rings(group)
        if chip.devices > 1 and not rings:  # between the devices of a chip
            return wire_bytes / chip.inner_bandwidth
        bandwidth = chip.link_bandwidth / chip.devices
        if kind == "collective-permute" or not rings:
            return wire_bytes / bandwidth
        if kind.endswith("all-to-all"):
            whole = wire_bytes * len(group) / (len(group) - 1)
            return max(whole * ring.chips / 4 / ring.links for ring in rings) / bandwidth
        members = len(group)
        if len({self.coordinates[place][3] for place in group}) == chip.devices > 1:  # whole chips: one copy for both
            wire_bytes *= (1 - chip.devices / members) / (1 - 1 / members)
            bandwidth *= chip.devices
        return wire_bytes / (bandwidth * math.fsum(ring.links for ring in rings))
