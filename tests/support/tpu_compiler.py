"""The mark of tests that compile for a TPU, and answers in its compiler's place for what asks it many times."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest

from shardwright.compile import compile_job as compile_job
from shardwright.compile.lowered_graph import TRAIN_STEP
from shardwright.compile.report.report import CompileReport
from shardwright.job import Job

# `[test]` installs libtpu, but it has wheels for x86-64 Linux alone.
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="LIBTPU IS NOT INSTALLED: no TPU compile is tested. pip install -e '.[tpu]'",
)


def asked_of(monkeypatch: pytest.MonkeyPatch, answer: Callable[[str, Job], CompileReport]) -> list[str]:
    """Has ``answer`` say what a job's graph takes, in place of minutes of libtpu; the graphs asked, as they come."""
    asked: list[str] = []

    def compiled(graph_of: tuple[str, Job], *_: Any) -> CompileReport:
        asked.append(graph_of[0])
        return answer(*graph_of)

    monkeypatch.setattr(compile_job, "lower", lambda job, graph=TRAIN_STEP, **_: (graph, job))
    monkeypatch.setattr(compile_job, "compile_for", compiled)
    return asked
