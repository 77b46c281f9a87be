"""A run killed again and again ends as one that never was: nothing lost beyond the last whole checkpoint."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.support.lives import Lives, tiny_run, write_text
from trainer.checkpoint import manifest
from trainer.checkpoint.read import NAME, folder_of, whole_steps
from trainer.storage import Folder

KILLS = 24
STEPS = 400
SECONDS = 120  # to wait for anything


def losses(output: Path) -> list[tuple]:
    history = json.loads((output / "trainer_state.json").read_text())["log_history"]
    return [(e["step"], e["loss"], e["grad_norm"], e["learning_rate"], e["epoch"]) for e in history if "loss" in e]


def half_written(output: Path) -> list[str]:
    found = (name for name in os.listdir(output) if NAME.fullmatch(name)) if output.exists() else ()
    return [name for name in found if not (output / name / manifest.MANIFEST).exists()]


def wait_until(holds) -> None:
    end = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < end, "the run did not come so far"
        time.sleep(0.0002)


@pytest.mark.slow
def test_a_run_killed_24_times_has_the_losses_and_weights_of_one_never_stopped(tmp_path, capsys):
    write_text(tmp_path)
    arguments = [
        *(*tiny_run(tmp_path), "--max_steps", STEPS, "--logging_steps", 5, "--save_steps", 3),
        *("--save_total_limit", 2, "--resume_from_checkpoint", "latest"),
    ]
    broken, moments, tally = tmp_path / "broken", random.Random(4), {"at start": 0, "training": 0, "in a save": 0}
    kinds = ["at start"] * 4 + ["training"] * 8 + ["in a save"] * (KILLS - 12)
    moments.shuffle(kinds)
    with Lives(devices=2) as lives:
        assert lives.run(tmp_path / "whole.log", *arguments, "--output_dir", tmp_path / "whole") == 0
        newest = resumed = 0
        for life, kind in enumerate(kinds):
            log = tmp_path / f"{life}.log"
            log.touch()
            process = lives.start(log, *arguments, "--output_dir", broken)
            if kind == "at start":
                time.sleep(moments.uniform(0, 2))
            elif kind == "training":
                wait_until(lambda log=log: "written" in log.read_text())
                time.sleep(moments.uniform(0, 0.3))
            else:
                saves = moments.randrange(1, 4)
                wait_until(lambda log=log, saves=saves: log.read_text().count("written") >= saves)
                wait_until(lambda: half_written(broken))
                time.sleep(moments.uniform(0, 0.03))
            assert lives.kill(process) == -signal.SIGKILL, log.read_text()
            # what was resumed from is the newest that was whole, and no kill made that one less
            assert f"checkpoint-{newest}\n" in log.read_text() or newest == 0 or kind == "at start"
            steps = whole_steps(Folder(broken))
            assert max(steps, default=0) >= newest
            resumed += newest > 0 and kind != "at start"
            newest = max(steps, default=0)
            for step in steps:
                manifest.check(folder_of(Folder(broken), step))
            tally["in a save" if half_written(broken) else "at start" if kind == "at start" else "training"] += 1
        assert lives.run(tmp_path / "last.log", *arguments, "--output_dir", broken) == 0
    with capsys.disabled():
        print(f"\n{sum(tally.values())} kills: {tally}; {resumed} resumed; from step {newest} on in one piece")
    assert resumed >= 15
    assert sum(tally.values()) >= 20
    assert tally["in a save"] >= 5
    assert half_written(broken) == []
    assert losses(broken) == losses(tmp_path / "whole")
    weights = "model/model.safetensors"
    assert (broken / weights).read_bytes() == (tmp_path / "whole" / weights).read_bytes()
