"""A notebook's cell, drawn by IPython itself: an error as its four lines, and a bar that is drawn over."""

from __future__ import annotations

from pathlib import Path

import pytest

IPython = pytest.importorskip("IPython", reason="pip install -e '.[test]'")
CELL = """
from shardwright.arguments.training import TrainingArguments
TrainingArguments(recipe="llama_fsdp", max_steps=0)
"""
BAR = """
from rich.console import Console
from rich.progress import BarColumn, TextColumn
from shardwright.report.notebook import live_progress
with live_progress(TextColumn("steps"), BarColumn(), console=Console(force_jupyter=True)) as bar:
    task = bar.add_task("", total=2)
    bar.advance(task)
"""


def test_a_cell_draws_an_error_as_its_four_lines_and_a_bar_without_ipywidgets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    shell = IPython.core.interactiveshell.InteractiveShell.instance()
    shell.history_manager.enabled = False
    shell.run_cell(CELL)
    lines = capsys.readouterr().out.strip().splitlines()
    assert [line.split(":")[0].strip() for line in lines] == ["error", "found", "why not", "instead"], lines
    assert shell.run_cell(BAR).success
    assert "steps" in capsys.readouterr().out
