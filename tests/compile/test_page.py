"""The report as a person sees it: on the page and on the terminal."""

from __future__ import annotations

import re
from io import StringIO
from pathlib import Path

from rich.console import Console

from trainer.compile.page import page, write_page
from trainer.compile.report import CompileReport
from trainer.compile.terminal import print_report


def test_the_page_needs_nothing_else_and_escapes_what_it_shows(refused: CompileReport, tmp_path: Path) -> None:
    write_page(refused, tmp_path / "deep" / "report.html", title="<script>alert(1)</script>")
    text = (tmp_path / "deep" / "report.html").read_text()
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert not re.search(r"(?:src|href)=|https?://|@import|url\(", text)
    assert "prefers-color-scheme: dark" in text
    assert "Does not fit: 144.0 GiB of 95.7 GiB HBM" in text
    assert "Ran out of memory" in text
    assert "f32[2048,1023,8192]" in text


def test_page_and_terminal_say_the_same_and_call_estimates_estimates(report: CompileReport) -> None:
    out = StringIO()
    print_report(report, Console(file=out, width=200))
    for text in (page(report), out.getvalue()):
        assert "Fits:" in text
        assert "estimate" in text
        assert "model.layers.*.mlp.experts (gradients)" in text
        assert "optimizer state" in text
