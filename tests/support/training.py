"""`scripts/train.py` in a process of its own, as a user starts it."""

from __future__ import annotations

import os
import subprocess

from tests.support import fork_server
from tests.support.paths import ROOT

SMALL = ["--sequence_length", "64", "--per_device_train_batch_size", "1", "--logging_steps", "5"]


def environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in {"PJRT_DEVICE", "CPU_NUM_DEVICES", "NPROC"}}


def train(*arguments: object) -> subprocess.CompletedProcess[str]:
    return fork_server.run(ROOT / "scripts" / "train.py", *arguments, env=environment())
