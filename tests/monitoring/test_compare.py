"""Several runs on one page, read from their output folders."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwright.errors import UserError
from shardwright.monitoring.compare import read_runs
from shardwright.report.compare_view import differences, last_rows
from tests.support.browser import Browser
from tests.support.paths import ROOT


def folder(path: Path, rate: float, **files: Any) -> str:
    """An output folder, with a log of six steps."""
    path.mkdir(parents=True)
    log = [
        {"step": n, "loss": 5 - rate * n, "tokens_per_second": 1000.0 * n, "learning_rate": rate} for n in range(1, 7)
    ]
    log += [{"step": 2, "eval_loss": 4 - rate}, {"step": 6, "eval_loss": 4 + rate}]
    options = {"recipe": "mixtral_ep", "learning_rate": rate, "output_dir": str(path), "warmup_steps": 0}
    for name, content in {"trainer_state.json": {"log_history": log}, "training_args.json": options, **files}.items():
        (path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    (path / "report.html").touch()
    return str(path)


def test_runs_lie_over_one_another_in_a_browser_with_what_differs_and_their_last_numbers(tmp_path: Path) -> None:
    runs = [folder(tmp_path / "a", 0.1), folder(tmp_path / "b <i>", 0.2)]
    line = [sys.executable, "scripts/compare.py", *runs, "--html", str(tmp_path / "out.html")]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "learning_rate" in done.stdout
    with Browser(width=390) as browser:
        browser.events.clear()
        browser.open(tmp_path / "out.html")
        data = "JSON.parse(document.querySelector('figure.chart').dataset.chart)"
        assert browser.evaluate(f"{data}.lines.map(l => l[0])") == ["a", "b <i>"]
        assert browser.evaluate(f"{data}.lines[1][1].map(p => p[1])") == pytest.approx([4.8, 4.6, 4.4, 4.2, 4.0, 3.8])
        assert browser.evaluate("document.documentElement.scrollWidth") <= 390
        assert browser.evaluate("[...document.links].map(a => a.getAttribute('href'))")[0] == "a/report.html"
        text = browser.evaluate("document.body.innerText")
        requests = [e for e in browser.events if e["method"] == "Network.requestWillBeSent"]
        assert len(requests) == 1
        assert [e for e in browser.events if e["method"] in ("Runtime.exceptionThrown", "Log.entryAdded")] == []
    assert "3.9000 at step 2" in text
    assert "output_dir" not in text


def test_what_a_run_does_not_tell_is_left_open_and_the_first_speed_is_left_out(tmp_path: Path) -> None:
    runs = read_runs([folder(tmp_path / "x" / "run", 0.1), folder(tmp_path / "y" / "run", 0.1)], "page.html")
    assert [run.name for run in runs] == [str(tmp_path / "x" / "run"), str(tmp_path / "y" / "run")]
    assert differences(runs) == []
    assert last_rows(runs)[0][1:] == ("6", "4.4000", "4.1000", "3.9000 at step 2", "4,000", "–", "–")
    empty = [{"step": 0, "eval_loss": math.nan}]  # an evaluation of nothing
    again = [dataclasses.replace(run, log=[*empty, *run.log]) for run in runs]
    assert last_rows(again) == last_rows(runs)


def test_a_run_under_way_is_read_from_its_newest_checkpoint(tmp_path: Path) -> None:
    for step in (9, 10):
        folder(tmp_path / "run" / f"checkpoint-{step}", step / 100)
    (run,) = read_runs([str(tmp_path / "run")], "page.html")
    assert run.log[0]["learning_rate"] == 0.1


def test_a_run_that_goes_on_is_read_from_its_own_line_as_far_as_it_went(tmp_path: Path) -> None:
    state = {"log_history": [{"step": 2, "loss": 3.0}]}  # as it was when the run went on from its second step
    folder(tmp_path / "run", 0.5, **{"trainer_state.json": json.dumps(state), "lineage.json": '{"steps": [2, 6]}'})
    for step in (2, 6, 9):  # the last is of the line that was left
        folder(tmp_path / "run" / f"checkpoint-{step}", step / 100)
    (run,) = read_runs([str(tmp_path / "run")], "page.html")
    assert run.log[0]["learning_rate"] == 0.06


@pytest.mark.parametrize("wrong", ["{", "[]", '{"log_history": [{"loss": 1}]}', None])
def test_a_folder_without_a_log_is_refused(tmp_path: Path, wrong: str | None) -> None:
    path = tmp_path / "none" if wrong is None else Path(folder(tmp_path / "run", 0.1, **{"trainer_state.json": wrong}))
    with pytest.raises(UserError, match=f"the run in {path}"):
        read_runs([str(path)], "page.html")
