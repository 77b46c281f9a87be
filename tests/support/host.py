"""A process as one host of several: ``python -m tests.support.host INDEX COUNT PORT DEVICES SCRIPT …`` runs a script.

Its devices are virtual ones of jax's CPU client (`tests.support.pjrt_devices`); those of the other hosts are real to it
as well: a computation over all of them runs in all the processes at once, and its collectives cross them.
"""

from __future__ import annotations

import functools
import os
import random
import resource
import runpy
import socket
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

ENVIRONMENT = {"PJRT_DEVICE": "HOSTS", "PJRT_DYNAMIC_PLUGINS": "1", "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}


def free_ports() -> int:
    """The first of four ports in a row that nobody listens at.

    They lie below those that the system gives to whoever connects (often 32,768 and up): one of these may be taken by
    any connection between this and the host's own start.
    """
    given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(10_000, given - 4 if given > 11_000 else 32_000)
        try:
            for number in range(port, port + 4):
                with socket.socket() as tried:
                    tried.bind(("localhost", number))
        except OSError:
            continue
        return port


def become(index: int, count: int, port: int, devices: int) -> None:
    """Make this process host ``index`` of ``count``, with so many devices; ``port`` and the next three are free."""
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    import jax

    jax.config.update("jax_num_cpu_devices", devices)
    if count > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        # jax's own heartbeats, which a TPU's runtime lacks, would end a job before our watchdog speaks
        jax.distributed.initialize(f"localhost:{port + 3}", count, index, heartbeat_timeout_seconds=10_000)
    from shardwright.checkpoint.write import CheckpointWriter
    from shardwright.hosts import watchdog
    from tests.support import pjrt_devices

    pjrt_devices.install()
    limited, _, size = os.environ.get("HOST_FILE_LIMIT", "").partition(":")
    if limited == str(index):  # its disk takes no larger file
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(size), int(size)))
    writer: Any = CheckpointWriter
    late, write = os.environ.get("HOST_LATE", ""), writer._write
    if late == str(index):  # its disk answers a second later

        def write_late(*arguments: Any) -> Any:
            try:
                return write(*arguments)
            finally:
                time.sleep(1)

        writer._write = write_late
    watchdog.SILENT = float(os.environ.get("HOST_SILENT", watchdog.SILENT))
    watchdog.STAYING = 0.5  # a host ends as soon as it has left


def end(code: int) -> NoReturn:
    """End this process. jax would wait for all the others first, which a TPU's runtime does not."""
    from shardwright.hosts.hosts import leave

    leave()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> object:
    index, count, port, devices = map(int, sys.argv[1:5])
    sys.argv = sys.argv[5:]
    os.environ.update(ENVIRONMENT)
    from shardwright.hosts.restarts import asked_limit
    from tests.support.supervised import fork_runs

    begin = functools.partial(become, index, count, port, devices)
    if asked_limit(sys.argv[1:]):
        fork_runs(begin, end)
    else:
        begin()
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as error:
        return error.code
    return 0


if __name__ == "__main__":
    ended = main()
    end(int(ended or 0) if isinstance(ended, int | None) else 1)
