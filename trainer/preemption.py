"""Being told to stop: Ctrl-C, SIGTERM, and on a TPU pod the signal that all its hosts agree on."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

import torch_xla
import torch_xla.runtime as xr


class StopRequests:
    """Whether the run was told to stop; the loop asks after each step.

    Attributes:
        interrupted: Ctrl-C came.
        preempted: SIGTERM came, or the pod's preemption signal.
    """

    def __init__(self) -> None:
        self.interrupted = self.preempted = False
        self._pod = False

    @property
    def any(self) -> bool:
        return self.interrupted or self.preempted

    def after_step(self, step: int) -> None:
        """Ask the pod's runtime whether its hosts are to stop after ``step``: all get the same answer."""
        if self._pod and torch_xla._XLAC._sync_point_reached(step):
            self.preempted = True

    @contextlib.contextmanager
    def listen(self) -> Iterator[None]:
        """Note the first signal of each kind, which the loop answers after the step under way; a second ends at once.

        On a TPU torch_xla's preemption manager takes SIGTERM: a pod's hosts get it at different times, and must stop at
        the same step. That path has never run: there was no TPU to run it on.
        """
        if xr.device_type() == "TPU":
            # as torch_xla's own CheckpointManager does (semi-private, 2.9)
            torch_xla._XLAC._ensure_xla_coordinator_initialized(
                xr.process_index(), xr.process_count(), xr.get_master_ip()
            )
            torch_xla._XLAC._activate_preemption_sync_manager()
            self._pod = True
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = [signal.SIGINT] if self._pod else [signal.SIGINT, signal.SIGTERM]
        previous = {number: signal.getsignal(number) for number in numbers}

        def note(number: int, frame: Any) -> None:
            if number == signal.SIGINT:
                self.interrupted = True
            else:
                self.preempted = True
            signal.signal(number, previous[signal.Signals(number)])

        for number in numbers:
            signal.signal(number, note)
        try:
            yield
        finally:
            for number in numbers:
                signal.signal(number, previous[number])
