"""TPU generations and their slices: a chip's peaks, and libtpu's options to compile for a slice.

A slice has libtpu's name: ``v5p:4x4x4``, the generation and the chips along each dimension. The generations are those
that libtpu 0.0.52 compiles for and that can be rented; libtpu 0.0.21 does not know tpu7x.
"""

import itertools
import math
import operator
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from shardwright.errors import UserError, did_you_mean

_GIB, _MIB = 2**30, 2**20


@dataclass(frozen=True)
class Chip:
    """Peaks of one device; bandwidths are bytes/s.

    A device is a chip, or one of its ``devices``; these share the chip's links.
    """

    name: str
    libtpu: str  # libtpu's name of the generation
    config: str | None  # libtpu's chip configuration; megacore makes one device of a chip's two cores
    flops: float  # bf16 FLOP/s; a multiply-add is two
    hbm_bytes: int  # for a program: HBM less the system's reserve, from out-of-memory errors of libtpu
    hbm_bandwidth: float
    links: int  # of ICI, a chip
    link_bandwidth: float  # each way of each
    dcn_bandwidth: float  # to other slices
    clock: float  # Hz of the compiler's estimated cycles: `flops` divided by the FLOPs of all MXUs in a cycle
    pod: tuple[int, ...]  # chips along each dimension of the largest slice
    mxu: int = 128  # rows and columns of a matrix unit
    host_bandwidth: float = 16e9  # each way between the chip and its host's memory
    devices: int = 1  # of a chip
    inner_bandwidth: float = 0.0  # each way between the devices of a chip

    def missing_flags(self, given: str, libtpu: str, *, run: bool = False) -> dict[str, str]:
        """This chip's flags for that libtpu, name → value, without those that ``given`` (LIBTPU_INIT_ARGS) sets.

        A ``run`` sets those too that take too long for a quick compile.
        """
        named = {word.lstrip("-").partition("=")[0] for word in given.split()}
        ours = FLAGS[self.name] | (NEWER_FLAGS.get(self.name, {}) if _knows_newer_flags(libtpu) else {})
        ours |= RUN_FLAGS.get(self.name, {}) if run else {}
        return {name: value for name, value in ours.items() if name not in named}

    @property
    def flops_a_byte(self) -> float:
        return self.flops / self.hbm_bandwidth

    @property
    def ici_bandwidth(self) -> float:
        """Bytes/s that a device can send over its share of all the chip's links together."""
        return self.links * self.link_bandwidth / self.devices


# FLOPs, HBM bandwidth, ICI: https://docs.cloud.google.com/tpu/docs/v4, /v5e, /v5p, /v6e (ICI of the last three: 400,
# 1,200 and 800 GB/s a chip, both ways together); v4's links: https://arxiv.org/abs/2304.01433.
# DCN: the same pages, 50 Gbps a chip of v5p, 6.4 and 25.6 Tbps a pod of 256 v5e and v6e; v4's:
# https://jax-ml.github.io/scaling-book/tpus/. MXUs a chip: 8, 4 and 8 of 128×128; v6e's 4 of 256×256 (its page has said
# 2 and 4; with 2 the clock would be 3.5 GHz, and libtpu estimates 409,000 FLOPs a cycle for a large matmul: 4).
# Host: PCIe of v4 and v6e, the same page of the scaling book; for the others no figure was found, and v4's is taken.
# tpu7x: docs.cloud.google.com/tpu/docs/tpu7x, for a chip 2,307 TFLOP/s, 192 GiB, 7,380 GB/s, ICI 1,200 GB/s both ways
# together, DCN 100 Gbps; a device is half of it, and reaches the other half six times as fast as over a link. Its 9,216
# chips as a torus: 16x24x24. MXUs: libtpu 0.0.52 estimates 420,000 FLOPs a cycle of a device for a large matmul: 4 of
# 256×256. Host: v6e's 32 GB/s a chip (the scaling book) is taken.
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v4", "v4", "megacore", 275e12, 32 * _GIB - 1280 * _MIB, 1200e9, 6, 50e9, 6.25e9, 1.05e9, (16, 16, 16)),
        Chip("v5e", "v5e", None, 197e12, 16 * _GIB - 258 * _MIB, 819e9, 4, 50e9, 3.125e9, 1.5e9, (16, 16)),
        Chip("v5p", "v5", "megacore", 459e12, 96 * _GIB - 263 * _MIB, 2765e9, 6, 100e9, 6.25e9, 1.75e9, (16, 16, 24)),
        Chip(
            *("v6e", "v6e", None, 918e12, 63 * _GIB // 2 - 260 * _MIB, 1640e9, 4, 100e9, 12.5e9, 1.75e9, (16, 16)),
            *(256, 32e9),
        ),
        Chip(
            *("tpu7x", "tpu7x", None, 2307e12 / 2, 96 * _GIB - 1290 * _MIB, 7380e9 / 2, 6, 100e9, 6.25e9, 2.2e9),
            *((16, 24, 24), 256, 16e9, 2, 600e9),
        ),
    )
}


# torch_xla 2.9's own LIBTPU_INIT_ARGS on a TPU host (torch_xla/__init__.py, _setup_libtpu_flags), so that a compile
# here gives the same as a compile there.
_TORCH_XLA = {
    "xla_tpu_use_enhanced_launch_barrier": "false",
    "xla_latency_hiding_scheduler_rerun": "1",
    "xla_tpu_prefer_async_allgather_to_allreduce": "true",
    "xla_tpu_enable_flash_attention": "false",
}
_TORCH_XLA_V5 = {"xla_enable_async_all_gather": "true", "xla_enable_async_collective_permute": "true", **_TORCH_XLA}
# Ours: see docs/tpu.md, "Compiler flags".
_EXCHANGE = {"xla_tpu_enable_async_all_to_all": "true"}
_VMEM = {"xla_tpu_scoped_vmem_limit_kib": "32768"}
# Chip → compiler flags of a run on it and of a compile for it, unless the user sets them.
FLAGS: dict[str, dict[str, str]] = {
    "v4": _TORCH_XLA,
    "v5e": _TORCH_XLA_V5 | _VMEM,
    "v5p": _TORCH_XLA_V5 | _EXCHANGE | _VMEM,
    "v6e": _TORCH_XLA | _EXCHANGE,
    "tpu7x": _TORCH_XLA | _EXCHANGE,
}
# Chip → flags for libtpu 0.0.52 and later (one in between may not know them all). It fuses gathers with products on v5e
# alone, where 0.0.21 does on all; asked to on v5p it refuses ("Continuation fusion … not supported on platforms other
# than TPU v5e"). So gathers and scatters go to the sparse cores, which run them beside products: gathers over one, two
# or three dimensions of the torus have a flag each. On tpu7x that is the default, and v4's take none.
_FROM = (0, 0, 52)
_SPARSE_CORES = "xla_tpu_enable_sparse_core_collective_offload"
_KINDS = ("all_gather", "2d_all_gather", "3d_all_gather", "reduce_scatter")
NEWER_FLAGS = {chip: {f"{_SPARSE_CORES}_{kind}": "true" for kind in _KINDS} for chip in ("v5p", "v6e")}
# Chip → flags of a run alone: they shorten its steps, and a compile for it takes several times as long.
RUN_FLAGS = {"v6e": {"xla_tpu_scoped_vmem_limit_kib": "98304"}}


def _knows_newer_flags(libtpu: str) -> bool:
    """Whether the version, which for a file of no package is none, is one that takes NEWER_FLAGS."""
    return bool(re.fullmatch(r"\d+(\.\d+)+", libtpu)) and tuple(map(int, libtpu.split("."))) >= _FROM


# Dimensions → slices: of 3 those smaller than a 4×4×4 cube (one chip of tpu7x too); of 2 all but the pod. Source: pages
# above.
_SMALL = {3: ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4)), 2: ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16))}


@dataclass(frozen=True)
class Topology:
    """Equal slices, joined by DCN; ``shape``: chips along each dimension of a slice."""

    chip: Chip
    shape: tuple[int, ...]
    slices: int = 1

    @property
    def name(self) -> str:
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"

    @property
    def devices(self) -> int:
        return math.prod(self.shape) * self.chip.devices * self.slices

    @property
    def wrap(self) -> tuple[bool, ...]:
        """For each of libtpu's three dimensions, whether links close the ring.

        On v4, v5p and tpu7x optical switches close all three in slices of whole 4×4×4 cubes. On v5e and v6e a dimension
        is closed if it is as long as the pod's.
        """
        if len(self.shape) == 3:
            return (all(size % 4 == 0 for size in self.shape),) * 3
        return (*(size == pod for size, pod in zip(self.shape, self.chip.pod, strict=True)), False)

    def libtpu(self) -> tuple[str, dict[str, Any]]:
        """The name and options for ``jax.experimental.topologies.get_topology_desc``."""
        host = (1, 1, 1) if math.prod(self.shape) == 1 else (2, 2, 1)
        config = {"chip_config_name": self.chip.config} if self.chip.config is not None else {}
        options = {"chips_per_host_bounds": host, "num_slices": self.slices, "wrap": self.wrap, **config}
        return f"{self.chip.libtpu}:{self.name.partition(':')[2]}", options


def topologies(chip: Chip) -> list[Topology]:
    """The slices of a generation, small ones first; those of whole cubes in ascending dimensions."""
    large: Iterable[tuple[int, ...]] = [chip.pod]
    one = [(1, 1, 1)] if chip.devices > 1 else []  # a machine of one chip
    if len(chip.pod) == 3:
        cubes = itertools.combinations_with_replacement(range(4, max(chip.pod) + 1, 4), 3)
        large = (cube for cube in cubes if all(map(operator.le, cube, chip.pod)))
    shapes = sorted([*one, *_SMALL[len(chip.pod)], *large], key=lambda shape: (math.prod(shape), shape))
    return [Topology(chip, shape) for shape in shapes]


def find_topology(name: str, slices: int = 1) -> Topology:
    """The topology of ``slices`` slices called ``name``; raises UserError, with the known names, if there is none."""
    known = {t.name: t for chip in CHIPS.values() for t in topologies(chip)}
    if name in known:
        return replace(known[name], slices=slices)
    generation = name.partition(":")[0]
    meant = _of_size(name, known.values()) or did_you_mean(name, known)
    # of another generation, up to 512 chips
    shown = [n for n in known if n.startswith(f"{generation}:")] or [n for n, t in known.items() if t.devices <= 512]
    raise UserError(
        asked=f"topology {name}",
        found="no slice of that name" if generation in CHIPS else f"no TPU generation {generation!r}",
        why="libtpu compiles for the links and chips of a real slice",
        instead=meant + "one of: " + ", ".join(shown),
    )


def _of_size(name: str, known: Iterable[Topology]) -> str:
    """``did you mean`` with the slices of a cloud's accelerator type, such as ``v5p-32``; empty where it is none.

    Its number counts TensorCores of the generations with a torus of three dimensions, and chips of the others.
    """
    if not (found := re.fullmatch(r"(v\w+|tpu7x)-(\d+)", name)):
        return ""
    kind = "v5e" if found[1].startswith("v5lite") else found[1]
    sizes = (t for t in known if t.chip.name == kind)
    names = [t.name for t in sizes if math.prod(t.shape) * (2 if len(t.shape) == 3 else 1) == int(found[2])]
    return f"{name} is {' or '.join(names)}; " if names else ""
