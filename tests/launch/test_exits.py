"""Exit codes × engines: what is written makes each engine do what should follow a code, for every code there is."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from shardwright.launch.exits import CODES, RULES, Wanted, table
from shardwright.launch.targets import TARGETS
from shardwright.scripts.train import EXIT_CODES
from tests.support.launching import jobset, planned, stand_in
from tests.support.paths import ROOT

EVERY_CODE = range(256)


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
    assert jobset_restarts(code) == RULES["jobset"].restarts(code)
    assert xpk_restarts(code) == RULES["xpk"].restarts(code)
    assert skypilot_restarts(code) == RULES["skypilot"].restarts(code)


@pytest.mark.parametrize("code", CODES)
def test_the_loop_on_a_tpu_vm_restarts_as_its_rule_says_and_then_gives_up(code, host_loop):
    restarts = 2 if RULES["tpu-vm"].restarts(code) else 0
    assert host_loop(code, max_restarts=2) == (code, 1 + restarts)


def test_the_loop_on_a_tpu_vm_ends_once_the_run_is_done(host_loop):
    assert host_loop(75, 1, 0) == (0, 3)


@pytest.mark.parametrize("engine", RULES)
@pytest.mark.parametrize("code", CODES)
def test_an_engine_does_what_should_follow_a_code(code, engine):
    restarts, wanted = RULES[engine].restarts(code), CODES[code].wanted
    if wanted == Wanted.AGAIN:
        assert restarts
    elif wanted in (Wanted.NEVER, Wanted.DONE):
        assert not restarts
    else:
        assert not restarts or RULES[engine].bounded


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
