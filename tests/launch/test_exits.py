"""Exit codes × engines: the written files make each engine react properly to every exit code."""

from __future__ import annotations

import builtins
import csv
import functools
import itertools
import os
import pickle
import struct
import subprocess
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import aiohttp
import botocore.exceptions
import jinja2
import jsonschema
import pyarrow as pa
import pytest
import safetensors
import urllib3
import yaml
from huggingface_hub.errors import HfHubHTTPError

from shardwright.errors import BUG, INTERRUPTED, LOST, PREEMPTED, exit_code_of
from shardwright.hosts.output_streams import exit_code
from shardwright.launch.exits import RULES, USER_ERROR
from shardwright.launch.targets import TARGETS
from shardwright.scripts.train import EXIT_CODES
from tests.support.launching import jobset, planned, stand_in
from tests.support.paths import ROOT

EVERY_CODE = range(256)


class Sequel(StrEnum):
    """The proper reaction to an exit code."""

    DONE = "nothing: it is done"
    AGAIN = "start again"
    NEVER = "never start again"
    EITHER = "either; if again, then so many times at most"


@dataclass(frozen=True)
class Exit:
    """The meaning of an exit code of `scripts/train.py`, and the proper reaction."""

    meaning: str
    sequel: Sequel


# 128 + N: ended by signal N. The loss of a host ends the others with LOST, with 134 (by torch_xla's coordinator), or
# with 1 where a computation raises first.
CODES: dict[int, Exit] = {
    0: Exit("done", Sequel.DONE),
    1: Exit("an error of a device, a network or a library that nobody foresaw, or another host is lost", Sequel.EITHER),
    USER_ERROR: Exit("something asked for can't be", Sequel.NEVER),
    BUG: Exit("an error that nobody foresaw, and that comes again", Sequel.NEVER),
    PREEMPTED: Exit("SIGTERM, and what was learned is in a checkpoint", Sequel.AGAIN),
    LOST: Exit("another host is lost, a store failed for now, or nothing moved", Sequel.AGAIN),
    INTERRUPTED: Exit("Ctrl-C, which nobody presses on a cluster", Sequel.EITHER),
    134: Exit("aborted: a runtime's check failed, or another host is lost", Sequel.EITHER),
    135: Exit("bus error: a mapped file's disk is gone", Sequel.EITHER),
    137: Exit("killed: out of memory, or no time left to save", Sequel.EITHER),
    139: Exit("segmentation fault", Sequel.EITHER),
    143: Exit("SIGTERM before the first step: nothing was learned", Sequel.AGAIN),
}


PLACES = {  # of an engine's rule, in the written files
    "xpk": "`--restart-on-exit-codes`",
    "jobset": "`podFailurePolicy`: FailJob; `failurePolicy`: FailJobSet",
    "skypilot": "`job_recovery`: recover_on_exit_codes",
    "tpu-vm": "the loop in `host.sh`",
    "ray": "the loop of `shardwright.launch.ray_hosts`",
}
UNBOUNDED = {"skypilot"}  # engines that do not count restarts


def table() -> str:
    """The exit codes × the engines, as the Markdown table of docs/launch.md."""
    rows = [[str(code), each.meaning, *(_cell(code, engine) for engine in RULES)] for code, each in CODES.items()]
    lines = [f"| {' | '.join(row)} |" for row in (["exit code", "what it says", *RULES], *rows)]
    lines.insert(1, "|---" * (2 + len(RULES)) + "|")
    return "\n".join([*lines, "| | *where that stands* | " + " | ".join(PLACES[engine] for engine in RULES) + " |"])


def _cell(code: int, engine: str) -> str:
    if code == 0:
        return "done"
    return ("again" if engine in UNBOUNDED else "again, counted") if RULES[engine](code) else "fails"


def jobset_restarts(code: int) -> bool:
    """As Kubernetes and JobSet decide: rules in order, and without a match a failed Job restarts all."""
    spec = jobset()["spec"]
    job = spec["replicatedJobs"][0]["template"]["spec"]
    assert job["backoffLimit"] == 0  # a failed pod is a failed Job
    assert job["template"]["spec"]["restartPolicy"] == "Never"  # which a pod failure policy needs
    matches: dict[str, Callable[[Any], bool]] = {"In": lambda v: code in v, "NotIn": lambda v: code not in v}
    reason = "BackoffLimitExceeded"
    for rule in job["podFailurePolicy"]["rules"]:
        on = rule["onExitCodes"]
        assert 0 not in on["values"]
        if rule["action"] == "FailJob" and matches[on["operator"]](on["values"]):
            reason = "PodFailurePolicy"
    for rule in spec["failurePolicy"]["rules"]:
        if rule["action"] == "FailJobSet" and reason in rule["onJobFailureReasons"]:
            return False
    return code != 0


def xpk_restarts(code: int) -> bool:
    """As xpk 1.16 writes its JobSet: these codes, and those that it is told."""
    command = planned("xpk").commands[0]
    told = command[command.index("--restart-on-exit-codes") + 1]
    return code == 42 or 127 <= code <= 255 or code in map(int, told.split(","))


def skypilot_restarts(code: int) -> bool:
    """As SkyPilot 0.14 decides where the hosts are all there."""
    recovery = yaml.safe_load(planned("skypilot").files["skypilot.yaml"])["resources"]["job_recovery"]
    return code in recovery["recover_on_exit_codes"] or (code != 0 and recovery["max_restarts_on_errors"] > 0)


@pytest.fixture(scope="module")
def host_loop(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[int, int]]:
    """Runs the loop of a TPU VM's host with a run that ends with given codes: its exit code, and the starts."""
    numbers = itertools.count()

    def run(*codes: int, **changes: Any) -> tuple[int, int]:
        folder = tmp_path_factory.mktemp(f"host{next(numbers)}")
        (folder / "host.sh").write_text(planned("tpu-vm", **changes).files["host.sh"])
        stand_in(folder / "bin", "curl", "echo 0")
        # the next code of the list each time, and the last one for ever
        stand_in(folder / "bin", "sudo", f'codes=({" ".join(map(str, codes))}); echo x >> starts; n=$(wc -l < starts); '
                 'exit ${codes[$((n < ${#codes[@]} ? n - 1 : ${#codes[@]} - 1))]}')  # fmt: skip
        environment = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PAUSE": "0"}
        done = subprocess.run(["bash", "host.sh"], cwd=folder, env=environment, capture_output=True, timeout=60)
        return done.returncode, len((folder / "starts").read_text().splitlines())

    return run


def test_every_target_has_a_rule():
    assert list(RULES) == list(TARGETS)


@pytest.mark.parametrize("code", EVERY_CODE)
def test_what_is_written_is_the_rule_of_the_engine(code):
    assert jobset_restarts(code) == RULES["jobset"](code)
    assert xpk_restarts(code) == RULES["xpk"](code)
    assert skypilot_restarts(code) == RULES["skypilot"](code)


@pytest.mark.parametrize("code", CODES)
def test_the_loop_on_a_tpu_vm_restarts_as_its_rule_says_and_then_gives_up(code, host_loop):
    restarts = 2 if RULES["tpu-vm"](code) else 0
    assert host_loop(code, max_restarts=2) == (code, 1 + restarts)


def test_the_loop_on_a_tpu_vm_ends_once_the_run_is_done(host_loop):
    assert host_loop(75, 1, 0) == (0, 3)


@pytest.mark.parametrize("engine", RULES)
@pytest.mark.parametrize("code", CODES)
def test_an_engine_does_what_should_follow_a_code(code, engine):
    restarts, wanted = RULES[engine](code), CODES[code].sequel
    if wanted == Sequel.AGAIN:
        assert restarts
    elif wanted in (Sequel.NEVER, Sequel.DONE):
        assert not restarts
    else:
        assert not restarts or engine not in UNBOUNDED


# Python's errors that a disk, a network, a device or the host's memory may raise once, and the next time not
MAY_PASS = {OSError, RuntimeError, EOFError, MemoryError, BufferError, SystemError, ReferenceError, Exception}
NEVER_RAISED_BY_A_RUN = (Warning, StopIteration, StopAsyncIteration, ExceptionGroup)


def test_an_error_of_python_that_comes_again_is_never_restarted_and_one_that_may_pass_is():
    kinds = [kind for kind in vars(builtins).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    kinds = [kind for kind in kinds if not issubclass(kind, NEVER_RAISED_BY_A_RUN)]
    assert len(kinds) > 40
    passing = {OSError, *OSError.__subclasses__()} - {IsADirectoryError, NotADirectoryError} | MAY_PASS
    for kind in kinds:
        code = exit_code_of(kind.__new__(kind))
        may_pass = kind in passing or issubclass(kind, ConnectionError) or kind.__module__ != "builtins"
        assert code == (1 if may_pass else BUG), kind
        assert may_pass or not any(rule(code) for rule in RULES.values()), kind


# errors that libraries derive from Exception alone
OF_LIBRARIES = (
    *(jinja2.TemplateError, safetensors.SafetensorError, yaml.YAMLError, struct.error, zlib.error, csv.Error),
    *(pickle.UnpicklingError, pa.ArrowException, jsonschema.ValidationError),
)
OVER_A_NETWORK = (botocore.exceptions.ClientError, aiohttp.ClientError, urllib3.exceptions.HTTPError, HfHubHTTPError)


def test_an_error_of_a_library_comes_again_unless_it_speaks_over_a_network():
    for kinds, code in ((OF_LIBRARIES, BUG), (OVER_A_NETWORK, 1)):
        assert {kind: exit_code_of(kind.__new__(kind)) for kind in kinds} == dict.fromkeys(kinds, code)


def test_such_an_error_ends_a_script_with_its_traceback_and_code(capsys):
    def main() -> None:
        (ROOT / "tests").read_bytes()

    assert exit_code(main) == BUG
    assert "IsADirectoryError" in capsys.readouterr().err
    with pytest.raises(RuntimeError):
        exit_code(functools.partial(_raise, RuntimeError("UNAVAILABLE: Socket closed")))


def _raise(error: Exception) -> None:
    raise error


def test_restarts_are_bounded_where_the_rule_says_so():
    assert jobset(max_restarts=7)["spec"]["failurePolicy"]["maxRestarts"] == 7
    command = planned("xpk", max_restarts=7).commands[0]
    assert command[command.index("--max-restarts") + 1] == "7"
    assert "--max_restarts 7" in " ".join(planned("ray", max_restarts=7).commands[0])


def test_the_table_has_every_code_that_train_says_it_ends_with():
    said = {int(line.split()[0]) for line in EXIT_CODES.splitlines()[1:]}
    assert said <= set(CODES)


def test_the_table_in_the_docs_is_that_of_the_code():
    assert table() in (ROOT / "docs" / "launch.md").read_text()
