"""Kills one of four hosts again and again: ``python -m tests.support.host_kills --kills 20`` prints the tally.

Each life of the job is ended by the death of one host at a random moment: before it trains, in a step, in a save. The
others must end by themselves, with a code that means "start it again". The last life is left alone, and its log and
weights are compared with those of a job that was never stopped.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path

from shardwright.checkpoint import manifest
from shardwright.checkpoint.lineage import NAME, whole_steps
from shardwright.errors import LOST
from shardwright.files.folder import Folder
from tests.support.hosts import HostLives, assert_same_losses, log_of, losses, same_weights, wait_until
from tests.support.lives import tiny_run, write_text

HOSTS = 4
MOMENTS = ("at start", "training", "in a save")
RESTARTS = {LOST: "76", -signal.SIGABRT: "134", -signal.SIGKILL: "killed"}


def half_written(output: Path) -> bool:
    names = os.listdir(output) if output.exists() else []
    return any(NAME.fullmatch(name) and not (output / name / manifest.MANIFEST).exists() for name in names)


def wait_for(moment: str, output: Path, logs: Path, draw: random.Random) -> None:
    """Waits for the moment of a life's end, or for the end of the job."""
    if moment == "at start":
        time.sleep(draw.uniform(0.5, 6))
        return
    newest = max(whole_steps(Folder(output)), default=0)
    ended = lambda: "written to" in log_of(logs, 0)  # noqa: E731
    wait_until(lambda: ended() or max(whole_steps(Folder(output)), default=0) > newest)
    if moment == "training":
        time.sleep(draw.uniform(0, 0.5))
    else:
        wait_until(lambda: ended() or half_written(output))


def main(kills: int, seed: int, steps: int) -> None:
    home, draw = Path(tempfile.mkdtemp(prefix="host-kills-")), random.Random(seed)
    write_text(home)
    job = [
        *(*tiny_run(home), "--max_steps", steps, "--logging_steps", 5, "--save_steps", 5, "--save_total_limit", 2),
        *("--resume_from_checkpoint", "latest"),
    ]
    tally: Counter[tuple[str, int, str]] = Counter()
    with HostLives(home) as lives:
        whole, broken = home / "whole", home / "broken"
        assert lives.run(home / "whole-logs", *job, "--output_dir", whole, hosts=HOSTS) == [0] * HOSTS
        for life in range(kills):
            moment, host, logs = MOMENTS[life % len(MOMENTS)], draw.randrange(HOSTS), home / f"life-{life}"
            processes = lives.start(logs, *job, "--output_dir", broken, hosts=HOSTS)
            wait_until(lambda logs=logs: (logs / "0.log").exists())
            wait_for(moment, broken, logs, draw)
            os.kill(processes[host], signal.SIGKILL)
            codes = lives.wait()
            others = [code for other, code in enumerate(codes) if other != host]
            assert all(code in RESTARTS for code in others), (moment, host, codes, log_of(logs, (host + 1) % HOSTS))
            tally[moment, host, " ".join(RESTARTS[code] for code in others)] += 1
            for step in whole_steps(Folder(broken)):
                manifest.check(Folder(broken) / f"checkpoint-{step}")
            newest = max(whole_steps(Folder(broken)), default=0)
            print(
                f"{life + 1:3}  {moment:9}  host {host} killed  the others ended with {codes}  saved to step {newest}"
            )
        assert lives.run(home / "last", *job, "--output_dir", broken, hosts=HOSTS) == [0] * HOSTS
    assert_same_losses(broken, whole)
    assert same_weights(broken, whole)
    equal = "to the bit" if losses(broken) == losses(whole) else "to rounding"
    print(f"{kills} kills of one of {HOSTS} hosts, {steps} steps: the log is that of a run never stopped, {equal}")
    for (moment, host, ends), count in sorted(tally.items()):
        print(f"  {count} × {moment}, host {host}: the others ended with {ends}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=120)
    main(**vars(parser.parse_args()))
