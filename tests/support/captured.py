"""A real TPU compile, as tests/compile/captured/make_step.py left it."""

from __future__ import annotations

import gzip
import json

from shardwright.compile.hlo.cost import Cost, count
from shardwright.compile.hlo.links import Links
from shardwright.compile.hlo.text import parse
from shardwright.compile.lowered_graph import Argument, LoweredGraph
from shardwright.layout.partition import PartitionSpec
from shardwright.xla.chips import CHIPS, find_topology
from tests.support.paths import CAPTURED

MESH = {"fsdp": 2, "expert": 4}
GIB = 2**30
V5P = CHIPS["v5p"]


def captured(name: str) -> str:
    """The text of a captured file."""
    return gzip.decompress((CAPTURED / f"{name}.gz").read_bytes()).decode()


def captured_step() -> LoweredGraph:
    """The small step, as it was lowered."""
    plain = json.loads((CAPTURED / "step.json").read_text())
    for each in plain["arguments"]:
        each |= {"shape": tuple(each["shape"]), "spec": _spec(each["spec"])}
    plain["arguments"] = tuple(Argument(**each) for each in plain["arguments"])
    plain["outputs"] = tuple(map(_spec, plain["outputs"]))
    return LoweredGraph(hlo=gzip.decompress((CAPTURED / "step.hlo.pb.gz").read_bytes()), **plain)


def _spec(entries: list[str | list[str] | None]) -> PartitionSpec:
    return tuple(tuple(entry) if isinstance(entry, list) else entry for entry in entries)


def counted(hlo: str, mesh: dict[str, int] = MESH, layers: int = 1, topology: str = "v5p:2x2x2") -> Cost:
    """The cost of a module's text for a chip of a slice that the mesh fills."""
    links = Links(find_topology(topology), tuple(mesh.values()), (1,) * len(mesh))
    return count(parse(hlo), mesh, layers, links)
