"""Hosts' words to each other arrive as they were, nothing of them is run, and nobody else gives orders."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.fork_server import Forked
from tests.support.host import free_ports

PROGRAM = """
import sys, time
from types import SimpleNamespace
import numpy as np
from shardwright.errors import UserError
from shardwright.files.folder import StorageError
from shardwright.hosts import watchdog
from shardwright.hosts.hosts import connect, hosts
watchdog.LOOK, watchdog.STAYING, watchdog.SILENT = {look}, 0.0, 20.0
unpickled = []
sys.addaudithook(lambda event, what: unpickled.append(what) if event == "pickle.find_class" else None)
index = int(sys.argv[1])
connect(index, 2, "localhost", int(sys.argv[2]))
print("met", flush=True)
with hosts().answerable():
{act}
sys.exit(code)
"""
VALUES = [None, True, 1.5, "ä\u2028", [], [1, [2]], (), (1, (2, "a")), {}, {1: "a", "1": {"tuple": (2,)}}, {(1, 2): 3}]
EXCHANGE = f"""
    from shardwright import run
    run.today = lambda: f"2026-11-0{{index + 1}}"  # their clocks differ
    assert run.date_of(None) == "2026-11-01"
    values = {VALUES!r}
    assert hosts().gather((index, values)) == [(0, values), (1, values)]
    assert hosts().once(lambda: (index, values)) == (0, values)
    arrays = dict(a=np.arange(6, dtype=np.int32).reshape(2, 3), b=np.zeros((0, 2)), c=np.array(True))
    for own in hosts().gather(arrays if index else {{}})[1], hosts().beside().once(lambda: arrays):
        assert all((own[name] == value).all() and own[name].dtype == value.dtype for name, value in arrays.items())
    def refuse():
        if index:
            raise StorageError(asked="a", found="b", why="c", instead="d")
    try:
        hosts().together(refuse)
    except StorageError as error:
        assert (error.found, error.known_to_all) == ("on host 1: b", True)
        code = f"unpickled: {{unpickled}}" if unpickled else 3
"""
WAIT = """
    sys.stdin.readline()
    code = 3 + sum(hosts().gather(1))
"""
COMPILE = """
    with hosts().watchdog.over(8, SimpleNamespace(activity="steps")):
        hosts().watchdog.moved(1)
        if index:
            with hosts().watchdog.compiling():
                time.sleep(12)
        code = 3 + sum(hosts().gather(1))
"""
FAIL = """
    if index:
        raise ValueError("a broken callback")
    hosts().gather(1)
"""


def start(act: str, look: float) -> tuple[int, list[Forked]]:
    """The port at which two hosts have met that ``act``, and their processes."""
    port, program = free_ports(), PROGRAM.format(act=act, look=look)
    files: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    hosts = [Forked("-c", program, host, port, text=True, **files) for host in (0, 1)]
    for host in hosts:
        assert "met\n" in iter(host.stdout.readline, ""), host.communicate()[1]  # gloo speaks too
    return port, hosts


def ends(hosts: list[Forked]) -> tuple[list[int], list[str]]:
    for host in hosts:
        with contextlib.suppress(BrokenPipeError):  # it has ended
            host.stdin.write("\n")
            host.stdin.flush()
    said = [host.communicate()[1] for host in hosts]
    return [host.returncode for host in hosts], said


@pytest.fixture(scope="module", autouse=True)
def waiting() -> Iterator[tuple[list[Forked], float, list[Forked]]]:
    """Hosts that are all paused, and since when; and hosts of which one compiles: both wait while other tests run."""
    paused, compiling = start(WAIT, 0.1)[1], list[Forked]()
    try:
        for host in paused:
            host.send_signal(signal.SIGSTOP)
        since = time.monotonic()
        compiling = start(COMPILE, look=1)[1]
        yield paused, since, compiling
    finally:
        for host in (*paused, *compiling):
            host.kill()  # if a test failed


def test_values_and_refusals_arrive_as_they_were_and_none_is_unpickled() -> None:
    codes, said = ends(start(EXCHANGE, 0.1)[1])
    assert codes == [3, 3], said


@pytest.mark.parametrize("deletes", [False, True])
def test_a_stranger_who_reaches_the_store_ends_no_host(deletes: bool) -> None:
    port, hosts = start(WAIT, 0.1)
    stranger = dist.TCPStore("localhost", port, is_master=False, timeout=timedelta(seconds=60))
    for key in ("end", "sign 0", "sign 1", "left 0", "left 1"):
        if deletes:
            stranger.delete_key(key)
        else:
            stranger.set(key, json.dumps([0, "all is well", False]))
    for host in hosts:
        with pytest.raises(subprocess.TimeoutExpired):  # ten looks later
            host.wait(1)
    codes, said = ends(hosts)
    assert codes == [5, 5], said


def test_a_host_whose_program_fails_ends_the_others_with_its_words_and_not_as_a_lost_one() -> None:
    codes, said = ends(start(FAIL, look=30)[1])  # before the other's watchdog looks
    assert codes == [70, 1], said
    assert "host 1 ended: a broken callback" in said[0]


def test_a_host_that_waits_for_one_that_compiles_is_not_taken_for_one_that_hangs(waiting) -> None:
    codes, said = ends(waiting[2])
    assert codes == [5, 5], said


def test_hosts_that_were_all_paused_for_longer_than_one_may_be_silent_go_on(waiting) -> None:
    hosts, since, _ = waiting
    time.sleep(max(0.0, since + 21 - time.monotonic()))
    for host in hosts:
        host.send_signal(signal.SIGCONT)
    time.sleep(1)
    codes, said = ends(hosts)
    assert codes == [5, 5], said
