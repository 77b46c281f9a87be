"""Supervised runs for one import: the supervisor, which opens no device, forks each of its runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from shardwright.hosts import supervisor
from shardwright.hosts.output_streams import exit_code
from shardwright.hosts.restarts import NOTES


def _end(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def fork_runs(begin: Callable[[], None], end: Callable[[int], NoReturn] = _end) -> None:
    """Has the supervisor of this process fork `scripts/train.py`, after ``begin``; ``end`` ends a run with its code."""

    def supervise(limit: int, words: Sequence[str]) -> int:
        def start(more: Sequence[str], notes: str) -> _Run:
            def act() -> None:
                from shardwright.scripts import train

                os.environ[NOTES] = notes
                begin()
                sys.argv = ["train.py", *words, *more]
                end(exit_code(train.main))

            return _Run(act)

        return supervisor.Supervisor(limit, start).run()

    supervisor.supervise = supervise


class _Run:
    """A forked child of this process; what is used of subprocess.Popen."""

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
