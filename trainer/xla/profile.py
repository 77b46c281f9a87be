"""A trace of some of a run's steps, on host and devices, for xprof."""

import tempfile
from pathlib import Path
from typing import Any

import torch_xla.debug.profiler as xp
from transformers import TrainerCallback

from shardwright.files.folder import Folder
from shardwright.xla.runtime import wait_for_devices

FOLDER = "profile"  # in the output folder


class ProfileCallback(TrainerCallback):
    """Traces the steps from ``first`` to ``last`` inclusive, or the run's part of them, and writes it into ``output``.

    It waits for the devices before and after, so that the trace has these steps and no others.
    """

    def __init__(self, first: int, last: int, output: Folder) -> None:
        self.first, self.last, self.output = first, last, output
        self._trace: tempfile.TemporaryDirectory[str] | None = None
        self._done = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._trace is None and not self._done and self.first <= state.global_step + 1 <= self.last:
            self._trace = tempfile.TemporaryDirectory()
            wait_for_devices()
            xp.start_trace(self._trace.name)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= self.last:
            self._write()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._write()

    def _write(self) -> None:
        if self._trace is None:
            return
        wait_for_devices()
        xp.stop_trace()
        trace, self._trace, self._done = self._trace, None, True
        with trace as local:
            # plugins/profile/TIME/HOST.xplane.pb and others, where TensorBoard and xprof look
            for path in sorted(Path(local).rglob("*")):
                if path.is_file():
                    folder = self.output / FOLDER / path.parent.relative_to(local).as_posix()
                    folder.write(path.name, path.read_bytes())
