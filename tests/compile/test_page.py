"""The report as a person sees it: on the page and on the terminal."""

from __future__ import annotations

import dataclasses
import re
from io import StringIO

import pytest
from rich.console import Console

from shardwright.compile.report.compile_page import page
from shardwright.compile.report.compile_terminal import print_report
from shardwright.compile.report.estimate import estimate
from shardwright.compile.report.report import CompileReport
from tests.support.captured import V5P


def test_the_page_needs_nothing_else_and_escapes_what_it_shows(refused: CompileReport) -> None:
    text = page(refused, title="<script>alert(1)</script>")
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert not re.search(r"(?:src|href)=|https?://|@import|url\(", text)
    assert "prefers-color-scheme: dark" in text
    assert "Does not fit: 144.0 GiB of 95.7 GiB HBM" in text
    assert "Ran out of memory" in text
    assert "f32[2048,1023,8192]" in text


def test_a_step_that_was_not_compiled_has_no_time(refused: CompileReport) -> None:
    unmade = dataclasses.replace(refused, estimate=estimate({}, V5P, 1.0, 1.0, {}))
    assert (unmade.estimate.tokens_per_second, unmade.estimate.mfu) == (None, None)
    assert "Estimated: " not in page(unmade)


def test_the_bar_of_the_steps_time_has_a_part_for_each_cause(report: CompileReport) -> None:
    (svg,) = re.findall(r'<svg role="img" aria-label="the step&#39;s time".*?</svg>', page(report), re.DOTALL)
    widths = [float(width) for width in re.findall(r'width="([\d.]+)%" height="32"', svg)][1:]
    assert len(widths) == sum(seconds > 0 for seconds in report.estimate.shares.values())
    assert sum(widths) == pytest.approx(100, abs=0.1)


def test_page_and_terminal_say_the_same_and_call_estimates_estimates(report: CompileReport) -> None:
    out = StringIO()
    print_report(report, Console(file=out, width=200))
    for text in (page(report), out.getvalue()):
        assert "Fits:" in text
        assert re.search(r"Estimated: [\d.,]+ \([\d.,]+ to [\d.,]+\) s a step", text)
        assert "Estimated: 0.000 " not in text
        assert "waiting for chips of the slice" in text
        assert "estimate" in text
        assert "model.layers.*.mlp.experts (gradients)" in text
        assert "optimizer state" in text
