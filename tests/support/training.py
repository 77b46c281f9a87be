"""`scripts/train.py` in a process of its own, as a user starts it."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.paths import ROOT

SMALL = ["--sequence_length", "64", "--per_device_train_batch_size", "1", "--logging_steps", "5"]


def command(*arguments: object) -> list[str]:
    return [sys.executable, str(ROOT / "scripts" / "train.py"), *map(str, arguments)]


def environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in {"PJRT_DEVICE", "CPU_NUM_DEVICES", "NPROC"}}


def train(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=900, env=environment())
