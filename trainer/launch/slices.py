"""TPU slices: their names at clouds and schedulers, their chips and hosts."""

import math
from dataclasses import dataclass

from shardwright.xla.chips import Topology, topologies

_CHIPS_PER_HOST = 4  # in every slice of several hosts
_ONE_HOST = 8  # chips: v5e and v6e have machines of 1, 4 and 8


@dataclass(frozen=True)
class Generation:
    """The names of a generation of TPUs."""

    gke: str  # value of the node label `cloud.google.com/gke-tpu-accelerator`
    gcloud: str  # prefix of an accelerator type, `v5p` of `v5p-32`
    runtime: str  # software version of a TPU VM; empty: there is none
    units: int  # of an accelerator type, a chip: TensorCores on v4, v5p and tpu7x, chips on v5e and v6e
    ray: str  # Ray's name, VALID_TPU_TYPES in ray/_private/accelerators/tpu.py


# https://cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus, https://cloud.google.com/tpu/docs/runtimes, and
# the pages of each generation there (/v4, /v5e, /v5p, /v6e)
GENERATIONS = {
    "v4": Generation("tpu-v4-podslice", "v4", "tpu-ubuntu2204-base", 2, "v4"),
    "v5e": Generation("tpu-v5-lite-podslice", "v5litepod", "v2-alpha-tpuv5-lite", 1, "v5litepod"),
    "v5p": Generation("tpu-v5p-slice", "v5p", "v2-alpha-tpuv5", 2, "v5p"),
    "v6e": Generation("tpu-v6e-slice", "v6e", "v2-alpha-tpuv6e", 1, "v6e"),
    # xpk 1.16's system characteristics; docs.cloud.google.com/tpu/docs/tpu7x: by GKE or Compute Engine, by no TPU VM of
    # the Cloud TPU API; SkyPilot's table of GKE's TPUs (sky/provision/kubernetes/utils.py) ends with v6e
    "tpu7x": Generation("tpu7x", "tpu7x", "", 2, "v7x"),
}


def generation(topology: Topology) -> Generation:
    return GENERATIONS[topology.chip.name]


def shape(topology: Topology) -> str:
    """The chips along each dimension, ``2x2x4``."""
    return topology.name.partition(":")[2]


def chips(topology: Topology) -> int:
    """The chips of one slice."""
    return math.prod(topology.shape)


def chips_per_host(topology: Topology) -> int:
    """The chips of a TPU VM, or of GKE's largest machine."""
    one_host = len(topology.shape) == 2 and chips(topology) <= _ONE_HOST
    return chips(topology) if one_host else min(chips(topology), _CHIPS_PER_HOST)


def hosts(topology: Topology) -> int:
    """The hosts of one slice."""
    return chips(topology) // chips_per_host(topology)


def accelerator_type(topology: Topology) -> str:
    """The slice's name by size, ``v5p-32``."""
    kind = generation(topology)
    return f"{kind.gcloud}-{chips(topology) * kind.units}"


def as_large(topology: Topology) -> list[str]:
    """The other shapes of as many chips, which share this one's accelerator type."""
    known = topologies(topology.chip)
    return [shape(t) for t in known if chips(t) == chips(topology) and t.shape != topology.shape]
