"""Jobs on several hosts, each a program that the fork server forks."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.fork_server import Forked
from tests.support.host import free_ports
from tests.support.paths import ROOT

DEVICES = 8  # of all hosts together, unless a job has others
SECONDS = 300  # to wait for anything


class HostLives:
    """Starts jobs of `scripts/train.py`, or of a script, on several hosts, one job at a time; used in a ``with``.

    Args:
        environment: more variables of each host.
    """

    def __init__(self, **environment: str) -> None:
        self.living: list[Forked] = []
        # each job compiles what it runs, unless told otherwise
        self.environment = {"NPROC": "16", "SHARDWRIGHT_COMPILED": "", **environment}

    def __enter__(self) -> HostLives:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for host in self.living:  # a test failed while they ran
            host.kill()
        self.wait()

    def start(
        self,
        logs: Path,
        *arguments: object,
        hosts: int,
        others: Sequence[object] | None = None,
        devices: int = DEVICES,
        **environment: str,
    ) -> list[int]:
        """Starts a job; host 2 writes to the file ``2.log`` of ``logs``. Returns the hosts' process ids.

        Args:
            arguments: of `scripts/train.py`; or a script, whose name ends in .py, and its arguments.
            others: arguments of the last host, where they are not the same.
            devices: of all hosts together.
            environment: more variables of this job's hosts.
        """
        logs.mkdir(exist_ok=True)
        words = [arguments] * (hosts - 1) + [arguments if others is None else others]
        port, variables = free_ports(), {**os.environ, **self.environment, **environment}
        self.living = []
        for host, own in enumerate(words):
            script = () if str(own[0]).endswith(".py") else (ROOT / "scripts" / "train.py",)
            place = ("-m", "tests.support.host", host, hosts, port, devices // hosts)
            with open(logs / f"{host}.log", "ab") as log:
                files = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
                self.living.append(Forked(*place, *script, *own, env=variables, cwd=ROOT, **files))
        return [host.pid for host in self.living]

    def wait(self) -> list[int]:
        """Waits for the hosts' ends; returns the exit codes, or minus the signals that ended them."""
        codes, self.living = [host.wait() for host in self.living], []
        return codes

    def run(self, logs: Path, *arguments: object, hosts: int, **more: Any) -> list[int]:
        """Starts a job and waits for its end; takes what :meth:`start` does, and returns what :meth:`wait` does."""
        self.start(logs, *arguments, hosts=hosts, **more)
        return self.wait()


def losses(output: Path) -> list[dict[str, float]]:
    history = json.loads((output / "trainer_state.json").read_text())["log_history"]
    names = ("step", "loss", "grad_norm", "learning_rate", "epoch", "eval_loss", "eval_accuracy")
    return [{n: e[n] for n in names if n in e} for e in history if "loss" in e or "eval_loss" in e]


def assert_same_losses(output: Path, other: Path, rel: float = 2e-6) -> None:
    """To the rounding of a sum over the hosts, whose order is gloo's."""
    ours, theirs = losses(output), losses(other)
    assert [entry.keys() for entry in ours] == [entry.keys() for entry in theirs]
    for one, two in zip(ours, theirs, strict=True):
        assert one == pytest.approx(two, rel=rel)


def log_of(logs: Path, host: int) -> str:
    return (logs / f"{host}.log").read_text()


def wait_until(holds: Callable[[], bool], seconds: float = SECONDS) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come so far"
        time.sleep(0.005)


def same_weights(output: Path, other: Path) -> bool:
    ours, theirs = (load_file(next((folder / "model").glob("*.safetensors"))) for folder in (output, other))
    return ours.keys() == theirs.keys() and all(close(ours[name], theirs[name]) for name in ours)


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-5, atol=1e-6)


def child_of(process: int) -> int:
    """The one child of a process."""
    return int(Path(f"/proc/{process}/task/{process}/children").read_text())
