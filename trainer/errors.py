"""UserError, the one error that a user is meant to read; exit codes; the commands that messages name."""

import contextlib
import difflib
import os
import re
import shlex
import sys
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Self

INTERRUPTED = 130  # a shell's code for a program that Ctrl-C ended
BUG = 70  # sysexits' EX_SOFTWARE: an error that nobody foresaw, and that comes again with the same command
PREEMPTED = 75  # sysexits' EX_TEMPFAIL: SIGTERM came, all is saved; the same command goes on
TERMINATED = 143  # a shell's code for a program that SIGTERM ended: there was nothing to save
LOST = 76  # a host of the job was lost, a step hung, or a store failed; the same command goes on

_SCRIPTS = Path(__file__).parents[1] / "scripts"  # in a checkout
# errors that may pass: of a device (a RuntimeError), a network, a disk or the host's memory, …
_MAY_PASS = (OSError, RuntimeError, EOFError, MemoryError, BufferError, SystemError, ReferenceError)
# … but for these of them, and whatever packages raise that speak over a network. Any other comes again: it is of the
# program or of what it was given.
_COMES_AGAIN = (NotImplementedError, RecursionError, IsADirectoryError, NotADirectoryError)
_OVER_NETWORKS = {
    *("aiohttp", "asyncio", "botocore", "concurrent", "fsspec", "gcsfs", "google", "grpc", "httpcore", "httpx"),
    *("huggingface_hub", "multiprocessing", "requests", "s3fs", "socket", "ssl", "urllib3"),
}
_OF_THE_GRAPH = "of_the_graph"  # an attribute of such an error
_TO_DEVICES = ("torch_xla.", "shardwright.xla.")  # modules that send values to devices
_PARTS = ("asked", "found", "why", "instead")  # of a UserError
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]*@")  # a URL's `user:password@`


class UserError(Exception):
    """A request that can't be met. Scripts print it without a traceback and exit with code 2.

    Args:
        asked: e.g. ``recipe mixtral_ep: mesh axis 'expert' of size 3``.
        found: e.g. ``model.layers.0.mlp.experts.down_proj has shape [8, 64, 128]``.
        why: why the two can't go together.
    """

    code = 2  # the script's exit code
    known_to_all = False  # every host of the job raises it

    def __init__(self, *, asked: str, found: str, why: str, instead: str) -> None:
        self.asked, self.found, self.why, self.instead = asked, found, why, instead
        super().__init__(f"{asked}\n  found:   {found}\n  why not: {why}\n  instead: {instead}")

    def _render_traceback_(self) -> list[str]:
        """The lines that IPython draws in place of a traceback (IPython/core/interactiveshell.py)."""
        return f"error: {self}".splitlines()

    def retold(self, **parts: str) -> Self:
        """This error with other ``parts``."""
        return type(self)(**{name: parts.get(name, getattr(self, name)) for name in _PARTS})


class TransientError(UserError):
    """A store, a disk, the hub or a host failed, and may soon work again: a run, started again, goes on.

    With ``--max_restarts`` the run begins again by itself, and launchers start it again.
    """

    code = 1  # started again only by launchers that count


class Terminated(BaseException):
    """SIGTERM came where there is nothing to save: the program tidies up and ends, as after Ctrl-C."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``did you mean 'x'? `` with the nearest of ``known``, to be put before a list; empty where none is near."""
    small = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), list(small), n=1, cutoff=0.5)
    return f"did you mean {small[near[0]]!r}? " if near else ""


def nearest_beside(path: str) -> str:
    """``did you mean 'x'? `` with what lies beside ``path`` under the nearest name; empty where none is near."""
    folder, name = os.path.split(path)
    try:
        there = sorted(os.listdir(os.path.expanduser(folder) or "."))
    except (OSError, ValueError):  # no such folder
        return ""
    stems = {Path(each).stem: each for each in there if each != name}
    near = difflib.get_close_matches(Path(name).stem, stems, n=1, cutoff=0.6)
    return f"did you mean {os.path.join(folder, stems[near[0]])!r}? " if near else ""


def fault(error: Exception) -> str:
    """A file's error in words: that it is not there, or the type and message."""
    return "no such file" if isinstance(error, FileNotFoundError) else f"{type(error).__name__}: {error}"


def a_type(value: object) -> str:
    """The name of a value's type with its article: ``an int``, ``a str``."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def of_another_kind(name: str, value: object, wanted: str) -> UserError:
    """The error of an argument ``name`` whose value is none of those ``wanted``, in words."""
    found = f"a {type(value).__module__}.{type(value).__qualname__}".replace("builtins.", "")
    asked = " ".join(repr(value).split())
    return UserError(asked=f"{name}={asked:.80}", found=found, why="it is of another kind", instead=wanted)


def command(name: str) -> str:
    """The command ``name`` (``train``, ``plan``, …) as the user of this program would type it."""
    if _of_scripts():
        return f"python {shlex.quote(os.path.join(os.path.dirname(sys.argv[0]), name + '.py'))}"
    return f"shardwright {name}"


def of_a_command() -> bool:
    """Whether one of this program's commands runs, and not a user's own script."""
    return _of_scripts() or os.path.basename(sys.argv[0]).startswith("shardwright ")


def _of_scripts() -> bool:
    return os.path.realpath(os.path.dirname(sys.argv[0])) == os.path.realpath(_SCRIPTS)  # by whichever path


def without_credentials(text: str) -> str:
    """``text`` without the user and password of its URLs, fit to be written down."""
    return _CREDENTIALS.sub("", text)


def exit_code_of(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt | Terminated):
        return INTERRUPTED if isinstance(error, KeyboardInterrupt) else TERMINATED
    if isinstance(error, UserError):
        return error.code
    passes = isinstance(error, _MAY_PASS) and not isinstance(error, _COMES_AGAIN) and not hasattr(error, _OF_THE_GRAPH)
    package = type(error).__module__.partition(".")[0]
    return 1 if passes or type(error) is Exception or package in _OVER_NETWORKS else BUG


@contextlib.contextmanager
def building_a_graph() -> Iterator[None]:
    """Within it no device computes, so torch's RuntimeError comes again: shapes or dtypes of an operation don't agree.

    Not where values are sent to devices, which may be lost.
    """
    try:
        yield
    except RuntimeError as error:
        *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
        if type(error) is RuntimeError and not innermost.f_globals.get("__name__", "").startswith(_TO_DEVICES):
            setattr(error, _OF_THE_GRAPH, True)
        raise


class Spiked(UserError):
    """A spike ended the run, at ``step``."""

    step: int


def in_short(error: Exception) -> str:
    """The type and first paragraph of a library's message, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).partition(chr(10) * 2)[0].split())}"
