"""A seeded part of `tests/fuzz.py`, and that it tells the cases apart: it can run for hours by itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.texts import run_python

CASES = 500  # a quarter of a minute of an idle core
HARMFUL = """
import json, sys
from hypothesis import strategies as st
import torch
from tests.support.fuzz import worker
from tests.support.fuzz.kind import Kind
from shardwright.errors import UserError

def run(made, case, scratch):
    if case == "reads":
        return
    if case == "refuses":
        raise UserError(asked="a", found="b", why="c", instead="d")
    if case == "tells all":
        raise UserError(asked="a", found="b" * 30_000, why="c", instead="d")
    if case == "exits":
        sys.exit(2)
    if case == "raises":
        raise KeyError("a")
    if case == "passes over":
        try:
            while True:
                pass
        except Exception:
            return
    if case == "hangs":
        (b"a" * 40_000_000 + b"c").find(b"a" * 20_000 + b"b" + b"a" * 20_000) and print(sum(range(10**11)))
    if case == "touches":
        torch.ones(600 << 20, dtype=torch.uint8)
    if case == "claims":
        torch.empty(1 << 40)
    if case == "dies":
        import os
        os.kill(os.getpid(), 11)

kind, found = Kind(lambda folder: None, st.none(), run, 1), {}
for case in ("reads", "refuses", "tells all", "exits", "raises", "passes over", "hangs", "touches", "claims", "dies"):
    worker.SECONDS, worker.KILL_AFTER = 60, 180
    if case == "passes over":
        worker.SECONDS = 1
    if case == "hangs":
        worker.KILL_AFTER = 5
    tally = worker.Tally()
    worker.run_case(kind, case, tally)
    ((outcome, count),) = tally.outcomes.items()
    found[case] = [outcome, *(why.strip().splitlines()[-1] for _, why in tally.failures)]
print(json.dumps(found))
"""


def test_a_case_that_neither_ends_in_success_nor_in_a_refusal_fails():
    found = json.loads(run_python(HARMFUL, PYTHONPATH=str(ROOT)))
    assert [found[case] for case in ("reads", "refuses", "exits")] == [["succeeded"], ["refused"], ["refused"]]
    words = {
        "tells all": "characters",
        "raises": "KeyError: 'a'",
        "passes over": "more than 1 s",
        "hangs": "did not end in 5 s",
        "touches": "bytes of memory",
        "claims": "can't allocate memory",
        "dies": "exit code -11",
    }
    for case, word in words.items():
        outcome, why = found[case]
        assert outcome == "failed"
        assert word in why


@pytest.mark.slow
def test_whatever_is_mutated_is_read_or_refused_in_bounded_time_and_memory(tmp_path: Path):
    command = [sys.executable, str(ROOT / "tests" / "fuzz.py"), "--cases", str(CASES), "--failures", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env={**os.environ}, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    kinds = [line.split() for line in done.stdout.splitlines()[1:]]
    assert len(kinds) == 11
    for _, cases, succeeded, refused, failed in kinds:
        assert int(cases) == int(succeeded) + int(refused) + int(failed)
        assert min(int(succeeded), int(refused)) > 0  # else nothing was tried
    assert int(kinds[-1][1]) >= CASES
