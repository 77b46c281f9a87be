"""The report of a real compile that fits, and of one that libtpu refused."""

from __future__ import annotations

import json

import pytest

from shardwright.compile.report.report import CompileReport
from shardwright.xla.chips import find_topology
from tests.support.captured import GIB

KEYS = [
    *("peak_bytes", "required_bytes", "argument_bytes", "weights_bytes", "optimizer_bytes", "batch_bytes"),
    *("other_bytes", "output_bytes", "alias_bytes", "temp_bytes", "compiler_temp_bytes", "code_bytes"),
    *("host_temp_bytes", "host_argument_bytes", "fits", "topology", "slices", "devices", "mesh", "chip_hbm_bytes"),
    *("flops", "model_flops", "hbm_bytes", "host_traffic_bytes", "estimated_cycles", "compile_seconds"),
    *("wall_seconds", "kernel_flops", "modules", "kernels", "loops", "collectives", "largest_buffers", "roofline"),
    *("error", "graphs", "estimate", "uncompiled", "values", "libtpu"),
]
COLLECTIVE_KEYS = [
    *("kind", "axis", "count", "bytes", "wire_bytes", "exposed_bytes", "module", "purpose", "network", "shape"),
    "unplanned",
]


def test_a_report_of_a_step_that_fits_adds_up(report: CompileReport) -> None:
    assert report.fits
    assert report.weights_bytes == report.optimizer_bytes == report.alias_bytes // 2
    kinds = report.weights_bytes + report.optimizer_bytes + report.batch_bytes + report.other_bytes
    assert kinds == report.argument_bytes == 3_605_504
    assert report.argument_bytes + report.temp_bytes <= report.required_bytes < report.chip_hbm_bytes
    names = {b.module for b in report.largest_buffers}
    assert {"model.layers.*.mlp.experts.up_proj", "model.layers.*.mlp.experts.down_proj first moment"} <= names
    assert list(report.largest_buffers) == sorted(report.largest_buffers, key=lambda b: -b.bytes)


def test_modules_share_the_step_among_them(report: CompileReport) -> None:
    assert sum(x.cycles for x in report.modules) == report.estimated_cycles
    assert sum(x.flops for x in report.modules) == report.flops
    assert sum(x.hbm_bytes for x in report.modules) == report.hbm_bytes
    experts = next(x for x in report.modules if x.module == "model.layers.*.mlp.experts")
    assert experts.flops > report.flops / 2


def test_the_json_has_these_keys_and_no_others(report: CompileReport, refused: CompileReport) -> None:
    plain = json.loads(json.dumps(report.as_json()))
    assert [*plain] == [*json.loads(json.dumps(refused.as_json()))] == KEYS
    assert [*plain["collectives"][0]] == COLLECTIVE_KEYS
    assert [*plain["largest_buffers"][0]] == ["bytes", "shape", "module", "name"]
    assert [*plain["modules"][0]] == ["module", "flops", "hbm_bytes", "cycles"]
    assert [*plain["graphs"][0]] == [
        *("graph", "fits", "required_bytes", "held_bytes", "temp_bytes", "compile_seconds", "wall_seconds"),
        *("largest_buffers", "error"),
    ]
    assert [*plain["roofline"]] == ["compute", "hbm", "ici", "dcn", "cycles", "bound"]


def test_a_refusal_names_what_did_not_fit(refused: CompileReport) -> None:
    assert not refused.fits
    assert refused.required_bytes == pytest.approx(144 * GIB, rel=1e-3)
    assert refused.chip_hbm_bytes == find_topology("v5p:2x2x2").chip.hbm_bytes
    first = refused.largest_buffers[0]
    assert (first.bytes, first.shape) == (64 * GIB, "f32[2048,1023,8192]")
    assert refused.flops > 3e14  # what was compiled so far is still counted
