"""--max_restarts on several hosts: all begin again together after what is passing, and nothing is lost."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hosts import HostLives, assert_same_losses, child_of, log_of, same_weights, wait_until
from tests.support.lives import tiny_run, write_text
from tests.support.tpu_compiler import needs_libtpu
from trainer.checkpoint import manifest
from trainer.report.goodput import read_lives

pytestmark = [pytest.mark.slow, needs_libtpu]  # whose table of functions the stand-in takes
STEPS = 24


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("restarts")
    write_text(made)
    # without dropout, which draws for each micro-batch anew
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.0}))
    return made


@pytest.fixture(scope="module")
def lives(home) -> Iterator[HostLives]:
    with HostLives(SHARDWRIGHT_CACHE=str(home / "cache")) as found:
        yield found


@pytest.fixture(scope="module")
def job(home) -> list[object]:
    return [
        *(*tiny_run(home), "--max_steps", STEPS, "--logging_steps", 2, "--save_steps", 4, "--learning_rate", 1e-3),
        *("--gradient_accumulation_steps", 2, "--resume_from_checkpoint", "latest"),
    ]


@pytest.fixture(scope="module")
def whole(home, lives, job) -> Path:
    """The output of the job on one host that is never stopped."""
    assert lives.run(home / "logs", *job, "--output_dir", home / "one", hosts=1) == [0]
    return home / "one"


def saved(output: Path, step: int) -> bool:
    return (output / f"checkpoint-{step}" / manifest.MANIFEST).exists()


@pytest.mark.parametrize("host", [0, 1])
def test_when_the_training_of_one_host_is_killed_all_begin_again_and_nothing_is_lost(
    home, lives, job, whole, host, tmp_path
):
    output, logs = tmp_path / "out", tmp_path / "logs"
    supervisors = lives.start(logs, *job, "--max_restarts", 2, "--output_dir", output, hosts=2)
    wait_until(lambda: saved(output, 4))
    os.kill(child_of(supervisors[host]), signal.SIGKILL)
    assert lives.wait() == [0, 0], "\n".join(log_of(logs, each)[-3000:] for each in (0, 1))
    assert f"restart: 1 of 2 in 1 s, after: host {host} was killed (SIGKILL)" in log_of(logs, 0)
    assert "restart: 2 of" not in log_of(logs, 0)
    assert "restart:" not in log_of(logs, 1)
    assert "resume:" in log_of(logs, 0)
    assert_same_losses(output, whole)
    assert same_weights(output, whole)
    assert [bool(life.after) for life in read_lives((output / "lives.json").read_bytes())] == [False, True]
