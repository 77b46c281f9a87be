"""Python programs for one import: a process that has everything imported, and has opened no device, forks them.

:class:`Forked` is `subprocess.Popen` of a Python program, and :func:`run` is `subprocess.run`: the program has its own
arguments, environment, folder, files, process group, signals and exit code, and is spared five to nine seconds of
imports. A test of what is imported, or of Python's own flags, starts a process of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import logging
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import types
from typing import Any

from tests.support.paths import ROOT

# the trainer, and what a run imports when it comes to it
_IMPORTED = ["shardwright.run", "shardwright.scripts.train", "datasets", "jax"]
_IMPORTED += ["transformers.models.llama.modeling_llama", "transformers.models.mixtral.modeling_mixtral"]
_IMPORTED += ["datasets.io.generator", "jaxlib.mlir.dialects.mhlo", "scipy.io", "transformers.optimization"]
_REQUEST = 1 << 20  # bytes at most; the environment takes some 10,000


class Forked(subprocess.Popen):
    """A Python program that the server forks.

    Args:
        words: a script, or ``-c`` and a program, or ``-m`` and a module; then its arguments.
        options: of `subprocess.Popen`: files, ``env``, ``cwd``, ``text`` and ``process_group``.
    """

    def __init__(self, *words: object, **options: Any) -> None:
        super().__init__([str(word) for word in words], **options)

    def _execute_child(self, args: Any, *more: Any) -> None:  # semi-private; alike in Python 3.11 to 3.13
        cwd, environment, pipes, group = more[4], more[5], more[9:15], more[-1]
        request = {
            "words": args,
            "folder": os.fspath(cwd or os.getcwd()),
            "environment": dict(os.environ if environment is None else environment),
            "group": None if group == -1 else group,
        }
        files = [number if file == -1 else file for number, file in enumerate(pipes[i] for i in (0, 3, 5))]
        self._news, told = os.pipe()
        socket.send_fds(_server(), [json.dumps(request).encode()], [*files, told])
        os.close(told)
        self._close_pipe_fds(*pipes)
        self.pid = self._number()
        self._child_created = True

    def _number(self) -> int:
        """The next answer of the server about this program: its process id, then its exit code."""
        line = b""
        while not line.endswith(b"\n"):
            if not (part := os.read(self._news, 1)):
                raise ChildProcessError("the fork server has ended")
            line += part
        return int(line)

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None and self.pid and select.select([self._news], [], [], 0)[0]:
            self.returncode = self._number()
            os.close(self._news)
        return self.returncode

    def _wait(self, timeout: float | None) -> int | None:
        if self.returncode is None and not select.select([self._news], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self._internal_poll()


def run(*words: object, said: str = "", timeout: float = 900, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end; ``said`` is its standard input, and the rest is what :class:`Forked` takes."""
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    with Forked(*words, text=True, **options) as process:
        try:
            printed = process.communicate(said, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, *printed)


@functools.cache
def _server() -> socket.socket:
    """The server of this process, which ends with it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # the last is set in this process by each script that opens no device, once a test imports it
    own = ("PJRT_DEVICE", "CPU_NUM_DEVICES", "USE_TORCH_XLA")
    environment = {name: value for name, value in os.environ.items() if name not in own}
    with theirs:
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.support.fork_server", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=environment,
            cwd=ROOT,
            process_group=0,
        )

    def stop() -> None:
        ours.close()
        server.wait(timeout=60)

    atexit.register(stop)
    return ours


def _fork(requests: socket.socket) -> dict[str, Any]:
    """Forks a program for each request; returns in the forked process, with what it shall be."""
    living: dict[int, tuple[int, int]] = {}  # a descriptor that shows its end → the process, where its news go
    watched = select.poll()
    watched.register(requests, select.POLLIN)
    while True:
        for file, _ in watched.poll():
            if file in living:
                process, news = living.pop(file)
                watched.unregister(file)
                code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
                with contextlib.suppress(BrokenPipeError):  # nobody waits for it
                    os.write(news, b"%d\n" % code)
                os.close(file)
                os.close(news)
                continue
            data, files, _, _ = socket.recv_fds(requests, _REQUEST, 4)
            if not data:  # the tests have ended
                for process, _ in living.values():
                    os.kill(process, signal.SIGKILL)
                os._exit(0)
            if (process := os.fork()) == 0:
                for opened in (*living, *(news for _, news in living.values()), requests.detach(), files[3]):
                    os.close(opened)
                for number, given in enumerate(files[:3]):
                    os.dup2(given, number)
                    os.close(given)
                return json.loads(data)
            os.write(files[3], b"%d\n" % process)
            for given in files[:3]:
                os.close(given)
            watched.register(end := os.pidfd_open(process), select.POLLIN)
            living[end] = (process, files[3])


def _become(words: list[str], folder: str, environment: dict[str, str], group: int | None) -> None:
    """This process runs a program, as Python does."""
    import torch_xla

    if group is not None:
        os.setpgid(0, group)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    torch_xla._setup_xla_flags()  # as its import does
    sys.orig_argv[:] = [sys.executable, *words]
    if words[0] == "-m":
        sys.argv[:] = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    if words[0] != "-c":
        sys.argv[:] = words
        runpy.run_path(words[0], run_name="__main__")
        return
    sys.argv[:] = ["-c", *words[2:]]
    sys.modules["__main__"] = program = types.ModuleType("__main__")
    exec(compile(words[1], "<string>", "exec"), program.__dict__)


def main() -> None:
    before = set(os.environ)
    gc.disable()
    logging.disable(logging.WARNING)
    for name in _IMPORTED:
        importlib.import_module(name)
    import torch_xla
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("llama")  # it keeps what it makes: the patterns of all families' names
    logging.disable(logging.NOTSET)
    assert not torch_xla._XLAC._xla_runtime_is_initialized()
    imports = {name: value for name, value in os.environ.items() if name not in before}  # what importing sets
    gc.freeze()
    gc.enable()
    request = _fork(socket.socket(fileno=int(sys.argv[1])))
    request["environment"] = {**imports, **request["environment"]}
    _become(**request)


if __name__ == "__main__":
    main()
