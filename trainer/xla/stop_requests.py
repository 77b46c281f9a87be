"""Requests to stop: Ctrl-C, SIGTERM, and on several hosts a stop that all agree on."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

from shardwright.errors import Terminated
from shardwright.hosts.hosts import hosts
from shardwright.hosts.restarts import has_supervisor
from shardwright.xla.runtime import stops_after, watch_for_preemption

_TWICE = 1.0  # seconds within which a second signal is the first one again


class StopRequests:
    """Whether the run was told to stop; the loop looks after each step, and in an evaluation before each batch.

    On several hosts all stop after the same step, whichever of them got the signal, and never within an evaluation.
    """

    def __init__(self) -> None:
        self.interrupted = False  # Ctrl-C came
        self.preempted = False  # SIGTERM came, or the pod's preemption signal
        self._pod = False  # a pod's runtime takes SIGTERM
        self._here = False  # Ctrl-C came on this host of several

    @property
    def any(self) -> bool:
        return self.interrupted or self.preempted

    def after_step(self, step: int) -> None:
        if self._pod and stops_after(step):
            self.interrupted = any(hosts().gather(self._here))
            self.preempted = not self.interrupted

    @contextlib.contextmanager
    def listen(self) -> Iterator[None]:
        """Notes the first signal of each kind inside the ``with``; a second one ends the process at once.

        On a pod torch_xla's preemption manager takes SIGTERM, since its hosts get it at different times and must stop
        at the same step; Ctrl-C is passed on to it. A signal to every process of a job (systemd, Slurm) reaches a run
        with a supervisor twice, and counts once.
        """
        self.interrupted = self.preempted = self._here = False
        self._pod = watch_for_preemption()
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = [signal.SIGINT] if self._pod else [signal.SIGINT, signal.SIGTERM]
        previous = {number: signal.getsignal(number) for number in numbers}
        until = 0.0

        def note(number: int, frame: Any) -> None:
            nonlocal until
            if self._pod:
                self._here = True
                os.kill(os.getpid(), signal.SIGTERM)
            elif number == signal.SIGINT:
                self.interrupted = True
            else:
                self.preempted = True
            until = time.monotonic() + _TWICE
            signal.signal(number, second if has_supervisor() else previous[signal.Signals(number)])

        def second(number: int, frame: Any) -> None:
            if time.monotonic() > until:
                signal.signal(number, previous[signal.Signals(number)])
                os.kill(os.getpid(), number)

        for number in numbers:
            signal.signal(number, note)
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


@contextlib.contextmanager
def unwinding() -> Iterator[None]:
    """Has SIGTERM raise Terminated inside the ``with``, where there is nothing to save yet: the rest is tidied up.

    A second one ends the process at once. Whoever listens already, and any thread but the main one, is left alone.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    told = False

    def unwind(number: int, frame: Any) -> None:
        nonlocal told
        told = True
        signal.signal(number, signal.SIG_DFL)
        raise Terminated("SIGTERM came")

    signal.signal(signal.SIGTERM, unwind)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if told:  # a library caught it
        raise Terminated("SIGTERM came")
