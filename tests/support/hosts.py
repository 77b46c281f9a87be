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

from shardwright.checkpoint import manifest
from shardwright.xla.virtual_devices import AT_ONCE
from tests.support.fork_server import Forked
from tests.support.host import free_ports
from tests.support.paths import ROOT

DEVICES = 8  # of all hosts together, unless a job has others
SECONDS = 300  # to wait for anything


class HostLives:
    """Starts jobs of `scripts/train.py`, or of a script, on several hosts, one job at a time; used in a ``with``.

    Args:
        home: a folder for caches, and for what a job compiles, which the next then need not; None: each compiles all.
        environment: more variables of each host.
    """

    def __init__(self, home: Path | None = None, **environment: str) -> None:
        self.living: list[Forked] = []
        self.environment = {"NPROC": str(AT_ONCE * DEVICES), "SHARDWRIGHT_COMPILED": "", **environment}
        if home is not None:
            kept = {"SHARDWRIGHT_CACHE": str(home / "cache"), "SHARDWRIGHT_COMPILED": str(home / "compiled")}
            self.environment = {**self.environment, **kept, **environment}

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
    ) -> list[int]:
        """Starts a job; host 2 writes to the file ``2.log`` of ``logs``. Returns the hosts' process ids.

        Args:
            arguments: of `scripts/train.py`; or a script, whose name ends in .py, and its arguments.
            others: arguments of the last host, where they are not the same.
            devices: of all hosts together.
        """
        logs.mkdir(parents=True, exist_ok=True)
        words = [arguments] * (hosts - 1) + [arguments if others is None else others]
        port, variables = free_ports(), {**os.environ, **self.environment}
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


class Job:
    """A job of two hosts in a folder of its own, that runs beside others; used in a ``with``.

    Args:
        folder: for its output (``out``) and its logs.
        lives: that start it.
        words: of `scripts/train.py`, but for the output folder.
    """

    def __init__(self, folder: Path, lives: HostLives, *words: object) -> None:
        self.output, self.logs, self.lives, self.codes = folder / "out", folder / "logs", lives, list[int]()
        self.words = [*words, "--output_dir", self.output]

    def __enter__(self) -> Job:
        self.processes = self.lives.start(self.logs, *self.words, hosts=2)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.lives.__exit__(kind, error, trace)
        else:
            self.codes = self.lives.wait()

    def saved(self, step: int) -> bool:
        """Whether the step's checkpoint is whole."""
        return (self.output / f"checkpoint-{step}" / manifest.MANIFEST).exists()

    def log(self, host: int) -> str:
        return log_of(self.logs, host)


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
