"""A run's page as a person sees it: in a real browser, as the run goes, after a restart, on a disk that is full."""

from __future__ import annotations

import errno
import io
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import TrainerCallback

from shardwright.checkpoint.output_folder import find_output
from shardwright.checkpoint.read import open_checked
from shardwright.errors import UserError
from shardwright.files.folder import Folder
from shardwright.loop import TrainingLoop
from shardwright.report.goodput import read_lives
from shardwright.xla.chips import CHIPS
from tests.step.test_routing import ANY_MOE, deepseek
from tests.step.test_routing_run import corpus
from tests.support.browser import Browser
from tests.support.jobs import job_of


class Reader(TrainerCallback):
    """Reads the page at the beginning of each step, as a person does who opens it."""

    def __init__(self) -> None:
        self.seen: dict[int, str] = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if (page := Path(args.output_dir, "report.html")).exists():
            self.seen[state.global_step] = page.read_text()


@dataclass
class Run:
    """Two lives of a run in one folder: steps 1 to 4, then 3 to 6 from checkpoint-2. The first could write no page.

    Args:
        seen: step → the page before the next one, in the second life.
        said: what the first printed.
    """

    output: Path
    trainer: TrainingLoop
    seen: dict[int, str]
    said: str

    @property
    def log(self) -> list[dict[str, Any]]:
        return self.trainer.state.log_history


def live(
    output: Path, console: Console, resume: Path | None = None, more: Sequence[TrainerCallback] = (), **options: Any
) -> tuple[TrainingLoop, Reader]:
    options = {"max_steps": 4, "save_steps": 2, "logging_steps": 1, "sequence_length": 16} | options
    options |= {"eval_strategy": "steps", "eval_steps": 2, "output_dir": str(output)}
    found = None if resume is None else open_checked(Folder(resume), console)
    reader = Reader()
    job = job_of(ANY_MOE, deepseek(), **options)
    trainer = TrainingLoop(
        job, corpus(options["sequence_length"]), resume=found, console=console, callbacks=[reader, *more]
    )
    trainer.train()
    return trainer, reader


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    output = tmp_path_factory.mktemp("watch")
    (output / "compile.html").write_text("<p>fits</p>")
    printed, write = io.StringIO(), Folder.write

    def full(self: Folder, name: str, data: bytes) -> None:
        if name == "report.html":
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, name, data)

    with pytest.MonkeyPatch.context() as patch:
        for room in ("monitoring.log", "monitoring.run_page"):  # MFU and HBM are those of a chip whose peak is known
            patch.setattr(f"shardwright.{room}.chip", lambda: CHIPS["v5e"])
        patch.setattr("shardwright.monitoring.run_page._SHARE", 1e9)  # however quick a step is, its page is written
        with patch.context() as inner:
            inner.setattr(Folder, "write", full)
            live(output, Console(file=printed, width=200), sequence_length=20)  # of a shape that no other test compiles
        assert not (output / "report.html").exists()
        trainer, reader = live(
            output,
            Console(quiet=True),
            resume=output / "checkpoint-2",
            sequence_length=20,
            max_steps=6,
            profile_steps="5:6",
        )
    return Run(output, trainer, reader.seen, printed.getvalue())


@pytest.fixture(scope="module")
def browser() -> Any:
    with Browser() as opened:
        yield opened


def hovered(browser: Browser, title: str, step: float, down: float = 0.5) -> str:
    """The text of the chart called ``title`` says with the pointer over a step, at a part of its height from above."""
    chart = f"[...document.querySelectorAll('figure.chart')].find(f => f.textContent.includes({json.dumps(title)}))"
    browser.evaluate(f"{chart}.scrollIntoView({{block: 'center'}})")
    x, y = browser.evaluate(
        f"""(() => {{ const f = {chart}, d = JSON.parse(f.dataset.chart), r = f.querySelector('svg')
        .getBoundingClientRect(), [l, t, e, b] = d.plot, k = r.width / f.querySelector('svg').viewBox.baseVal.width;
        return [r.left + k * (l + ({step} - d.x0) / (d.x1 - d.x0) * (e - l)),
        r.top + k * (t + {down} * (b - t))] }})()"""
    )
    browser.hover(x, y)
    box = f"{chart}.querySelector('output')"
    assert browser.evaluate(f"getComputedStyle({box}).visibility") == "visible"
    return browser.evaluate(f"{box}.value")


@pytest.mark.slow
def test_a_person_opens_the_page_hovers_and_reads_the_values_of_the_log(run: Run, browser: Browser) -> None:
    browser.open(run.output / "report.html")
    said = hovered(browser, "Loss (nats a token)", step=3)
    logged = {entry["step"]: entry for entry in run.log if "loss" in entry}
    assert said.splitlines()[0] == "step 3"
    assert float(re.search(r"training: (\S+)", said)[1]) == pytest.approx(logged[3]["loss"], rel=1e-5)
    held = {entry["step"]: entry["eval_loss"] for entry in run.log if "eval_loss" in entry}
    at, value = re.search(r"held out: (\S+)", hovered(browser, "Loss", step=6)), held[6]
    assert float(at[1]) == pytest.approx(value, rel=1e-5)
    rate = hovered(browser, "Learning rate", step=5)
    assert float(re.search(r"rate: (\S+)", rate)[1]) == pytest.approx(logged[5]["learning_rate"], rel=1e-5)
    busiest = hovered(browser, "Busiest expert of each layer", step=3.5, down=0.99)  # a cell goes up to its step
    assert busiest.splitlines()[0] == "step 4"
    value = float(re.search(r"layer_1: (\S+)", busiest)[1])
    assert value == pytest.approx(logged[4]["expert_load_max/layer_1"], rel=1e-5)
    job, speed = run.trainer.job, logged[6]["tokens_per_second"]
    flops = speed / job.tokens * job.facts.training_flops(job.rows, job.args.sequence_length)
    mfu = re.search(r"MFU: (\S+)", hovered(browser, "MFU", step=6))
    assert float(mfu[1]) == pytest.approx(flops / (8 * 197e12), rel=1e-4)
    for title in ("Held-out accuracy", "Gradient norm", "Tokens a second", "Entropy of the load"):
        assert hovered(browser, title, step=6).startswith("step 6\n")
    browser.hover(1, 1)
    boxes = "[...document.querySelectorAll('figure.chart output')]"
    assert browser.evaluate(f"{boxes}.every(box => getComputedStyle(box).visibility == 'hidden')")


@pytest.mark.slow
def test_the_page_loads_nothing_and_its_script_has_no_error(run: Run, browser: Browser) -> None:
    browser.events.clear()
    browser.open(run.output / "report.html")
    hovered(browser, "Loss", step=2)
    requests = [e["params"]["request"]["url"] for e in browser.events if e["method"] == "Network.requestWillBeSent"]
    assert requests == [(run.output / "report.html").resolve().as_uri()]
    assert [e for e in browser.events if e["method"] in ("Runtime.exceptionThrown", "Log.entryAdded")] == []


@pytest.mark.slow
def test_the_page_goes_on_after_a_restart_and_links_what_lies_beside_it(run: Run, browser: Browser) -> None:
    browser.open(run.output / "report.html")
    text = browser.evaluate("document.body.innerText")
    assert "Step 6 of 6: finished" in text
    assert "2 processes, one after another" in text
    assert "restart: every later start" in text
    assert "steps done again after a restart" in text
    lives = read_lives((run.output / "lives.json").read_bytes())
    assert [(life.first, life.last) for life in lives] == [(0, 4), (2, 6)]
    losses = "JSON.parse(document.querySelector('figure.chart').dataset.chart).lines[0][1].map(p => p[0])"
    assert browser.evaluate(losses) == [1, 2, 3, 4, 5, 6]
    assert "by adamw" in text  # the objective
    assert "tokens to train on" in text
    assert f"--config {run.output}/run.yaml --resume_from_checkpoint latest" in text
    links = browser.evaluate("[...document.links].map(a => a.getAttribute('href'))")
    assert {"compile.html", "plan.json", "expert_load.svg", "trainer_state.json"} <= set(links)
    assert all((run.output / link).exists() for link in links)
    assert "15.7 GiB that a program can use" in text
    assert "256×64" in browser.evaluate("document.querySelector('details').textContent")


@pytest.mark.slow
def test_the_page_is_rewritten_as_the_run_goes_and_reloads_itself_until_it_ends(run: Run) -> None:
    for step in (2, 3, 4, 5):  # the life that went on from step 2 wrote it before its first step too
        assert f"Step {step} of 6" in run.seen[step]
        assert 'http-equiv="refresh"' in run.seen[step]
    assert all(" left, until 20" in run.seen[step] for step in (3, 4, 5))  # once a step of this life is done
    assert 'http-equiv="refresh"' not in (run.output / "report.html").read_text()


@pytest.mark.slow
def test_seconds_are_charged_to_what_they_went_to_and_add_up_to_the_life(run: Run) -> None:
    lives = read_lives((run.output / "lives.json").read_bytes())
    assert lives[0].seconds["compile"] > 0
    for life in lives:
        assert all(life.seconds[name] > 0 for name in ("start", "steps", "data", "evaluation", "save"))
        assert sum(life.seconds.values()) == pytest.approx(life.ended - life.began, abs=0.05)


@pytest.mark.slow
def test_a_page_that_can_not_be_written_is_said_once_and_the_run_goes_on(run: Run) -> None:
    assert run.said.count("report.html can't be written, and the run goes on") == 1
    assert (run.output / "checkpoint-4").is_dir()


XPROF = """
import collections, json, sys
from xprof.convert import raw_to_tool_data
data, _ = raw_to_tool_data.xspace_to_tool_data(sys.argv[1:], "trace_viewer", {})
names = collections.Counter(event.get("name") for event in json.loads(data)["traceEvents"])
print(names["PjRtComputationClient::ExecuteReplicated"], names["PjRtCpuExecutable::ExecuteHelper"])
"""


@pytest.mark.slow
def test_the_trace_of_two_steps_opens_in_xprof_and_has_these_on_all_devices_and_nothing_else(run: Run) -> None:
    (trace,) = (run.output / "profile").glob("plugins/profile/*/*.xplane.pb")
    if find_spec("xprof") is None:
        pytest.skip("no xprof: pip install --no-deps xprof")
    done = subprocess.run([sys.executable, "-c", XPROF, trace], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["2", "16"], done.stderr


def test_steps_to_trace_that_are_none_of_the_run_are_refused() -> None:
    for wrong in ("3", "0:2", "4:3", "9:11", "a:b", "1:2:3"):
        with pytest.raises(UserError, match=f"--profile_steps {wrong}"):
            job_of(ANY_MOE, deepseek(), max_steps=10, profile_steps=wrong)


def test_a_compile_report_that_lies_in_the_output_folder_does_not_make_it_taken(tmp_path: Path) -> None:
    (tmp_path / "compile.html").touch()
    args = job_of(ANY_MOE, deepseek(), output_dir=str(tmp_path)).args
    assert find_output(args, "any") == Folder(tmp_path)
