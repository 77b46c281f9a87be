"""The hosts of a job: one program in several processes, each with a part of the devices.

Tensors go over the devices' own links. All other messages (the folder, refusals, files written) go over the hosts'
network, by torch.distributed's gloo; a process that has all the devices is alone, and sends none.
"""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from shardwright.errors import LOST, TransientError, UserError, exit_code_of
from shardwright.hosts.restarts import note
from shardwright.hosts.watchdog import CONNECT, Watchdog

T = TypeVar("T")
PATIENCE = timedelta(days=1)  # the watchdog finds a lost host long before, and a host may read data for hours
_SHOWN = 300  # characters of a difference


@dataclass(frozen=True)
class Hosts:
    """The ``count`` processes of a job as the one with ``index`` sees them. All call each method, in the same order."""

    index: int = 0
    count: int = 1
    watchdog: Watchdog = field(default_factory=Watchdog)
    _group: dist.ProcessGroup | None = None

    @property
    def first(self) -> bool:
        """Whether this process writes the shared files: the log, the page, the tokenizer, a checkpoint's list."""
        return self.index == 0

    @property
    def several(self) -> bool:
        return self.count > 1

    def gather(self, value: T) -> list[T]:
        """The hosts' values, in their order, on all; raises UserError if one refuses something in :meth:`together`."""
        return [outcome.value for outcome in self._exchange(_Outcome(value))]

    def once(self, make: Callable[[], T]) -> T:
        """The first host's result, or refusal, on every host."""
        if not self.several:
            return make()
        made: list[Any] = [self.together(make if self.first else lambda: None)]
        self._speak(lambda: dist.broadcast_object_list(made, src=0, group=self._group))
        return made[0]

    def together(self, do: Callable[[], T]) -> T:
        """This host's result. One host's refusal is raised on all, wherever they are in ``do`` by then."""
        if not self.several:
            return do()
        mine = _outcome(do)
        self._exchange(_Outcome(problem=mine.problem))
        return mine.value

    def _exchange(self, mine: _Outcome) -> list[_Outcome]:
        """The outcome of each host; all raise the first host's problem, if any has one."""
        if not self.several:
            return [mine]
        found: list[Any] = [None] * self.count
        self._speak(lambda: dist.all_gather_object(found, mine, group=self._group))
        for host, outcome in enumerate(found):
            if outcome.problem is not None:
                kind, texts = outcome.problem
                where = f"on host {host}: " if host else ""
                error: Any = kind(**{**texts, "found": where + texts["found"]})
                error.known_to_all = True
                raise error
        return found

    def _speak(self, say: Callable[[], None]) -> None:
        try:
            say()
        except RuntimeError as error:
            self.watchdog.obey()
            raise LostHost(
                asked=f"a word from each of {self.count} hosts",
                found=f"on host {self.index}: {' '.join(str(error).split())[:_SHOWN]}",
                why="one of them has ended, or can't be reached any more",
                instead="the same command again, which goes on from the last checkpoint",
            ) from None

    def check_same(self, facts: Mapping[str, str]) -> None:
        """Raises UserError, which names the first that differs, unless ``facts`` are the same on all hosts."""
        first, *others = self.gather(dict(facts))
        for host, theirs in enumerate(others, start=1):
            here = {name: first.get(name, "none") for name in {**first, **theirs}}
            there = {name: theirs.get(name, "none") for name in here}
            if name := next((name for name in here if here[name] != there[name]), None):  # all hosts raise this
                raise UserError(
                    asked=f"a job on {self.count} hosts",
                    found=f"{name}: {_cut(here[name])} on host 0, {_cut(there[name])} on host {host}",
                    why="all hosts run one program on one set of data: with two, a step waits for ever or computes "
                    "nobody's numbers",
                    instead="the same command, code and files on every host",
                )

    def beside(self) -> Hosts:
        """The same hosts for another thread, which calls in an order of its own."""
        group = dist.new_group(backend="gloo", timeout=PATIENCE) if self.several else None
        return Hosts(self.index, self.count, self.watchdog, group)

    @contextlib.contextmanager
    def answerable(self) -> Iterator[None]:
        """Ends the other hosts too if this one ends inside the ``with``: they would wait for it in a computation."""
        try:
            yield
        except BaseException as error:
            if self.several and not getattr(error, "known_to_all", False):
                if isinstance(error, RuntimeError):  # a computation's, perhaps, because another host has gone
                    self.watchdog.wait_for_verdict()
                words, passing = str(error) or type(error).__name__, isinstance(error, TransientError)
                self.watchdog.tell_end(words, exit_code_of(error), passing=passing)
            raise


class LostHost(TransientError):
    """Another host of the job has gone. The command is right: run again, it goes on."""

    code = LOST


@dataclass(frozen=True)
class _Outcome:
    value: Any = None
    problem: tuple[type[UserError], dict[str, str]] | None = None


def _outcome(make: Callable[[], Any]) -> _Outcome:
    """The result or refusal of ``make``; a refusal that all hosts know is raised as it is."""
    try:
        return _Outcome(make())
    except UserError as error:
        if error.known_to_all:
            raise
        # an exception whose arguments have no default can't be pickled
        texts = {name: getattr(error, name) for name in ("asked", "found", "why", "instead")}
        return _Outcome(problem=(type(error), texts))


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else text[:_SHOWN] + " …"


_job = Hosts()


def hosts() -> Hosts:
    """The hosts of this process's job; until :func:`connect`, itself alone."""
    return _job


def connect(index: int, count: int, address: str, port: int) -> None:
    """Brings the hosts of the job together; called once the devices are open, which tell the host's index.

    All reach the first at ``address`` and its free ``port``. Raises LostHost if not all come.
    """
    global _job
    if count == 1 or _job.several:
        return
    try:
        server = dist.TCPStore(address, port, count, is_master=index == 0, timeout=timedelta(seconds=CONNECT))
        dist.init_process_group("gloo", store=server, rank=index, world_size=count, timeout=PATIENCE)
        # whoever waits in a store's connection blocks it, so the watchdog has one of its own
        store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=CONNECT))
    except (RuntimeError, ValueError) as error:
        raise LostHost(
            asked=f"to bring {count} hosts together at {address}:{port}",
            found=f"on host {index}: {' '.join(str(error).split())[:_SHOWN]}",
            why="they speak over the network about all that is no tensor",
            instead="a job whose hosts all start within ten minutes, and a network that lets them reach host 0; "
            "MASTER_ADDR and MASTER_PORT name another address of it, and a free port",
        ) from None
    _job = Hosts(index, count, Watchdog(index, count, store))
    note(job=[index, count, address, port])
    _job.watchdog.start()
    atexit.register(leave)


def leave() -> None:
    """Takes leave of the others, who need not wait for this process; the first serves them until they have gone."""
    if not (_job.several and dist.is_initialized()):
        return
    _job.watchdog.stop()
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()
    _job.watchdog.leave()
