"""A run killed again and again ends as one that never was: nothing lost beyond the last whole checkpoint."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from shardwright.checkpoint import manifest
from shardwright.checkpoint.lineage import NAME, folder_of, live_steps, whole_steps
from shardwright.files.folder import Folder
from tests.support.lives import Lives, tiny_run, write_text
from tests.support.logs import losses

KILLS = {"at start": 4, "training": 3, "in a save": 5}
STARTED = ["", "devices:", "model:", "output:"]  # what a run that starts has printed; the last just before it trains
STEPS = 90
SECONDS = 120  # to wait for anything


def half_written(output: Path, above: int = -1) -> list[str]:
    """Checkpoints without a manifest, of steps ``above`` the newest whole one: below it lies what is being removed."""
    names = map(NAME.fullmatch, os.listdir(output) if output.exists() else ())
    found = [name[0] for name in names if name is not None and int(name[1]) > above]
    return [name for name in found if not (output / name / manifest.MANIFEST).exists()]


def wait_until(holds) -> None:
    end = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < end, "the run did not come so far"
        time.sleep(0.0002)


def stop_when(process: int, holds) -> None:
    """Stops the process at a moment when ``holds``, where a kill then ends it.

    It is stopped first and looked at then, again and again: beside busy neighbours what was seen is over by the time
    that a signal arrives.
    """

    def stopped() -> bool:  # all of its threads, of which one writes
        try:
            threads = [path.read_text() for path in Path(f"/proc/{process}/task").glob("*/stat")]
        except (FileNotFoundError, ProcessLookupError):  # a thread has just ended
            return False
        return all(text.rpartition(")")[2].split()[0] == "T" for text in threads)

    while True:
        os.kill(process, signal.SIGSTOP)
        wait_until(stopped)
        if holds():
            return
        os.kill(process, signal.SIGCONT)
        time.sleep(0.003)


@pytest.mark.slow
def test_a_run_killed_12_times_has_the_losses_and_weights_of_one_never_stopped(on_disk, capsys):
    write_text(on_disk)
    arguments = [
        *(*tiny_run(on_disk), "--max_steps", STEPS, "--logging_steps", 4, "--save_steps", 2),
        *("--save_total_limit", 2, "--resume_from_checkpoint", "latest"),
    ]
    broken, moments, tally = on_disk / "broken", random.Random(4), Counter()
    kinds, started = list(Counter(KILLS).elements()), iter(STARTED)
    moments.shuffle(kinds)
    with Lives(devices=2) as lives:
        assert lives.run(on_disk / "whole.log", *arguments, "--output_dir", on_disk / "whole") == 0
        newest = resumed = 0
        for life, kind in enumerate(kinds):
            log = on_disk / f"{life}.log"
            log.touch()
            process = lives.start(log, *arguments, "--output_dir", broken)
            if kind == "at start":
                said = next(started)
                wait_until(lambda log=log, said=said: said in log.read_text())
            else:
                saves = moments.randrange(1, 4)
                wait_until(lambda log=log, saves=saves: log.read_text().count("written") >= saves)
                time.sleep(moments.uniform(0, 0.03))
                in_save = kind == "in a save"
                stop_when(process, lambda at=newest, in_save=in_save: bool(half_written(broken, at)) == in_save)
            assert lives.kill(process) == -signal.SIGKILL, log.read_text()
            # the run went on from the newest that was whole, and no kill took that one away
            assert f"checkpoint-{newest}\n" in log.read_text() or newest == 0 or kind == "at start"
            steps = whole_steps(Folder(broken))
            assert live_steps(Folder(broken)) == steps  # a run that goes on from its newest sets none aside
            assert max(steps, default=0) >= newest
            resumed += newest > 0 and kind != "at start"
            newest = max(steps, default=0)
            for step in steps:
                manifest.check(folder_of(Folder(broken), step))
            # what the life left says where it was: before its first save, in one, or after it
            before = "written" not in log.read_text()
            tally["at start" if before else "in a save" if half_written(broken, newest) else "training"] += 1
        assert lives.run(on_disk / "last.log", *arguments, "--output_dir", broken) == 0
    counts = {kind: tally[kind] for kind in KILLS}
    with capsys.disabled():
        print(f"\n{tally.total()} kills: {counts}; {resumed} resumed; from step {newest} on in one piece")
    assert counts == KILLS
    assert resumed == KILLS["training"] + KILLS["in a save"] - 1  # all that trained but the first
    assert newest < STEPS
    assert half_written(broken) == []
    assert losses(broken) == losses(on_disk / "whole")
    weights = "model/model.safetensors"
    assert (broken / weights).read_bytes() == (on_disk / "whole" / weights).read_bytes()
