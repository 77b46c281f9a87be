"""Jobs on several hosts for one import: a process that has everything imported forks the hosts of a job on request."""

from __future__ import annotations

import functools
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shardwright.hosts.restarts import NOTES, asked_limit
from tests.support.host import ENVIRONMENT, become, end, free_ports
from tests.support.paths import ROOT
from tests.support.quick_compile import QUICK_COMPILE

DEVICES = 8  # of all hosts together, unless a job has others
SECONDS = 300  # to wait for anything


class HostLives:
    """Starts jobs of `scripts/train.py`, or of a script, on several hosts, one job at a time; used in a ``with``.

    Args:
        environment: more variables of each host; {host} in a value is its number.
    """

    def __init__(self, **environment: str) -> None:
        self.living: list[int] = []  # process ids
        self.server: subprocess.Popen[str] | None = None
        self.environment = {
            **{name: value for name, value in os.environ.items() if name not in ("NPROC", "CPU_NUM_DEVICES")},
            **ENVIRONMENT,
            "NPROC": "16",
            "SHARDWRIGHT_COMPILED": "",  # each job compiles what it runs, unless told otherwise
            **environment,
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {QUICK_COMPILE}".strip(),
        }

    def __enter__(self) -> HostLives:
        self.server = subprocess.Popen(
            [sys.executable, "-m", "tests.support.hosts"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self.environment,
            cwd=ROOT,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.living:  # a test failed while they ran
            os.kill(process, signal.SIGKILL)
        server = self.server
        assert server is not None
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.close()
        server.wait(timeout=120)
        server.stdout.close()

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
        assert self.server is not None
        assert self.server.stdin is not None
        logs.mkdir(exist_ok=True)
        words = [list(map(str, arguments))] * hosts
        if others is not None:
            words[-1] = list(map(str, others))
        print(json.dumps([str(logs), free_ports(), devices, words]), file=self.server.stdin, flush=True)
        self.living = self._read()
        return self.living

    def wait(self) -> list[int]:
        """Waits for the hosts' ends; returns the exit codes, or minus the signals that ended them."""
        codes, self.living = self._read(), []
        return codes

    def run(self, logs: Path, *arguments: object, hosts: int, **more: Any) -> list[int]:
        """Starts a job and waits for its end; takes what :meth:`start` does, and returns what :meth:`wait` does."""
        self.start(logs, *arguments, hosts=hosts, **more)
        return self.wait()

    def _read(self) -> list[int]:
        assert self.server is not None
        assert self.server.stdout is not None
        return json.loads(self.server.stdout.readline())


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


class Forked:
    """A child of this process that was forked, and has everything imported; what is used of subprocess.Popen."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.pid = os.fork()
        if self.pid == 0:
            os.setpgid(0, 0)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            act()

    def wait(self, timeout: float) -> int:
        until = time.monotonic() + timeout
        while True:
            process, status = os.waitpid(self.pid, os.WNOHANG)
            if process:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("the run", timeout)
            time.sleep(0.02)

    def send_signal(self, number: int, /) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def supervise(begin: Callable[[], None], limit: int, words: Sequence[str]) -> int:
    """As `shardwright.hosts.supervisor.supervise`; each run is forked, and begins by ``begin``."""
    from shardwright.hosts.output_streams import exit_code
    from shardwright.hosts.supervisor import Supervisor
    from shardwright.scripts import train

    def start(more: Sequence[str], notes: str) -> Forked:
        def act() -> None:
            os.environ[NOTES] = notes
            begin()
            sys.argv = ["train.py", *words, *more]
            end(exit_code(train.main))

        return Forked(act)

    return Supervisor(limit, start).run()


def child_of(process: int) -> int:
    """The one child of a process."""
    return int(Path(f"/proc/{process}/task/{process}/children").read_text())


def serve() -> None:
    """Forks the hosts of a job for each line of standard input: a folder for logs, a port, each host's arguments."""
    import logging

    logging.disable(logging.WARNING)
    import jax  # noqa: F401

    import shardwright.run  # noqa: F401
    from shardwright.hosts import supervisor
    from shardwright.hosts.output_streams import exit_code
    from shardwright.scripts import train

    logging.disable(logging.NOTSET)
    for line in sys.stdin:
        logs, port, devices, words = json.loads(line)
        children = []
        for host, arguments in enumerate(words):
            children.append(os.fork())
            if children[-1] == 0:
                with open(f"{logs}/{host}.log", "ab", buffering=0) as file:
                    os.dup2(file.fileno(), 1)
                    os.dup2(file.fileno(), 2)
                os.close(0)
                begin = functools.partial(become, host, len(words), port, devices // len(words))
                if asked_limit(arguments):
                    supervisor.supervise = functools.partial(supervise, begin)
                else:
                    begin()
                if arguments[0].endswith(".py"):
                    sys.argv = arguments
                    runpy.run_path(arguments[0], run_name="__main__")
                    end(0)
                sys.argv = ["train.py", *arguments]
                end(exit_code(train.main))
        print(json.dumps(children), flush=True)
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]), flush=True)


if __name__ == "__main__":
    serve()
