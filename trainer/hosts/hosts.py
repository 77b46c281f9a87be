"""The hosts of a job: one program in several processes, each with a part of the devices, and what they tell each other.

Tensors go over the devices' own links. What is said besides (which folder, who refuses what, whose file is written)
goes over the hosts' network, by torch.distributed's gloo; a process that has all the devices says it to itself.
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
PATIENCE = timedelta(days=1)  # the watchdog finds a lost host long before, and one may well read data for hours
_SHOWN = 300  # characters of what differs


@dataclass(frozen=True)
class Hosts:
    """The processes of a job as one of them sees them. Each method is called by all, in the same order.

    Args:
        index: this process.
        count: how many there are.
    """

    index: int = 0
    count: int = 1
    watchdog: Watchdog = field(default_factory=Watchdog)
    _group: dist.ProcessGroup | None = None

    @property
    def first(self) -> bool:
        """Whether this process writes what there is one of: the log, the page, the tokenizer, a checkpoint's list."""
        return self.index == 0

    @property
    def several(self) -> bool:
        return self.count > 1

    def gather(self, value: T) -> list[T]:
        """What each host gives, in their order; all hosts get it.

        Raises:
            UserError: another host refuses something in the meantime, in :meth:`together`.
        """
        return [outcome.value for outcome in self._exchange(_Outcome(value))]

    def once(self, make: Callable[[], T]) -> T:
        """What the first host makes, or refuses, on every host."""
        if not self.several:
            return make()
        mine = _outcome(make) if self.first else _Outcome()
        self._exchange(_Outcome(problem=mine.problem))
        made = [mine.value]
        self._speak(lambda: dist.broadcast_object_list(made, src=0, group=self._group))
        return made[0]

    def together(self, do: Callable[[], T]) -> T:
        """What this host makes. What one of them refuses is refused on all, wherever they are in ``do`` by then."""
        if not self.several:
            return do()
        mine = _outcome(do)
        self._exchange(_Outcome(problem=mine.problem))
        return mine.value

    def _exchange(self, mine: _Outcome) -> list[_Outcome]:
        """The outcome of each host; where one has a problem, all raise the first of them."""
        if not self.several:
            return [mine]
        found: list[Any] = [None] * self.count
        self._speak(lambda: dist.all_gather_object(found, mine, group=self._group))
        for host, outcome in enumerate(found):
            if outcome.problem is not None:
                raise _rebuilt(outcome.problem, host)
        return found

    def _speak(self, say: Callable[[], None]) -> None:
        try:
            say()
        except RuntimeError as error:
            raise LostHost(
                asked=f"a word from each of {self.count} hosts",
                found=f"on host {self.index}: {' '.join(str(error).split())[:_SHOWN]}",
                why="one of them has ended, or can't be reached any more",
                instead="the same command again, which goes on from the last checkpoint",
            ) from None

    def check_same(self, facts: Mapping[str, str]) -> None:
        """Refuse to go on unless ``facts`` (what it is → its value) are equal on all hosts.

        Raises:
            UserError: names the first that differs, with the first host's value and another's.
        """
        for host, theirs in enumerate(said := self.gather(dict(facts))):
            for name in [*said[0], *(other for other in theirs if other not in said[0])]:
                ours, other = said[0].get(name, "none"), theirs.get(name, "none")
                if ours != other:  # all see it, in the same place
                    raise UserError(
                        asked=f"a job on {self.count} hosts",
                        found=f"{name}: {_cut(ours)} on host 0, {_cut(other)} on host {host}",
                        why="all hosts run one program on one set of data: with two, a step waits for ever or computes "
                        "nobody's numbers",
                        instead="the same command, code and files on every host",
                    )

    def beside(self) -> Hosts:
        """The same hosts for another thread, whose calls have an order of their own."""
        group = dist.new_group(backend="gloo", timeout=PATIENCE) if self.several else None
        return Hosts(self.index, self.count, self.watchdog, group)

    @contextlib.contextmanager
    def answerable(self) -> Iterator[None]:
        """What ends this host inside the ``with`` ends the others too: they would wait for it in a computation."""
        try:
            yield
        except BaseException as error:
            if self.several and not getattr(error, "known_to_all", False):
                if isinstance(error, RuntimeError):  # also what a computation ends with when another host has gone
                    self.watchdog.wait_for_verdict()
                words, passing = str(error) or type(error).__name__, isinstance(error, TransientError)
                self.watchdog.tell_end(words, exit_code_of(error), passing=passing)
            raise


class LostHost(TransientError):
    """Another host of the job has gone. Nothing is wrong with what was asked for: the same command goes on."""

    code = LOST


@dataclass(frozen=True)
class _Outcome:
    value: Any = None
    problem: tuple[type[UserError], dict[str, str]] | None = None


def _outcome(make: Callable[[], Any]) -> _Outcome:
    """What ``make`` returns or refuses; a refusal that all hosts know already is raised as it is."""
    try:
        return _Outcome(make())
    except UserError as error:
        if getattr(error, "known_to_all", False):
            raise
        # an exception with arguments that have no default can't be pickled
        said = {name: getattr(error, name) for name in ("asked", "found", "why", "instead")}
        return _Outcome(problem=(type(error), said))


def _rebuilt(problem: tuple[type[UserError], dict[str, str]], host: int) -> UserError:
    kind, said = problem
    error: Any = kind(**{**said, "found": f"on host {host}: {said['found']}"} if host else said)
    error.known_to_all = True
    return error


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else text[:_SHOWN] + " …"


_job = Hosts()


def hosts() -> Hosts:
    """The hosts of this process's job; itself alone until :func:`connect`."""
    return _job


def connect(index: int, count: int, address: str, port: int) -> None:
    """Bring the hosts of the job together; called once, by who opened the devices and knows which host this is.

    Args:
        address: the first host's, as all hosts can reach it.
        port: free on it.

    Raises:
        LostHost: they did not all come.
    """
    global _job
    if count == 1 or _job.several:
        return
    try:
        server = dist.TCPStore(address, port, count, is_master=index == 0, timeout=timedelta(seconds=CONNECT))
        dist.init_process_group("gloo", store=server, rank=index, world_size=count, timeout=PATIENCE)
        # a store's connection is held by whoever waits in it, so the watchdog has one of its own
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
    """The process ends: the others need not wait for it, and the first serves them until they have gone."""
    if not (_job.several and dist.is_initialized()):
        return
    _job.watchdog.leave()
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()
