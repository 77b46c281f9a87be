"""A real TPU compile, as tests/compile/captured/make_step.py left it."""

from __future__ import annotations

import gzip
import json

from shardwright.compile.lowered_graph import Argument, LoweredGraph
from shardwright.xla.chips import CHIPS
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
    plain["arguments"] = tuple(Argument(**{**a, "shape": tuple(a["shape"])}) for a in plain["arguments"])
    return LoweredGraph(hlo=gzip.decompress((CAPTURED / "step.hlo.pb.gz").read_bytes()), **plain)
