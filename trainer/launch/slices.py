"""TPU slices by the names that clouds and schedulers give them, and how many hosts they have."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardwright.xla.chips import Topology, topologies

_CHIPS_PER_HOST = 4  # of every slice that has several hosts
_ONE_HOST = 8  # chips; v5e and v6e have machines of 1, 4 and 8


@dataclass(frozen=True)
class Generation:
    """What a generation of TPUs is called.

    Args:
        gke: the value of the node label `cloud.google.com/gke-tpu-accelerator`.
        gcloud: what an accelerator type begins with: `v5p` of `v5p-32`.
        runtime: the software version of a TPU VM.
        counted: what an accelerator type counts, a chip: its TensorCores on v4 and v5p, itself on v5e and v6e.
    """

    gke: str
    gcloud: str
    runtime: str
    counted: int


# https://cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus, https://cloud.google.com/tpu/docs/runtimes, and
# the pages of each generation there (/v4, /v5e, /v5p, /v6e)
GENERATIONS = {
    "v4": Generation("tpu-v4-podslice", "v4", "tpu-ubuntu2204-base", 2),
    "v5e": Generation("tpu-v5-lite-podslice", "v5litepod", "v2-alpha-tpuv5-lite", 1),
    "v5p": Generation("tpu-v5p-slice", "v5p", "v2-alpha-tpuv5", 2),
    "v6e": Generation("tpu-v6e-slice", "v6e", "v2-alpha-tpuv6e", 1),
}


def generation(topology: Topology) -> Generation:
    """What the generation of ``topology`` is called."""
    return GENERATIONS[topology.chip.name]


def shape(topology: Topology) -> str:
    """Its chips along each dimension: ``2x2x4``."""
    return topology.name.partition(":")[2]


def chips(topology: Topology) -> int:
    """The chips of one slice."""
    return math.prod(topology.shape)


def hosts(topology: Topology) -> int:
    """The hosts of one slice, as TPU VMs and GKE's largest machine have them."""
    if len(topology.shape) == 2 and chips(topology) <= _ONE_HOST:
        return 1
    return chips(topology) // _CHIPS_PER_HOST


def chips_per_host(topology: Topology) -> int:
    """The chips of each host."""
    return chips(topology) // hosts(topology)


def accelerator_type(topology: Topology) -> str:
    """Its name by size: ``v5p-32``."""
    kind = generation(topology)
    return f"{kind.gcloud}-{chips(topology) * kind.counted}"


def as_large(topology: Topology) -> list[str]:
    """The shapes of other slices of as many chips, which a name by size does not tell from this one."""
    known = topologies(topology.chip)
    return [shape(t) for t in known if chips(t) == chips(topology) and t.shape != topology.shape]
