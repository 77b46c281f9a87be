"""A thread that ends the process, and says why, if the main one would wait for ever.

A computation over several hosts waits for all of them: no device reports a lost host or a step that hangs. The thread
can't interrupt a wait inside the runtime, so it prints its knowledge and ends the process, with a code that means:
start it again.
"""

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from shardwright.errors import LOST
from shardwright.hosts.restarts import note_passing

CONNECT = 600.0  # seconds for the hosts to come together
LOOK = 2.0  # seconds between two looks
SILENT = 40.0  # seconds without a sign of life after which a host is lost; torch_xla's aborts after 50 to 100
LEAVING = 60.0  # seconds that the first host, at its end, waits for the others
STAYING = 2.0  # seconds that it stays after they left: torch_xla's coordinator, there, aborts whoever has not ended yet
_END = "end"  # key of the job's end: exit code, words, whether the cause is transient


class Busy(Protocol):
    """An object that names the run's current activity."""

    activity: str


class AwakeTime:
    """A clock that goes on only while this process runs: between two readings it counts two looks' time at most.

    A paused process (SIGSTOP, a machine that is suspended or moved) would else see itself and all others stand still.
    """

    def __init__(self) -> None:
        self._seconds, self._read, self._lock = 0.0, time.monotonic(), threading.Lock()

    def __call__(self) -> float:
        with self._lock:
            now = time.monotonic()
            self._seconds += min(now - self._read, 2 * LOOK)
            self._read = now
            return self._seconds


awake = AwakeTime()


class Silence:
    """Seconds for which keys of a store have not changed, by this process's own clock."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[bytes, float]] = {}

    def of(self, store: Any, key: str) -> float:
        value = store.get(key) if store.check([key]) else b""
        if key not in self._seen or self._seen[key][0] != value:
            self._seen[key] = (value, awake())
        return awake() - self._seen[key][1]


def part(store: Any, index: int, count: int) -> None:
    """Takes leave of the other hosts; the first, which serves the store, waits for them."""
    store.set(f"left {index}", "")
    until, hosts = time.monotonic() + LEAVING, [f"left {host}" for host in range(count)]
    while index == 0 and not store.check(hosts) and time.monotonic() < until:
        time.sleep(0.1)


class Watchdog:
    """Watches this process, and the job's other hosts: the first watches all, all watch the first.

    They meet in a torch.distributed ``store``, by a connection of the watchdog's own. Its keys hold the job's secret.
    """

    def __init__(self, index: int = 0, count: int = 1, store: Any = None) -> None:
        self.index, self.count, self._store = index, count, store
        self.hang_timeout = 0.0  # seconds without progress that a run may take; 0: any time
        self._clock: Busy | None = None
        self._step: int | None = None
        self._moved = awake()
        self._compiling = False
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []
        self._talked = awake()  # end of the last complete exchange with the store
        self._silence = Silence()

    def start(self) -> None:
        """Begins to watch, in threads that end with the process or at :meth:`leave`."""
        self._talked = awake()
        # a store that does not answer blocks its caller, so another thread looks at the clock
        for act in (self._look_at_clock,) if self._store is None else (self._look_at_clock, self._talk):
            self._threads.append(threading.Thread(target=self._repeat, args=(act,), name="watchdog", daemon=True))
            self._threads[-1].start()

    def moved(self, step: int) -> None:
        """Notes progress; ``step`` is the last that the run began or ended."""
        self._step = step
        self.progressed()
        if self.hang_timeout and not self._threads and not self._ended.is_set():
            self.start()

    def progressed(self) -> None:
        """Notes progress within a long activity: a row was computed, a tensor read or written."""
        self._moved = awake()

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Takes what is done inside the ``with`` for progress, however long it takes: a compiler tells nothing."""
        self._compiling = True
        try:
            yield
        finally:
            self._compiling = False
            self.progressed()

    @contextlib.contextmanager
    def over(self, hang_timeout: float, clock: Busy) -> Iterator[None]:
        """Ends a run that makes no progress for so many seconds inside the ``with``; ``clock`` names its activity."""
        self.hang_timeout, self._clock, self._step = hang_timeout, clock, None
        try:
            yield
        finally:
            self.hang_timeout = 0.0  # the step stays known, for messages until the process ends

    @property
    def activity(self) -> str:
        return "start" if self._clock is None else self._clock.activity

    def tell_end(self, words: str, code: int, *, passing: bool = False) -> None:
        """Ends the other hosts too, with this exit code and these words; ``passing``: the job may begin again."""
        if self._store is not None and not self._ended.is_set():
            with contextlib.suppress(RuntimeError):
                self._store.compare_set(_END, "", json.dumps([code, f"host {self.index} ended: {words}", passing]))

    def wait_for_verdict(self) -> None:
        """Waits long enough to notice a lost host; if there is one, the process ends here."""
        time.sleep(SILENT + 3 * LOOK)

    def stop(self) -> None:
        """Stops watching, since this process ends properly."""
        self._ended.set()
        for thread in self._threads:
            thread.join(LEAVING)

    def leave(self) -> None:
        """Takes leave of the other hosts; the first waits until they have gone."""
        with contextlib.suppress(RuntimeError):  # the first host has gone
            part(self._store, self.index, self.count)
            time.sleep(STAYING if self.index == 0 else 0)

    def obey(self) -> None:
        """Ends the process, with the code and the words of another host that ended the job, if one did."""
        with contextlib.suppress(RuntimeError):  # the first host has gone
            if self._store is not None and self._store.check([_END]):
                code, words, passing = json.loads(self._store.get(_END))
                self._end(words, code or LOST, passing=passing)  # no host ends the others because all is well

    def _repeat(self, act: Callable[[], None]) -> None:
        while not self._ended.wait(LOOK):
            act()

    def _look_at_clock(self) -> None:
        now = awake()
        if self._store is None and self._hung:
            self._end(self._hung, LOST)
        if self._store is not None and now - self._talked > SILENT:
            self._end(f"host 0 has not answered for {now - self._talked:.0f} s; here: {self._here}", LOST)

    def _talk(self) -> None:
        """Gives a sign of life, and obeys an end of the job; the first host looks at all the others."""
        try:
            now = awake()  # with which each sign differs from the last
            sign = {"step": self._step, "doing": self.activity, "waited": round(now - self._moved), "time": now}
            sign["compiling"] = self._compiling
            self._store.set(f"sign {self.index}", json.dumps(sign))
            self.obey()
            for host in range(1, self.count) if self.index == 0 else ():
                left = self._store.check([f"left {host}"])
                if not left and (silent := self._silence.of(self._store, f"sign {host}")) > SILENT:
                    self._end_all(f"host {host} has given no sign of life for {silent:.0f} s")
            if self._hung and self._waits_for_compiler():
                self.progressed()
            elif self._hung:
                self._end_all(self._hung)
            self._talked = awake()
        except RuntimeError as error:  # the store's, which the first host serves
            if not self._ended.is_set():
                self._end(f"host 0 can't be reached ({' '.join(str(error).split())[:200]}); here: {self._here}", LOST)

    def _read_signs(self) -> list[dict[str, Any]]:
        keys = [f"sign {host}" for host in range(self.count)]
        return [json.loads(self._store.get(key)) if self._store.check([key]) else {} for key in keys]

    def _waits_for_compiler(self) -> bool:
        """Whether a host compiles, and says so still: one that stands still now may have said it last."""
        compiling = [host for host, said in enumerate(self._read_signs()) if said.get("compiling")]
        return any(self._silence.of(self._store, f"sign {host}") < 10 * LOOK for host in compiling)

    def _signs(self) -> str:
        """A line for each host: its last step, its activity and for how long."""
        lines = []
        for host, said in enumerate(self._read_signs()):
            step = "before the first step" if said.get("step") is None else f"after step {said['step']}"
            lines.append(f"  host {host}: {step}, {said.get('doing', 'not started')} for {said.get('waited', 0)} s")
        return "\n".join(lines)

    @property
    def _here(self) -> str:
        return f"step {self._step}, {self.activity}"

    @property
    def _hung(self) -> str:
        """The message for a run without progress; empty if it makes some."""
        waited = awake() - self._moved
        if not self.hang_timeout or self._step is None or self._compiling or waited <= self.hang_timeout:
            return ""
        return f"no progress for {waited:.0f} s after step {self._step}, in {self.activity} (--hang_timeout)"

    def _end_all(self, words: str) -> None:
        words = f"{words}\n{self._signs()}"
        self.tell_end(words, LOST, passing=True)
        self._end(words, LOST)

    def _end(self, words: str, code: int, *, passing: bool = False) -> None:
        print(f"error: host {self.index} of {self.count} stops: {words}", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
        if code == LOST or passing:
            note_passing(words)
        if code != LOST:  # final, perhaps, as an abort's is not
            self.leave()
        os._exit(code)
