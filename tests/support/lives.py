"""Many training runs for one import: a process that has everything imported forks a run when it is asked to.

Each run is `scripts/train.py` with its own arguments, from before the first device is opened to its exit code.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import IO

from tests.support.paths import ROOT
from tests.support.quick_compile import QUICK_COMPILE

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
        self.living: int | None = None  # the process id of the run
        self.server: subprocess.Popen[str] | None = None
        self.environment = {
            **os.environ,
            "PJRT_DEVICE": "CPU",
            "CPU_NUM_DEVICES": str(devices),
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {QUICK_COMPILE}".strip(),
        }
        self.environment.pop("NPROC", None)  # the number of threads goes with the number of devices

    def __enter__(self) -> Lives:
        self.server = subprocess.Popen(
            [sys.executable, "-m", "tests.support.lives"],
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
        if self.living is not None:  # a test failed while it ran
            os.kill(self.living, signal.SIGKILL)
        self._pipe("stdin").close()
        assert self.server is not None
        self.server.wait(timeout=60)
        self._pipe("stdout").close()

    def start(self, log: Path, *arguments: object) -> int:
        """Starts a run whose output goes to ``log``; returns its process id."""
        print(json.dumps([str(log), *map(str, arguments)]), file=self._pipe("stdin"), flush=True)
        self.living = int(self._pipe("stdout").readline())
        return self.living

    def wait(self) -> int:
        """Waits for the run's end; returns its exit code, or minus the signal that ended it."""
        code = int(self._pipe("stdout").readline())
        self.living = None
        return code

    def run(self, log: Path, *arguments: object) -> int:
        """Starts a run and waits for its end; returns what :meth:`wait` does."""
        self.start(log, *arguments)
        return self.wait()

    def kill(self, process: int, number: int = signal.SIGKILL) -> int:
        """Sends a signal and waits for the run's end; returns what :meth:`wait` does."""
        os.kill(process, number)
        return self.wait()

    def _pipe(self, name: str) -> IO[str]:
        pipe = getattr(self.server, name)
        assert pipe is not None
        return pipe


def write_text(folder: Path) -> None:
    """Writes a dataset of ten short files, and beside it the config of a tiny model, in which dropout is at work."""
    (folder / "text").mkdir()
    for i in range(10):
        lines = [f"{a} plus {i} makes {a + i}, and {a} times {i} makes {a * i}." for a in range(60)]
        (folder / "text" / f"{i}.txt").write_text("\n".join(lines))
    (folder / "config.json").write_text(json.dumps({**TINY, "attention_dropout": 0.1}))


def tiny_run(folder: Path) -> list[object]:
    """Arguments of a run on what :func:`write_text` wrote; a step takes a few milliseconds."""
    return [
        *("--recipe", "llama_fsdp", "--model", folder / "config.json", "--dataset", folder / "text"),
        *("--compute", "scan=False,remat=none", "--sequence_length", 32, "--warmup_steps", 5),
    ]


def serve() -> None:
    """Forks a run for each line of standard input, a JSON list of its log's path and its arguments."""
    import logging

    logging.disable(logging.WARNING)
    import shardwright.run  # noqa: F401
    from shardwright.hosts.output_streams import exit_code
    from shardwright.scripts import train

    logging.disable(logging.NOTSET)
    for line in sys.stdin:
        log, *arguments = json.loads(line)
        child = os.fork()
        if child == 0:
            with open(log, "ab", buffering=0) as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            os.close(0)
            sys.argv = ["train.py", *arguments]
            code = exit_code(train.main)
            sys.stdout.flush()
            os._exit(code)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    serve()
