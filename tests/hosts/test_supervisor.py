"""--max_restarts: what something passing ended goes on by itself to the end that it would have had."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shardwright.checkpoint import manifest
from shardwright.errors import BUG, INTERRUPTED, LOST, PREEMPTED, TransientError, UserError
from shardwright.files.folder import StorageError
from shardwright.hosts import supervisor
from shardwright.hosts.restarts import (
    NOTES,
    LastRestart,
    Restarts,
    RunEnd,
    Verdict,
    asked_limit,
    check_limit,
    decide,
    wait_before,
    words_again,
)
from shardwright.hosts.supervisor import HostPlace, Meeting, Supervisor
from shardwright.report.goodput import read_lives
from tests.support.fork_server import Forked
from tests.support.host import free_ports
from tests.support.hosts import child_of, wait_until
from tests.support.jobs import job_of
from tests.support.lives import tiny_run, write_text
from tests.support.logs import entries, losses
from tests.support.paths import ROOT

WORDS = {"asked": "write /mnt/x", "found": "OSError: gone", "why": "w", "instead": "i"}
STORE = StorageError(**WORDS)


class LostHost(TransientError):
    """What somebody else calls passing."""


def test_only_what_is_passing_is_followed_by_a_restart_and_only_so_often_and_once_the_run_has_begun():
    first = Restarts(limit=2, before=LastRestart())
    assert first.follows(STORE, begun=True)
    assert first.follows(LostHost(**WORDS), begun=True)
    assert not first.follows(UserError(**WORDS), begun=True)  # a bad loss, an option
    assert not first.follows(RuntimeError("a bug"), begun=True)
    assert not first.follows(STORE, begun=False)  # a path that never was
    later = Restarts(limit=2, before=LastRestart(1, "gone"))
    assert later.follows(STORE, begun=False)  # the store is still away
    assert not Restarts(limit=2, before=LastRestart(2, "gone")).follows(STORE, begun=True)
    assert not Restarts().follows(STORE, begun=True)


MORE = ("--output_dir", "out")
KILLED, ABORTED = RunEnd(-signal.SIGKILL, begun=True, more=MORE), RunEnd(-signal.SIGABRT, begun=True)
STORED = RunEnd(2, begun=True, transient=True, why="gone", more=MORE)
REFUSED, MISSED = RunEnd(2, begun=True), RunEnd(LOST, begun=True, transient=True, why="no sign of host 1")
AGAIN = [
    ([STORED], "gone"),
    ([KILLED], "it was killed (SIGKILL)"),
    ([KILLED, ABORTED], "host 0 was killed (SIGKILL)"),  # torch_xla's coordinator aborts the others
    ([MISSED, KILLED], "host 1 was killed (SIGKILL)"),
    ([MISSED, RunEnd(1)], "no sign of host 1"),
    ([RunEnd(0, begun=True), STORED], "gone"),  # the last write failed
]
ENDS = [
    ([RunEnd(0)], 0),
    ([REFUSED], 2),
    ([REFUSED, MISSED], 2),
    ([MISSED, RunEnd(BUG, begun=True)], BUG),
    ([RunEnd(1, begun=True)], 1),
    ([ABORTED, ABORTED], -signal.SIGABRT),
    ([RunEnd(-signal.SIGKILL)], -signal.SIGKILL),  # before a step
    ([RunEnd(-signal.SIGKILL), RunEnd(-signal.SIGABRT)], LOST),
    ([RunEnd(PREEMPTED, begun=True), RunEnd(PREEMPTED, begun=True)], PREEMPTED),
    ([MISSED, RunEnd(-signal.SIGTERM)], -signal.SIGTERM),
    ([RunEnd(INTERRUPTED, told=True)], INTERRUPTED),
    ([RunEnd(2, told=True, transient=True, begun=True)], 2),  # told to stop, and could not save
]


@pytest.mark.parametrize(("ended", "why"), AGAIN)
def test_all_hosts_begin_again_after_what_is_passing_on_any_of_them(ended, why):
    verdict = decide(ended, restarts=0, limit=1)
    assert (verdict.again, verdict.why) == (True, why)
    assert tuple(verdict.more) == (MORE if any(each.more for each in ended) else ())
    assert not decide(ended, restarts=1, limit=1).again
    if len(ended) == 1:
        assert decide(ended, restarts=1, limit=1).code == ended[0].code


@pytest.mark.parametrize(("ended", "code"), ENDS)
def test_all_hosts_end_with_one_code_after_anything_else(ended, code):
    verdict = decide(ended, restarts=0, limit=3)
    assert (verdict.again, verdict.code) == (False, code)


def test_what_begins_again_need_not_take_a_step_the_second_time():
    assert decide([RunEnd(2, transient=True)], restarts=1, limit=2).again
    assert not decide([RunEnd(2, transient=True)], restarts=0, limit=2).again


def test_each_wait_is_twice_the_one_before_up_to_a_limit():
    assert [wait_before(restart) for restart in (1, 2, 3, 4)] == [1, 2, 4, 8]
    assert wait_before(2000 // 10) == wait_before(30) == 300


@pytest.mark.parametrize(
    ("words", "limit"),
    [
        (["--recipe", "r"], 0),
        (["--max_restarts", "3", "--recipe", "r"], 3),
        (["--max-restarts=3", "--learning_rate", "-1", "--max_restarts", "4"], 4),
        (["--max_restarts", "x"], 0),  # the run refuses it
        (["--max_restarts", "-1"], 0),
        (["--max_restarts"], 0),
        (["--max_restart", "3"], 0),
    ],
)
def test_a_supervisor_is_asked_for_by_the_option_alone(words, limit):
    assert asked_limit(words) == limit


@pytest.mark.parametrize(
    ("resume", "saved", "more"),
    [
        (None, True, ["--resume_from_checkpoint", "latest"]),
        (None, False, ["--resume_from_checkpoint", "latest"]),
        ("latest", False, ["--resume_from_checkpoint", "latest"]),
        ("other/checkpoint-3", True, ["--resume_from_checkpoint", "latest"]),
        ("other/checkpoint-3", False, ["--overwrite_output_dir", "True"]),  # from there once more
    ],
)
def test_a_run_goes_on_in_its_folder_from_its_own_checkpoint_or_where_it_began(resume, saved, more):
    assert words_again("out", resume, saved) == ["--output_dir", "out", *more]


def test_python_code_is_told_that_it_can_not_be_begun_anew():
    with pytest.raises(UserError, match="shardwright train; or catch"):
        check_limit(2, None)
    check_limit(0, None)
    check_limit(2, Restarts(2))
    with pytest.raises(UserError, match="--max_restarts"):
        job_of("llama_fsdp", max_restarts=-1)


# ---- a supervisor and its child ----

CHILD = """
import os, signal, sys, time
from shardwright.hosts.restarts import follow_supervisor, note, note_passing
told = follow_supervisor(os.environ)
print("child", told.count, told.why, sys.argv[1:], flush=True)
{act}
"""


def supervised(capfd: pytest.CaptureFixture[str], act: str, limit: int = 3) -> tuple[int, str]:
    """The exit code of a supervisor whose child does ``act``, and what both printed."""

    def start(more: Any, notes: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", CHILD.format(act=act), *more]
        return subprocess.Popen(command, env={**os.environ, NOTES: notes}, cwd=ROOT, process_group=0)

    code = Supervisor(limit, start).run()
    return code, "".join(capfd.readouterr())


def test_a_child_is_told_how_often_and_why_it_began_again_and_gets_the_words_that_it_left(capfd):
    act = "note(begun=True, more=['--output_dir', 'x'])\nif told.count == 2: sys.exit(0)\n"
    act += "if not told.count: os.kill(os.getpid(), 9)\n"
    act += "note_passing('write s3://me:secret@host/x: gone\\nhere')\nsys.exit(2)"
    code, said = supervised(capfd, act)
    assert code == 0, said
    assert "child 0  []" in said
    assert "restart: 1 of 3 in 1 s, after: it was killed (SIGKILL)" in said
    assert "child 1 it was killed (SIGKILL) ['--output_dir', 'x']" in said
    assert "restart: 2 of 3 in 2 s, after: write s3://host/x: gone\n" in said
    assert "child 2 write s3://host/x: gone ['--output_dir', 'x']" in said


@pytest.mark.parametrize(
    ("act", "code"),
    [
        ("note(begun=True); sys.exit(2)", 2),
        ("note_passing('no such disk'); sys.exit(2)", 2),  # before a step
        ("note(begun=True); os.abort()", 128 + signal.SIGABRT),
        ("os.kill(os.getpid(), 9)", 128 + signal.SIGKILL),
        # SIGTERM to the supervisor alone, which passes it on
        ("note(begun=True); os.kill(os.getppid(), signal.SIGTERM); time.sleep(600)", 128 + signal.SIGTERM),
        (
            "signal.signal(signal.SIGINT, lambda *a: os._exit(130)); os.kill(os.getppid(), signal.SIGINT); "
            "time.sleep(600)",
            INTERRUPTED,
        ),
    ],
)
def test_a_users_error_and_a_stop_end_a_supervisor_with_the_code_of_its_child(capfd, act, code):
    ended, said = supervised(capfd, act)
    assert ended == code, said
    assert "restart:" not in said


def test_a_limit_that_is_reached_ends_a_supervisor(capfd):
    code, said = supervised(capfd, "note(begun=True); note_passing('gone'); sys.exit(76)", limit=1)
    assert code == LOST
    assert said.count("restart:") == 1
    assert "error: exit code 76, after: gone" in said


def test_a_child_whose_supervisor_is_killed_does_not_live_on(tmp_path):
    notes = tmp_path / "notes"
    child = CHILD.format(act="time.sleep(600)")
    program = f"""
import os, subprocess, sys
from shardwright.hosts.restarts import NOTES, write_notes
write_notes({str(notes)!r}, {{"supervisor": os.getpid()}})
child = subprocess.Popen([sys.executable, "-c", {child!r}], env={{**os.environ, NOTES: {str(notes)!r}}})
child.wait()
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline().startswith("child 0")
        parent.kill()
        assert parent.stdout.read() == ""  # which ends once nobody holds it any more


# ---- supervisors of several hosts ----


def agreed(life: int, ends: list[RunEnd], limit: int, meetings: list[Meeting]) -> list[Verdict]:
    """What each of the supervisors hears, all of them at once."""
    heard: dict[int, Verdict] = {}

    def meet(host: int) -> None:
        heard[host] = meetings[host].agree(life, ends[host], limit)

    threads = [threading.Thread(target=meet, args=(host,)) for host in range(len(ends))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [heard[host] for host in range(len(ends))]


def meetings_of(count: int) -> list[Meeting]:
    port, meetings = free_ports(), [Meeting() for _ in range(count)]
    for host, meeting in enumerate(meetings):
        meeting.look(0, HostPlace(host, count, "localhost", port, "secret"))
    return meetings


def test_supervisors_come_to_one_verdict_life_after_life_and_leave_together():
    meetings = meetings_of(3)
    again = agreed(0, [MISSED, ABORTED, KILLED], 2, meetings)
    assert again == [Verdict(True, 0, "host 2 was killed (SIGKILL)", list(MORE))] * 3
    assert [meeting.first for meeting in meetings] == [True, False, False]
    assert agreed(1, [MISSED, REFUSED, RunEnd(1)], 2, meetings) == [Verdict(False, 2, "", [])] * 3
    threads = [threading.Thread(target=meeting.leave) for meeting in meetings]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [meeting.lost for meeting in meetings] == [""] * 3


def test_a_stranger_gives_supervisors_no_verdict_and_none_ends_a_failed_run_with_0():
    meetings = meetings_of(2)
    port = meetings[0]._place.port + 2
    stranger = dist.TCPStore("localhost", port, is_master=False, timeout=timedelta(seconds=60))
    for key, value in {"verdict 0": asdict(Verdict(False)), "failed 0": "", "ended 0 1": asdict(RunEnd(0))}.items():
        stranger.set(key, json.dumps(value))
    assert agreed(0, [RunEnd(1), RunEnd(1)], 2, meetings) == [Verdict(False, 1, "", [])] * 2
    meetings[0]._store.set("verdict 1", json.dumps(asdict(Verdict(False))))  # even by one who knows the secret
    assert meetings[1].agree(1, RunEnd(1), 2).code == 1


def test_a_supervisor_that_is_gone_ends_the_others_with_the_code_that_a_launcher_begins_them_again_after(monkeypatch):
    monkeypatch.setattr(supervisor, "SILENT", 2.0)
    meetings = meetings_of(3)
    verdicts = agreed(0, [MISSED, KILLED], 2, meetings)  # of three
    assert [(verdict.again, verdict.code) for verdict in verdicts] == [(False, LOST)] * 2
    assert "no sign of life of the supervisor of host 2" in verdicts[0].why


def test_supervisors_that_never_meet_end_so_too(monkeypatch):
    monkeypatch.setattr(supervisor, "CONNECT", 1.0)
    alone = Meeting()
    alone.look(0, HostPlace(1, 2, "localhost", free_ports()))
    verdict = alone.agree(0, KILLED, 2)
    assert (verdict.again, verdict.code) == (False, LOST)
    assert "could not be met" in alone.lost


# ---- the whole program ----

# scripts/train.py, whose first run can't write one checkpoint
FAILS_ONCE = f"""
import errno, json, os, sys
from shardwright.files.folder import Folder
real, first = Folder._open, True
def fails(self, name, mode):
    if "w" in mode and self.name == os.environ["FAILS"] and first:
        raise OSError(errno.EIO, "Input/output error")
    return real(self, name, mode)
Folder._open = fails
from shardwright.hosts.output_streams import exit_code
from shardwright.scripts import train
from tests.support.supervised import fork_runs
def begin():
    global first
    first = json.load(open(os.environ[{NOTES!r}]))["count"] == 0
if {NOTES!r} in os.environ:
    begin()
elif os.environ["FORKS"]:
    fork_runs(begin)
sys.exit(exit_code(train.main))
"""


def start(folder: Path, name: str, fails: str, *more: object, forks: str = "runs") -> Forked:
    words = [*tiny_run(folder), "--max_steps", 12, "--logging_steps", 2, "--save_steps", 4, *more]
    environment = {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2", "FAILS": fails, "FORKS": forks}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment.pop("NPROC", None)
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return Forked("-c", FAILS_ONCE, *words, "--output_dir", folder / name, env=environment, cwd=ROOT, **pipes)


def run(folder: Path, name: str, fails: str, *more: object) -> subprocess.CompletedProcess[str]:
    with start(folder, name, fails, *more) as process:
        said = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, *said)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("restarts")
    write_text(folder)
    done = run(folder, "whole", "")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fails", "goes_on"), [("checkpoint-8", "checkpoint-4\n"), ("checkpoint-4", "training starts anew")]
)
def test_a_folder_that_fails_once_costs_a_restart_and_no_loss(place, fails, goes_on):
    done, output = run(place, f"out-{fails}", fails, "--max_restarts", 2), place / f"out-{fails}"
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("restart: 1 of") == 1
    assert "restart: 2 of" not in done.stdout
    assert f"restart: 1 of 2 in 1 s, after: a checkpoint in {output}: write" in done.stdout
    assert goes_on in done.stdout
    assert "nor could the model be saved" not in done.stdout
    assert losses(output) == losses(place / "whole")
    weights = "model/model.safetensors"
    assert (output / weights).read_bytes() == (place / "whole" / weights).read_bytes()
    # where the time went, over both processes
    (summary,) = entries(output, "train_runtime")
    first, second = read_lives((output / "lives.json").read_bytes())
    assert (first.after, second.first) == ("", 4 if fails == "checkpoint-8" else 0)
    assert "Input/output error" in second.after
    assert summary["restarts"] == 1
    assert summary["seconds/between"] == pytest.approx(second.began - first.ended, abs=0.01)
    assert summary["seconds/between"] > 1  # the wait, and a start of Python
    assert summary["seconds/again"] > 0
    assert 0 < summary["goodput"] < 1
    page = (output / "report.html").read_text()
    assert "2 processes, one after another (1 of them begun by the run itself)" in page
    assert "between a failure and the restart after it" in page


@pytest.mark.slow
def test_without_restarts_left_the_run_ends_with_what_was_learned_as_it_always_did(place):
    done = run(place, "none", "checkpoint-8")
    assert done.returncode == LOST, "launchers start it again"
    assert "restart: 1 of" not in done.stdout
    assert "Input/output error" in done.stderr
    assert (place / "none" / "model" / "model.safetensors").exists()


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_and_one_signal_to_its_supervisor_stops_it_with_a_checkpoint(place):
    output = place / "killed"

    def whole(step: int) -> bool:
        return (output / f"checkpoint-{step}" / manifest.MANIFEST).exists()

    options = ("--max_restarts", 2, "--max_steps", 100_000, "--save_total_limit", 50, "--eval_on_start", "false")
    with start(place, "killed", "", *options, forks="") as process:  # each run is its command, begun anew
        wait_until(lambda: whole(4))
        os.kill(child_of(process.pid), signal.SIGKILL)
        wait_until(lambda: len(read_lives((output / "lives.json").read_bytes())) == 2)
        process.send_signal(signal.SIGTERM)
        said, errors = process.communicate()
    assert process.returncode == PREEMPTED, errors
    assert "restart: 1 of 2 in 1 s, after: it was killed (SIGKILL)" in said
    assert "preempted (SIGTERM) after step" in said
    assert "restart: 2 of" not in said
