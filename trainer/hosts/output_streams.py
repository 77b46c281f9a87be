"""Standard output and error that accept every write, and drop it where it fails.

A reader that ends (``| head -1``), a full disk behind a redirected log, a closed terminal: none is a reason to end
hours of training. A closed terminal also sends SIGHUP, which is ignored.
"""

import contextlib
import gc
import io
import os
import re
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from shardwright.errors import BUG, Terminated, UserError, exit_code_of
from shardwright.report.escapes import escaped

_BETWEEN_BARS = re.compile(r"\n*(\x1b\[A)*")  # tqdm/std.py: moveto


class _Lasting(io.FileIO):
    """A file descriptor, closed by somebody else, whose writes never fail.

    So the layers above (buffer, text) keep nothing for a second try, and the flush at the program's end does not fail,
    which Python would turn into exit code 120.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)

    def write(self, data: Any) -> int:
        """Writes bytes; returns how many were written, or the number of all if they are dropped."""
        try:
            while (written := super().write(data)) is None:  # it does not block, and is full
                select.select([], [self], [])
            return written
        except OSError:
            return memoryview(data).nbytes


class _Escaping(io.TextIOWrapper):
    """A text stream that escapes whatever a terminal would obey, but what tqdm does between the lines of its bars.

    ``unescaped`` is the same stream for a :class:`Terminal`, whose own sequences are left as they are.
    """

    def write(self, text: str) -> int:
        if not _BETWEEN_BARS.fullmatch(text):
            begin = "\r" if text.startswith("\r") else ""
            text = begin + escaped(text.removeprefix("\r"))
        return super().write(text)

    @property
    def unescaped(self) -> Any:
        return _Unescaped(self)


class _Unescaped:
    def __init__(self, stream: _Escaping) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return io.TextIOWrapper.write(self._stream, text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def make_output_last(kind: type[io.TextIOWrapper] = io.TextIOWrapper) -> contextlib.ExitStack:
    """Replaces ``sys.stdout`` and ``sys.stderr`` by such streams, and ignores SIGHUP, until the result is closed.

    A stream that does not write straight to a descriptor (a notebook's, a test's) stays, as does a handler of SIGHUP.
    ``kind``: of the text streams.
    """
    undo = contextlib.ExitStack()
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        undo.callback(signal.signal, signal.SIGHUP, signal.signal(signal.SIGHUP, signal.SIG_IGN))
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper):
            continue
        raw = getattr(stream.buffer, "raw", stream.buffer)  # with python -u there is no buffer between
        if type(raw) is not io.FileIO:
            continue
        with contextlib.suppress(OSError):
            stream.flush()
        lasting: Any = _Lasting(raw.fileno())
        buffer = lasting if raw is stream.buffer else io.BufferedWriter(lasting)
        look = {key: getattr(stream, key) for key in ("encoding", "errors", "line_buffering", "write_through")}
        replacement = kind(buffer, **look)
        setattr(sys, name, replacement)
        undo.callback(setattr, sys, name, stream)
        undo.callback(replacement.flush)
    return undo


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """Drops failed writes to standard output and error inside the ``with``."""
    with make_output_last():
        yield


def fill_closed_descriptors() -> None:
    """Opens ``/dev/null`` where standard input, output or error is closed (``2>&-``).

    Else the next opened file, a checkpoint perhaps, would get its number, and libraries' prints.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def exit_code(main: Callable[[], int | None]) -> int:
    """Runs a script's ``main`` and returns its exit code: 2 after a UserError, which is printed, 130 after Ctrl-C.

    An error that nobody foresaw, and that would come again, is printed with its traceback, and the code is 70.

    To the program's end, failed writes to standard output and error are dropped, and what is written is escaped.
    """
    fill_closed_descriptors()
    make_output_last(_Escaping)
    try:
        return main() or 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return exit_code_of(error)
    except (KeyboardInterrupt, Terminated) as error:
        print("interrupted" if isinstance(error, KeyboardInterrupt) else "terminated", file=sys.stderr)
        return exit_code_of(error)
    except Exception as error:
        if (code := exit_code_of(error)) != BUG:
            raise
        traceback.print_exc()
        return code
    finally:
        gc.freeze()  # what is left ends with the process: the interpreter's own walks of it take seconds
