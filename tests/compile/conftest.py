"""What is read from the real compiles in tests/compile/captured, once for all tests."""

from __future__ import annotations

import json

import pytest

from shardwright.compile.hlo.cost import Cost
from shardwright.compile.report.report import CompileReport, Expected, make_report
from shardwright.xla.chips import find_topology
from tests.support.captured import captured, captured_step, counted
from tests.support.paths import CAPTURED


@pytest.fixture(scope="session")
def cost() -> Cost:
    """What the small step costs."""
    return counted(captured("optimised.hlo"), layers=3)


@pytest.fixture(scope="session")
def large_cost() -> Cost:
    """What the large step costs, as far as it was compiled."""
    return counted(captured("optimised_large.hlo"), layers=3)


@pytest.fixture(scope="session")
def report() -> CompileReport:
    """The report of the small step, which fits."""
    result = {**json.loads((CAPTURED / "result.json").read_text()), "wall_seconds": 8.0}
    hlo, buffers = captured("optimised.hlo"), captured("buffers.txt")
    expected = Expected(model_flops=8 * 1e9, tokens=8 * 256)
    return make_report(captured_step(), find_topology("v5p:2x2x2"), result, hlo, buffers, expected)


@pytest.fixture(scope="session")
def refused() -> CompileReport:
    """The report of the large step, which does not fit."""
    result = {"error": (CAPTURED / "out_of_memory.txt").read_text(), "cpu_seconds": 185.0, "wall_seconds": 236.0}
    hlo = captured("optimised_large.hlo")
    return make_report(captured_step(), find_topology("v5p:2x2x2"), result, hlo, "", Expected())
