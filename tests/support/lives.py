"""Training runs of a tiny model, from before the first device is opened to the exit code, or one after another."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path
from types import TracebackType

from tests.support.fork_server import Forked
from tests.support.paths import ROOT

TINY = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 304,  # above the 256 bytes, and 8 devices divide it
}


class Lives:
    """Starts runs of `scripts/train.py`, one at a time; used in a ``with``.

    Args:
        devices: virtual CPU devices of each run.
    """

    def __init__(self, devices: int = 8) -> None:
        self.living: Forked | None = None
        self.devices = devices
        self._in_turn: Forked | None = None

    def __enter__(self) -> Lives:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.living is not None:  # a test failed while it ran, or when it had ended
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.living.pid, signal.SIGKILL)
            self.wait()
        if self._in_turn is not None:
            self._in_turn.kill()
            self._in_turn.__exit__(None, None, None)
            self._in_turn = None

    @property
    def _environment(self) -> dict[str, str]:
        environment = {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(self.devices)}
        environment.pop("NPROC", None)  # the number of threads goes with the number of devices
        return environment

    def start(self, log: Path, *arguments: object) -> int:
        """Starts a run whose output goes to ``log``; returns its process id."""
        with open(log, "ab") as file:
            self.living = Forked(
                ROOT / "scripts" / "train.py",
                *arguments,
                env=self._environment,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )
        return self.living.pid

    def wait(self) -> int:
        """Waits for the run's end; returns its exit code, or minus the signal that ended it."""
        assert self.living is not None
        code, self.living = self.living.wait(), None
        return code

    def run(self, log: Path, *arguments: object) -> int:
        """Runs to the end in a process that has perhaps run others; returns the exit code.

        A run of few steps in a process of its own mostly traces and compiles what another has.
        """
        if self._in_turn is None:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self._in_turn = Forked("-m", "tests.support.runs_in_turn", env=self._environment, cwd=ROOT, **pipes)
        process = self._in_turn
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps([str(log), [str(word) for word in arguments]]).encode() + b"\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        assert answer, f"the process has ended: {process.wait()}"
        return int(answer)

    def kill(self, process: int, number: int = signal.SIGKILL) -> int:
        """Sends a signal and waits for the run's end; returns what :meth:`wait` does."""
        os.kill(process, number)
        return self.wait()


def write_sums(folder: Path, count: int) -> None:
    """Writes ``count`` files of arithmetic, which a small model learns a little of in seconds."""
    folder.mkdir(exist_ok=True)
    for i in range(count):
        lines = [f"{a} plus {i} makes {a + i}, and {a} times {i} makes {a * i}." for a in range(60)]
        (folder / f"{i:0{len(str(count - 1))}}.txt").write_text("\n".join(lines))


def write_text(folder: Path) -> None:
    """Writes a dataset of ten short files, and beside it the config of a tiny model, in which dropout is at work.

    Most of a run is to trace and compile its layers, so it has one.
    """
    write_sums(folder / "text", 10)
    (folder / "config.json").write_text(json.dumps({**TINY, "num_hidden_layers": 1, "attention_dropout": 0.1}))


def tiny_run(folder: Path) -> list[object]:
    """Arguments of a run on what :func:`write_text` wrote; a step takes a few milliseconds.

    Of the held-out rows 8 devices take 8 at a time, so the last time not as many as there are devices.
    """
    return [
        *("--recipe", "llama_fsdp", "--model", folder / "config.json", "--dataset", folder / "text"),
        *("--compute", "scan=False,remat=none", "--sequence_length", 32, "--warmup_steps", 5),
        *("--max_eval_rows", 10),
    ]
