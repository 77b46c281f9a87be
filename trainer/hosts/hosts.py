"""The hosts of a job: one program in several processes, each with a part of the devices.

Tensors go over the devices' own links. All other messages (the folder, refusals, files written) go over the hosts'
network, by torch.distributed's gloo; a process that has all the devices is alone, and sends none.
"""

from __future__ import annotations

import atexit
import contextlib
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from shardwright.errors import LOST, TransientError, UserError, exit_code_of
from shardwright.hosts import channel
from shardwright.hosts.restarts import note
from shardwright.hosts.watchdog import CONNECT, Watchdog

T = TypeVar("T")
PATIENCE = timedelta(days=1)  # a host may read data for hours; a lost one is found by the watchdog, long before
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
        return self._exchange(value)

    def once(self, make: Callable[[], T]) -> T:
        """The first host's result, or refusal, on every host."""
        if not self.several:
            return make()
        made = self.together(make if self.first else lambda: None)
        return self._speak(lambda: channel.broadcast(made, self._group))

    def together(self, do: Callable[[], T]) -> T:
        """This host's result. One host's refusal is raised on all, wherever they are in ``do`` by then."""
        if not self.several:
            return do()
        result: Any = None
        problem = None
        try:
            result = do()
        except UserError as error:
            if error.known_to_all:
                raise
            texts = {name: getattr(error, name) for name in ("asked", "found", "why", "instead")}
            problem = (type(error).__name__, texts)
        self._exchange(None, problem)
        return result

    def _exchange(self, value: T, problem: tuple[str, dict[str, str]] | None = None) -> list[T]:
        """The value of each host; all raise the first host's problem, if any has one."""
        if not self.several:
            return [value]
        found = self._speak(lambda: channel.gather((value, problem), self.count, self._group))
        for host, (_, problem) in enumerate(found):
            if problem is not None:
                kind, texts = problem
                where = f"on host {host}: " if host else ""
                error = _kinds(UserError).get(kind, UserError)(**{**texts, "found": where + texts["found"]})
                error.known_to_all = True
                raise error
        return [each for each, _ in found]

    def _speak(self, say: Callable[[], T]) -> T:
        try:
            return say()
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
        """The same hosts for another thread, whose calls are in an order of their own."""
        group = dist.new_group(backend="gloo", timeout=PATIENCE) if self.several else None
        return Hosts(self.index, self.count, self.watchdog, group)

    @contextlib.contextmanager
    def answerable(self) -> Iterator[None]:
        """Within it an error that ends this host ends the others, which would wait for it in a computation."""
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


def _kinds(kind: type[UserError]) -> dict[str, type[UserError]]:
    """``kind`` and the classes made from it, by their names."""
    found = {kind.__name__: kind}
    for each in kind.__subclasses__():
        found |= _kinds(each)
    return found


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
        token = channel.broadcast(secrets.token_hex())  # whoever reaches the store can write to it, and read a key
    except (RuntimeError, ValueError) as error:
        raise LostHost(
            asked=f"to bring {count} hosts together at {address}:{port}",
            found=f"on host {index}: {' '.join(str(error).split())[:_SHOWN]}",
            why="they speak over the network about all that is no tensor",
            instead="a job whose hosts all start within ten minutes, and a network that lets them reach host 0; "
            "MASTER_ADDR and MASTER_PORT name another address of it, and a free port",
        ) from None
    _job = Hosts(index, count, Watchdog(index, count, dist.PrefixStore(token, store)))
    note(job=[index, count, address, port, token])
    _job.watchdog.start()
    atexit.register(leave)


def leave() -> None:
    """Takes leave of the others, who need not wait for this process; the first serves them until they have gone."""
    if not (_job.several and dist.is_initialized()):
        return
    _job.watchdog.stop()
    _job.watchdog.leave()
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()
