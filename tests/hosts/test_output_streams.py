"""Output that can't be written ends no program: it does its work, writes its files and ends with its exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import IO

import pytest

from tests.support.fork_server import run
from tests.support.paths import ROOT
from tests.support.training import environment

# every way in which a script prints, then a report, then something that only the program's end would flush
PROGRAM = """
import pathlib, sys, time, warnings
from rich.console import Console
from shardwright.errors import UserError
from shardwright.hosts.output_streams import exit_code
from shardwright.report.bars import tracked

def main():
    console = Console(force_terminal=True)
    for number in range(2):
        console.print("a" * 9000)
        print("b" * 9000)
        print("c" * 9000, file=sys.stderr)
        warnings.warn(f"d {number}")
    for _ in tracked(console, "rows", range(2), 2):
        time.sleep(0.15)  # meanwhile the bar's own thread draws it
    pathlib.Path(sys.argv[1]).write_text("the report")
    print("never flushed", end="")
    print("never flushed", end="", file=sys.stderr)
    if sys.argv[2] == "refused":
        raise UserError(asked="a", found="b", why="c", instead="d")
    return 3

sys.exit(exit_code(main))
"""


@contextmanager
def sink(kind: str) -> Iterator[IO[bytes]]:
    """A file that takes nothing: a disk that is full, or a pipe whose reader has ended."""
    with ExitStack() as opened:
        if kind == "full":
            yield opened.enter_context(open("/dev/full", "wb", buffering=0))
            return
        readable, writable = os.pipe()
        os.close(readable)
        yield opened.enter_context(os.fdopen(writable, "wb", buffering=0))


@pytest.mark.parametrize(
    ("kind", "flags", "ending"),
    [("full", [], "done"), ("full", ["-u"], "refused"), ("broken", [], "refused"), ("broken", ["-u"], "done")],
)
def test_a_program_ends_as_it_would_whatever_takes_none_of_its_output(kind, flags, ending, tmp_path):
    report = tmp_path / "report"
    with sink(kind) as nowhere:
        command = [sys.executable, *flags, "-c", PROGRAM, str(report), ending]
        both = subprocess.run(command, stdout=nowhere, stderr=nowhere, cwd=ROOT, check=False)
        assert (both.returncode, report.read_text()) == ({"done": 3, "refused": 2}[ending], "the report")
        out = subprocess.run(command, stdout=nowhere, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False)
    assert out.returncode == both.returncode
    assert "Exception ignored" not in out.stderr
    assert "Error" not in out.stderr
    assert out.stderr.count("c" * 9000) == 2, "the stream that takes what is written gets all of it"
    assert "never flushed" in out.stderr


# a program at a terminal of its own, which is closed once it has begun
TERMINAL = """
import os, pty, sys
process, terminal = pty.fork()
if process == 0:
    os.execv(sys.executable, [sys.executable, "-c", *sys.argv[1:]])
os.read(terminal, 1)
os.close(terminal)
print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
"""


def test_a_program_goes_on_and_ends_as_it_would_if_its_terminal_is_closed(tmp_path):
    report = tmp_path / "report"
    command = [sys.executable, "-c", TERMINAL, PROGRAM, str(report), "done"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.stdout, done.stderr) == ("3\n", "")
    assert report.read_text() == "the report"


def test_a_file_that_is_opened_gets_no_closed_stream_s_number(tmp_path):
    lines = "import os\nfrom shardwright.hosts.output_streams import exit_code\n"
    lines += "def main():\n    return os.open(os.devnull, 0)\n"
    program = f"{lines}os._exit(exit_code(main))"
    done = subprocess.run(["sh", "-c", '"$0" -c "$1" <&- >&- 2>&-', sys.executable, program], cwd=ROOT, check=False)
    assert done.returncode == 3


def test_within_a_program_the_streams_are_lent_and_given_back(tmp_path):
    program = (
        "import sys\nfrom shardwright.hosts.output_streams import lasting_output\nbefore = sys.stdout, sys.stderr\n"
        "with lasting_output():\n    print('lost', flush=True)\n    print('held')\n"
        "assert (sys.stdout, sys.stderr) == before\nprint('kept', file=sys.stderr)\n"
    )
    with sink("broken") as nowhere:
        done = subprocess.run(
            [sys.executable, "-c", program], stdout=nowhere, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False
        )
    assert (done.returncode, done.stderr) == (0, "kept\n")


def test_a_plan_that_nobody_reads_is_no_error(tmp_path):
    with sink("broken") as nowhere:
        done = run(ROOT / "scripts" / "plan.py", "--recipe", "mixtral_ep", "--json", stdout=nowhere, env=environment())
    assert (done.returncode, done.stderr) == (0, "")
