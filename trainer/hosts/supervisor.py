"""`--max_restarts`: a small process that runs the training as its child, and restarts it after transient failures.

On several hosts there is a supervisor on each. They meet over a store, served by the first host's, exchange how their
runs ended, and all do the same: begin again, or end with one exit code. A supervisor learns the store's address from
its child, which opens the devices and so knows the hosts of the job. It never imports torch_xla, and torch (for the
store) on several hosts alone.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any, Protocol, TypeVar

from shardwright.errors import LOST, UserError, command
from shardwright.hosts.restarts import NOTES, LastRestart, RunEnd, Verdict, decide, read_notes, wait_before, write_notes
from shardwright.hosts.watchdog import CONNECT, LOOK, SILENT, Silence, awake, part
from shardwright.report.lines import Terminal, say

T = TypeVar("T")
PATIENCE = 3 * SILENT  # seconds that a run may go on after another host's has failed; its watchdog needs fewer
_PORT = 2  # above the job's port, which the children use, as they do the next one
_SOON = 0.2  # seconds between two looks with nothing else to do
_TRY = 2.0  # seconds for one try to reach the first host


class ChildRun(Protocol):
    """A started training, in a process group of its own: the part of subprocess.Popen that is used."""

    @property
    def pid(self) -> int: ...
    def wait(self, timeout: float) -> int: ...
    def send_signal(self, number: int, /) -> None: ...
    def kill(self) -> None: ...


Start = Callable[[Sequence[str], str], ChildRun]  # from a command's words, and the path of the notes


@dataclass(frozen=True)
class HostPlace:
    """A host in its job: its number of ``count``, the address and port at which the hosts' runs meet, their secret."""

    index: int = 0
    count: int = 1
    address: str = ""
    port: int = 0
    token: str = ""


def supervise(limit: int, words: Sequence[str]) -> int:
    """Trains by this process's own command, whose script has ``words`` behind it; returns the exit code."""
    # a group of its own: signals to this process's group (a terminal's, `timeout`'s) reach the run once, from here
    own = own_command(words)

    def start(more: Sequence[str], notes: str) -> ChildRun:
        environment = {**os.environ, NOTES: notes}
        return subprocess.Popen([*own, *words, *more], env=environment, stdin=subprocess.DEVNULL, process_group=0)

    return Supervisor(limit, start).run()


def own_command(words: Sequence[str]) -> list[str]:
    """This process's command line before ``words``; raises UserError if it does not end with them."""
    head = sys.orig_argv[: len(sys.orig_argv) - len(words)]
    if [*head, *words] != sys.orig_argv:
        raise UserError(
            asked="--max_restarts",
            found=f"a run that Python code began, not {command('train')}",
            why="there is no command that begins it again",
            instead=f"{command('train')}; or no --max_restarts",
        )
    return [sys.executable, *head[1:]]


class Supervisor:
    """Runs the training, with at most ``limit`` restarts; ``start`` starts it."""

    def __init__(self, limit: int, start: Start) -> None:
        self.limit, self.start, self.meeting = limit, start, Meeting()
        self.told = 0  # the signal that asked this process to end
        self._child: ChildRun | None = None
        self._kept_back = False  # that signal came without a child to pass it on to

    def run(self) -> int:
        """Trains until the verdict is final; returns the exit code."""
        handle, notes = tempfile.mkstemp(prefix="shardwright-", suffix=".json")
        os.close(handle)
        before, more = LastRestart(), list[str]()
        try:
            with self._listening():
                while True:
                    ended = self._live(notes, before, more)
                    verdict = self.meeting.agree(before.count, ended, self.limit)
                    if not verdict.again:
                        return self._end(verdict)
                    before, more = LastRestart(before.count + 1, verdict.why), list(verdict.more) or more
                    self._wait(before)
        finally:
            self.meeting.leave()
            os.remove(notes)

    def _live(self, notes: str, before: LastRestart, more: Sequence[str]) -> RunEnd:
        if self.told:
            return RunEnd(-self.told, told=True)
        write_notes(notes, {"supervisor": os.getpid(), **asdict(before)})
        self._child = child = self.start(more, notes)
        if self._kept_back:
            self._pass_on()
        code = None
        while code is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = child.wait(LOOK)
                self._child = None
            found = read_notes(notes)
            self.meeting.look(before.count, HostPlace(*found["job"]) if "job" in found else None)
            if code is None and self.meeting.overdue:
                child.kill()
        ended = RunEnd(
            code,
            told=bool(self.told),
            transient=bool(found.get("transient")),
            begun=bool(found.get("begun")),
            why=str(found.get("ended", "")),
            more=tuple(found.get("more", more)),
        )
        if ended.failed:  # its own children may still hold the devices
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        return ended

    def _wait(self, before: LastRestart) -> None:
        seconds = wait_before(before.count)
        if self.meeting.first:
            say(Terminal(), f"restart: {before.count} of {self.limit} in {seconds:g} s, after: {before.why}")
            sys.stdout.flush()
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.told:
            time.sleep(_SOON)

    def _end(self, verdict: Verdict) -> int:
        """Prints the reason, unless the run has; returns the exit code."""
        code = verdict.code if verdict.code >= 0 else 128 - verdict.code  # as a shell reports a signal
        if self.meeting.lost:
            print(f"error: this job can't begin again by itself: {self.meeting.lost}", file=sys.stderr)
        if verdict.why or (verdict.code < 0 and not self.told):
            print(f"error: exit code {code}, after: {verdict.why or f'signal {-verdict.code}'}", file=sys.stderr)
        return code

    # ---- signals ----

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """Passes SIGTERM and Ctrl-C on to the run, which saves and ends, or ends at the second signal."""
        previous = {number: signal.signal(number, self._hear) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _hear(self, number: int, frame: Any) -> None:
        if self._child is None and self._kept_back:
            os._exit(128 + number)
        self.told = number
        self._pass_on()

    def _pass_on(self) -> None:
        self._kept_back = self._child is None
        if self._child is not None:
            self._child.send_signal(self.told)


class Meeting:
    """The supervisors of a job as one of them sees them; on one host it is alone."""

    def __init__(self) -> None:
        self.lost = ""  # why the others can't be met any more
        self._place = HostPlace()
        self._store: Any = None
        self._problem = ""  # error of the last try to reach the store
        self._silence = Silence()
        self._failed = (-1, 0.0)  # the life in which another host's run failed, and when this one learned it
        self._life = 0

    @property
    def first(self) -> bool:
        return self._place.index == 0

    @property
    def overdue(self) -> bool:
        """Whether this host's run should have ended by now, since another's failed long ago."""
        life, since = self._failed
        return life == self._life and awake() - since > PATIENCE

    def look(self, life: int, job: HostPlace | None) -> None:
        """Gives a sign of life, once there is a ``job`` of several hosts, and looks whether another's run failed."""
        self._life = life
        if job is not None and self._place.count == 1:
            self._place = job
        if self._place.count > 1 and not self.lost:
            self._speak(self._beat)

    def agree(self, life: int, ended: RunEnd, limit: int) -> Verdict:
        """The common verdict after this host's run number ``life`` (from 0)."""
        if self._place.count == 1:
            return decide([ended], life, limit)
        since = awake()
        self._silence = Silence()
        while not self.lost:
            self.look(life, None)
            if (verdict := self._speak(lambda store: self._verdict(store, ended, limit))) is not None:
                return verdict
            if self._store is None and awake() - since > CONNECT:
                self.lost = f"the first host's supervisor could not be met: {self._problem}"
            time.sleep(_SOON)
        return decide([ended, RunEnd(LOST)], life, limit=life)

    def leave(self) -> None:
        """Takes leave; the first supervisor serves the others until they have gone."""
        if self._store is not None and not self.lost:
            self._speak(lambda store: part(store, self._place.index, self._place.count))

    def _beat(self, store: Any) -> None:
        store.set(f"sign {self._place.index}", str(time.monotonic()))  # differs from the last
        if self._failed[0] != self._life and store.check([f"failed {self._life}"]):
            self._failed = (self._life, awake())

    def _verdict(self, store: Any, ended: RunEnd, limit: int) -> Verdict | None:
        """The verdict, once there is one; the first host's supervisor decides for all."""
        store.set(f"ended {self._life} {self._place.index}", json.dumps(asdict(ended)))
        if ended.failed:
            store.set(f"failed {self._life}", "")
        if self.first and (verdict := self._decide(store, limit)) is not None:
            store.set(f"verdict {self._life}", json.dumps(asdict(verdict)))
        if not store.check([key := f"verdict {self._life}"]):
            return None
        verdict = Verdict(**json.loads(store.get(key)))
        # code 0 is of this host's run, or of none
        return verdict if verdict.again or verdict.code else replace(verdict, code=ended.code)

    def _decide(self, store: Any, limit: int) -> Verdict | None:
        """The verdict, once every host's run has ended or its supervisor is lost."""
        ends, missing = [], list[int]()
        for host in range(self._place.count):
            if store.check([key := f"ended {self._life} {host}"]):
                ends.append(RunEnd(**json.loads(store.get(key))))
                continue
            patience = SILENT if store.check([sign := f"sign {host}"]) else CONNECT
            if self._silence.of(store, sign) <= patience:
                return None
            missing.append(host)
        if not missing:
            return decide(ends, self._life, limit)
        why = f"no sign of life of the supervisor of host {', '.join(map(str, missing))}"
        return replace(decide([*ends, RunEnd(LOST)], self._life, limit=self._life), why=why)

    def _speak(self, say: Callable[[Any], T]) -> T | None:
        """Calls ``say`` with the store; None before first contact, and after a lost one, which sets :attr:`lost`."""
        try:
            return say(self._connected())
        except (RuntimeError, ValueError, OSError) as error:
            self._problem = " ".join(str(error).split())[:200]
            if self._store is not None:
                self.lost = f"the first host's supervisor has gone: {self._problem}"
            return None

    def _connected(self) -> Any:
        if self._store is None:
            address, port = self._place.address, self._place.port + _PORT
            if not self.first:  # it may not serve yet, and a TCPStore that fails to connect prints a page of frames
                socket.create_connection((address, port), timeout=_TRY).close()
            import torch.distributed as dist

            patience = timedelta(seconds=SILENT)
            store = dist.TCPStore(address, port, is_master=self.first, wait_for_workers=False, timeout=patience)
            self._store = dist.PrefixStore(self._place.token, store)
        return self._store
